"""A process that trains beside the one that started it (`parallel.with_ranks`).

Its arguments are bytes and numbers, so that it is here before anything slow is imported.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import sys
import threading

from draftwise.errors import DraftwiseError

_MOMENT = 2.0
"""Seconds in which the end of the first process has been noticed."""


def be_child(work: bytes, rank: int, address: str) -> None:
    """Do the pickled work with a rank and an address.

    The process ends when the first one does: else it would wait for it, for a day perhaps, or say with a traceback that
    it is gone. Ctrl-C, which a terminal sends to all, is the first one's to judge.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # The command's own handler may be there, where the child runs its script.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    first = multiprocessing.parent_process()
    assert first is not None

    def watch() -> None:
        first.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    try:
        pickle.loads(work)(rank, address)
    except KeyboardInterrupt:  # all stop, because the first one was asked to
        os._exit(130)
    except BaseException as error:
        first.join(_MOMENT)  # the reason may be that it has ended; then the thread above ends this one
        if not isinstance(error, DraftwiseError):
            raise
        print(f"[process {rank}] {' '.join(str(error).split())}", file=sys.stderr, flush=True)
        os._exit(1)
