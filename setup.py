"""Builds the native CPU kernels along with the package; everything else is in pyproject.toml.

The library is loaded by ctypes and knows nothing of Python, so one wheel fits every version of it:
``py3-none-PLATFORM``. A wheel without the library is ``py3-none-any``; the engine then runs on its plain-torch path.
``DRAFTWISE_KERNELS`` says which one is wanted: ``torch``, without; ``native``, with, or there is no wheel; anything
else, with if there is a compiler and it can. ``CXX`` names the compiler, and with it the platform that the library is
for; the wheel's has to be told then (``scripts/wheels``).
"""

import importlib.util
import os
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
KERNELS = Path("src/draftwise/kernels/cpu")
WANTED = os.environ.get("DRAFTWISE_KERNELS", "auto")

spec = importlib.util.spec_from_file_location("_draftwise_build", ROOT / KERNELS / "build.py")
assert spec is not None and spec.loader is not None
builder = importlib.util.module_from_spec(spec)
spec.loader.exec_module(builder)


class BuildKernels(build_ext):
    """Compiles with `draftwise.kernels.cpu.build`: a plain library for ctypes, no Python extension."""

    def run(self) -> None:
        for old in self._folder().glob("_native.*"):  # of an earlier build, perhaps for another platform
            if not self._in_place():
                old.unlink()
        try:
            target = self._folder() / builder.library_name(builder.find_compiler())
            builder.build(ROOT / target, Path(self.build_temp, "kernels"))
        except builder.BuildError as error:
            if WANTED == "native":
                raise
            print(f"warning: native kernels not built, the torch path will be used: {error}", file=sys.stderr)

    def _in_place(self) -> bool:
        return bool(self.inplace or self.editable_mode)

    def _folder(self) -> Path:
        return KERNELS if self._in_place() else Path(self.build_lib, "draftwise/kernels/cpu")

    def get_outputs(self) -> list[str]:
        return [str(path) for path in self._folder().glob("_native.*")]

    def get_output_mapping(self) -> dict[str, str]:
        return {}


class Wheel(bdist_wheel):
    """Its tag says what is inside: a library for a platform, or none."""

    def get_tag(self) -> tuple[str, str, str]:
        platform = super().get_tag()[2]
        has_library = not self.root_is_pure and bool(self.get_finalized_command("build_ext").get_outputs())
        return ("py3", "none", platform if has_library else "any")


setup(
    ext_modules=[] if WANTED == "torch" else [Extension("draftwise.kernels.cpu._native", sources=[])],
    cmdclass={"build_ext": BuildKernels, "bdist_wheel": Wheel},
)
