"""``python -m draftwise.bench KIND``: as ``draftwise bench KIND``. Kind ``gpu`` needs nothing but torch, numpy and
Triton, so that it runs from the source tree on a machine where nothing is installed."""

from __future__ import annotations

import runpy
import sys


def main() -> int:
    """The exit code."""
    arguments = sys.argv[1:]
    if arguments[:1] == ["gpu"]:
        from draftwise.bench.gpu.command import main as gpu

        return gpu(arguments[1:])
    sys.argv[1:] = ["bench", *arguments]
    runpy.run_module("draftwise", run_name="__main__")  # the commands stand above: they are run, not imported
    return 0


if __name__ == "__main__":
    sys.exit(main())
