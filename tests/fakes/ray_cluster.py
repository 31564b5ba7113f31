"""A Ray cluster of two nodes on this machine, and what runs in it."""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


@contextlib.contextmanager
def ray_cluster(cpus: int = 1) -> Iterator[Any]:
    """The module ray, connected to two nodes of so many processors each; both are stopped at the end."""
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    options = {"num_cpus": cpus, "object_store_memory": 80 << 20, "include_dashboard": False}
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Ray's own, of files and sockets that it leaves to the system
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        cluster = Cluster(initialize_head=True, head_node_args=options)
        try:
            cluster.add_node(**options)
            ray.init(address=cluster.address, logging_level="error", log_to_driver=False)
            yield ray
        finally:
            ray.shutdown()
            cluster.shutdown()


def is_running(pid: int) -> bool:
    """Zombies are not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def all_gone(pids: list[int], seconds: float = 20.0) -> bool:
    """Whether all have ended within this time."""
    deadline = time.monotonic() + seconds
    while any(is_running(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not any(is_running(pid) for pid in pids)
