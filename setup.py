"""Builds the native CPU kernels along with the package; everything else is in pyproject.toml.

Without a compiler the installation succeeds all the same, and the engine runs on its plain-torch path.
"""

import importlib.util
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
KERNELS = Path("src/draftwise/kernels/cpu")


class BuildKernels(build_ext):
    """Compiles with `draftwise.kernels.cpu.build`: a plain library for ctypes, no Python extension."""

    def run(self) -> None:
        spec = importlib.util.spec_from_file_location("_draftwise_build", ROOT / KERNELS / "build.py")
        assert spec is not None and spec.loader is not None
        builder = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(builder)
        try:
            builder.build(ROOT / self._library(), Path(self.build_temp, "kernels"))
        except builder.BuildError as error:
            print(f"warning: native kernels not built, the torch path will be used: {error}", file=sys.stderr)

    def _library(self) -> Path:
        base = (
            KERNELS if self.inplace or self.editable_mode else Path(self.build_lib, "draftwise/kernels/cpu")
        )
        return base / "_native.so"

    def get_outputs(self) -> list[str]:
        return [str(self._library())] if self._library().exists() else []

    def get_output_mapping(self) -> dict[str, str]:
        return {}


setup(
    ext_modules=[Extension("draftwise.kernels.cpu._native", sources=[])],
    cmdclass={"build_ext": BuildKernels},
)
