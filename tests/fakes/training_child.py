"""What processes do that train beside the first one; ``python -m`` is the first one, which waits for ever."""

from __future__ import annotations

import time

from draftwise.errors import DraftwiseError
from draftwise.train.heads.parallel import Ranks, joined, with_ranks


def waits(rank: int, address: str) -> None:
    print("here", flush=True)
    time.sleep(600)


def is_stopped(rank: int, address: str) -> None:
    raise KeyboardInterrupt


def fails(rank: int, address: str) -> None:
    raise DraftwiseError("no text\nat all")


def counts(rank: int, address: str) -> None:
    with joined("cpu", rank, 2, address) as ranks:
        ranks.sum(1.0)


def never(ranks: Ranks) -> None:
    raise AssertionError("the other process does not join")


if __name__ == "__main__":
    with_ranks(2, "cpu", never, waits)
