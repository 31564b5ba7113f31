"""``python -m draftwise.fleet.replica STREAMS ORDERS LIFELINE``: an engine behind two sockets, started by a fleet.

Streams go over one socket, in an event loop (`fleet.wire`); orders that are waited for, over the other, to a thread.
The process ends when it is told to, or when the fleet's process is gone: from the third descriptor nothing ever comes
but its end.
"""

from __future__ import annotations

import sys

from draftwise.cluster.children import belong_to


def main(streams_fd: int, orders_fd: int, lifeline_fd: int) -> int:
    """Be a replica; returns the exit code. What is slow to import comes after the lifeline is watched."""
    belong_to(lifeline_fd)
    from draftwise.fleet.serving import serve

    return serve(streams_fd, orders_fd)


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:4])))
