"""Functions that run on the device, for Triton's compiler or interpreter. The modules one level up launch them.

The compiler makes code of its own for each alignment of a pointer and for whole numbers that are 1 or multiples of 16.
Where that gains nothing (numbers of requests, nodes and parts, and pointers into tables of a batch), `compiled.kernel`
tells it not to: a request would wait seconds for code that differs in nothing.

Launchers name a file's kernels as ``device.rows.rms_norm``: the file, and Triton, are imported when that is first read.
"""

import importlib
from types import ModuleType


def __getattr__(name: str) -> ModuleType:
    if name.startswith("_"):
        raise AttributeError(name)
    return importlib.import_module(f"{__name__}.{name}")
