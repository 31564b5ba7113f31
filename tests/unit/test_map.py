"""The rooms that docs/architecture.md draws, the files that pages name, and modules that can be imported first."""

import importlib.util
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "draftwise"
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")

IMPORT_EACH = """
import os, sys
import torch, numpy, safetensors, transformers  # once, for all
for name in sys.argv[1:]:
    child = os.fork()
    if child == 0:
        try:
            __import__(name)
        except BaseException as error:
            print(f"{name}: {type(error).__name__}: {error}", flush=True)
            os._exit(1)
        os._exit(0)
    os.waitpid(child, 0)
"""


def floors_of_the_contract() -> list[set[str]]:
    """The floors that the linter of imports knows, from the top."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    (layers,) = (c["layers"] for c in settings["tool"]["importlinter"]["contracts"] if c["type"] == "layers")
    return [set(layer.split(" | ")) for layer in layers if layer != "__main__"]


def floors_of_the_picture() -> list[set[str]]:
    return [set(floor.split()) for floor in re.findall(r"^ │ (.*?) │", PAGE, re.MULTILINE)]


def lines_of_the_table() -> dict[str, str]:
    """What is said of each room."""
    rows = re.findall(r"^\| `(\w+)` \| (.+) \|$", PAGE.partition("## One step")[0], re.MULTILINE)
    assert len({room for room, _ in rows}) == len(rows), "a room has two lines"
    return dict(rows)


def test_the_picture_shows_the_floors_that_are_enforced() -> None:
    assert floors_of_the_picture() == floors_of_the_contract()


def test_every_room_has_a_line() -> None:
    rooms = {p.parent.name for p in SOURCE.glob("*/__init__.py")}
    rooms |= {p.stem for p in SOURCE.glob("*.py") if not p.stem.startswith("__")}
    assert lines_of_the_table().keys() == rooms


def test_every_folder_stands_in_the_line_of_its_room() -> None:
    lines = lines_of_the_table()
    for path in SOURCE.glob("*/*/**/__init__.py"):
        room, *_, folder = path.parent.relative_to(SOURCE).parts
        assert f"`{folder}/`" in lines[room], f"{room} does not mention {folder}/"


def test_files_that_pages_name_are_there() -> None:
    missing = []
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        for name in re.findall(r"`(\w+(?:/\w+)+\.(?:py|cpp|h))", page.read_text(encoding="utf-8")):
            if not any((folder / name).is_file() for folder in (ROOT, SOURCE, SOURCE / "kernels" / "cpu")):
                missing.append(f"{page.name}: {name}")
    assert not missing


@pytest.mark.slow
def test_every_module_can_be_imported_first() -> None:
    """Each in a process of its own: no module relies on another one having been imported before it."""
    names = []
    for path in sorted(SOURCE.rglob("*.py")):
        if path.stem != "__main__":
            parts = ("draftwise", *path.relative_to(SOURCE).with_suffix("").parts)
            names.append(".".join(parts).removesuffix(".__init__"))
    if importlib.util.find_spec("triton") is None:
        names = [name for name in names if not name.startswith("draftwise.kernels.triton.device.")]
    assert len(names) > 250
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", IMPORT_EACH, *names],
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout == ""
