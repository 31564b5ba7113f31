"""``python -m draftwise.engine.worker CHANNEL LIFELINE``: a rank of an engine, started by its host (`cluster`).

What is slow to import comes after the lifeline is watched.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from draftwise.cluster.children import belong_to

if TYPE_CHECKING:
    from draftwise.config import EngineConfig
    from draftwise.engine.facts import DeviceFacts
    from draftwise.kernels.ranks import Ranks
    from draftwise.runner.executor import Executor


def main(channel_fd: int, lifeline_fd: int) -> int:
    """Be a rank; returns the exit code."""
    belong_to(lifeline_fd)
    from draftwise.cluster.ranking import run_rank

    return run_rank(channel_fd, build)


def build(config: EngineConfig, ranks: Ranks) -> tuple[Executor, DeviceFacts]:
    """A rank's executor, and the facts that the host needs."""
    from draftwise.engine.device import build_device

    device = build_device(config, ranks=ranks)
    return device.executor, device.facts


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:3])))
