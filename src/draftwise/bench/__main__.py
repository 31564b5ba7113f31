"""``python -m draftwise.bench KIND``: as ``draftwise bench KIND``. Kind ``gpu`` needs nothing but torch, numpy and
Triton, so that it runs from the source tree on a machine where nothing is installed."""

from __future__ import annotations

import sys


def main() -> int:
    """The exit code."""
    arguments = sys.argv[1:]
    if arguments[:1] == ["gpu"]:
        from draftwise.bench.gpu.command import main as gpu

        return gpu(arguments[1:])
    from draftwise.cli.main import main as command

    return command(["bench", *arguments])


if __name__ == "__main__":
    sys.exit(main())
