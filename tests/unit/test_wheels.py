"""What `pip wheel` makes: with the library for a platform, without it for all; and what is installed from it works."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from draftwise.kernels.cpu import build

ROOT = Path(__file__).parents[2]
KERNELS = "draftwise/kernels/cpu"
pytestmark = pytest.mark.slow


def run(command: Sequence[object], folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    hidden = ("PYTHONPATH", "DRAFTWISE_KERNELS", "DRAFTWISE_CPU_LIBRARY", "DRAFTWISE_ISA")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    return subprocess.run(
        [str(part) for part in command],
        cwd=folder,
        env={**environment, **variables},
        capture_output=True,
        text=True,
    )


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An unpacked sdist, beside it the objects that the checkout's library was made of."""
    pytest.importorskip("setuptools")
    folder = tmp_path_factory.mktemp("sdist")
    checkout = folder / "checkout"
    for name in ("src", "setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"):
        if (ROOT / name).is_dir():
            ignored = shutil.ignore_patterns("*.egg-info", "__pycache__", "_native.*")
            shutil.copytree(ROOT / name, checkout / name, ignore=ignored)
        else:
            shutil.copy(ROOT / name, checkout / name)
    make = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"
    done = run([sys.executable, "-c", make, folder], checkout)
    assert done.returncode == 0, done.stderr
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as packed:
        packed.extractall(folder, filter="data")
    return folder / archive.name.removesuffix(".tar.gz")


def make_wheel(source: Path, into: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-w", into, "."]
    return run([*command, "--no-index", "-v"], source, **variables)


def installed(wheel: Path, folder: Path) -> Path:
    """The scripts of a new environment that holds the wheel, and finds what it depends on in the present one."""
    venv.create(folder, with_pip=False)
    scripts = folder / ("Scripts" if sys.platform == "win32" else "bin")
    python = scripts / "python"
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel]
    done = run(pip, folder)
    assert done.returncode == 0, done.stderr
    asked = run([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], folder)
    Path(asked.stdout.strip(), "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return scripts


def kernels_of(scripts: Path, folder: Path) -> str:
    done = run([scripts / "draftwise", "env", "--json"], folder)
    assert done.returncode == 0, done.stderr
    where = run([scripts / "python", "-c", "import draftwise; print(draftwise.__file__)"], folder)
    assert str(scripts.parent.resolve()) in str(Path(where.stdout.strip()).resolve())
    return str(json.loads(done.stdout)["kernels"])


def libraries(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as packed:
        return [name for name in packed.namelist() if Path(name).name.startswith("_native.")]


def test_an_sdist_holds_the_sources_of_the_kernels(source: Path) -> None:
    packed = source / "src" / KERNELS / "csrc"
    assert {path.name for path in packed.iterdir()} == {path.name for path in build.SOURCES.iterdir()}
    assert build.source_id(packed) == build.source_id()


def test_without_kernels(source: Path, tmp_path: Path) -> None:
    done = make_wheel(source, tmp_path, DRAFTWISE_KERNELS="torch")
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.endswith("-py3-none-any.whl")
    assert libraries(wheel) == []
    said = kernels_of(installed(wheel, tmp_path / "venv"), tmp_path)
    assert "torch" in said and "not built" in said


def test_with_kernels(source: Path, tmp_path: Path) -> None:
    try:
        build.find_compiler()
    except build.BuildError as error:
        pytest.skip(str(error))
    # the objects of the checkout serve, since they are found by what they were made of
    build.build(tmp_path / build.LIBRARY, build.object_cache())
    version = f"{sys.version_info.major}{sys.version_info.minor}"
    temporary = f"build/temp.{sysconfig.get_platform()}-cpython-{version}/kernels"
    shutil.copytree(build.object_cache(), source / temporary, dirs_exist_ok=True)
    done = make_wheel(source, tmp_path, DRAFTWISE_KERNELS="native")
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
    if sys.platform != "darwin":  # where the system's version is part of it
        assert wheel.name.endswith(f"-py3-none-{platform}.whl")
    assert libraries(wheel) == [f"{KERNELS}/{build.LIBRARY}"]
    assert "native" in kernels_of(installed(wheel, tmp_path / "venv"), tmp_path)


def test_without_a_compiler(source: Path, tmp_path: Path) -> None:
    """A wheel all the same, whose tag does not promise what is not in it; unless kernels were asked for."""
    done = make_wheel(source, tmp_path, CXX="no-such-compiler")
    assert done.returncode == 0, done.stderr
    assert "native kernels not built" in done.stdout + done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.endswith("-py3-none-any.whl")
    assert libraries(wheel) == []
    wheel.unlink()
    done = make_wheel(source, tmp_path, CXX="no-such-compiler", DRAFTWISE_KERNELS="native")
    assert done.returncode != 0
    assert "no C++ compiler found" in done.stdout + done.stderr
    assert not list(tmp_path.glob("*.whl"))
