"""``python -m draftwise.engine.worker CHANNEL LIFELINE``: a rank of an engine, started by its host (`cluster`)."""

from __future__ import annotations

import sys

from draftwise.cluster.ranking import run_rank
from draftwise.config import EngineConfig
from draftwise.engine.device import build_device
from draftwise.engine.facts import DeviceFacts
from draftwise.kernels.ranks import Ranks
from draftwise.runner.executor import Executor


def build(config: EngineConfig, ranks: Ranks) -> tuple[Executor, DeviceFacts]:
    """A rank's executor, and the facts that the host needs."""
    device = build_device(config, ranks=ranks)
    return device.executor, device.facts


if __name__ == "__main__":
    sys.exit(run_rank(int(sys.argv[1]), int(sys.argv[2]), build))
