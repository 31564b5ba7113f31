"""``python -m draftwise`` and the ``draftwise`` command."""

from draftwise.cli import signals

signals.install()  # before anything else is imported

import sys  # noqa: E402
from typing import NoReturn  # noqa: E402

from draftwise.cli.main import main  # noqa: E402


def start() -> NoReturn:
    """Run the command line of this process, and end it."""
    code = main()
    signals.finish(code)
    sys.exit(code)


if __name__ == "__main__":
    start()
