"""What the processors are, and how many threads this process can keep busy: those it may run on, and what its control
groups grant.

A container with a quota of 2 processors on a machine of 64 sees all 64. Threads beyond the quota do not make it faster:
they use it up in the first part of each period (100 ms as a rule), and then all of them stand still for the rest.

This module imports nothing of the package.
"""

from __future__ import annotations

import math
import os
import platform
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath


@dataclass(frozen=True, slots=True)
class Processors:
    """``allowed``: processors that threads may run on. ``quota``: processors' worth of time; None: no limit."""

    allowed: int
    quota: float | None

    @property
    def threads(self) -> int:
        """Threads that compute all the time without being stopped: a quota of 1.5 is one, and some time to spare."""
        if self.quota is None:
            return self.allowed
        return max(1, min(self.allowed, math.floor(self.quota)))


@dataclass(frozen=True, slots=True)
class Model:
    """``name``: for people, the same on machines with the same processor. ``features``: as Linux names them."""

    name: str
    features: frozenset[str]


def model(root: Path = Path("/")) -> Model:
    """The processor, as far as the system tells. On ARM Linux knows numbers only (0x41, 0xd40: Arm, Neoverse V1)."""
    fallback = platform.processor() or platform.machine()
    try:
        text = (root / "proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return Model(fallback, frozenset())
    fields: dict[str, str] = {}
    for line in text.splitlines():
        key, _, value = line.partition(":")
        fields.setdefault(key.strip(), value.strip())
    name = fields.get("model name") or fallback
    if "CPU part" in fields:
        name += f", implementer {fields.get('CPU implementer', 'unknown')}, part {fields['CPU part']}"
    return Model(name, frozenset((fields.get("flags") or fields.get("Features") or "").split()))


def processors() -> Processors:
    """The processors of this process."""
    # macOS has no affinities
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return Processors(allowed, cgroup_quota())


def default_threads(torch_threads: int) -> int:
    """Threads of an engine for which nobody names a number: as many as torch would use, but for the quota.

    ``OMP_NUM_THREADS`` is somebody naming a number.
    """
    if os.environ.get("OMP_NUM_THREADS"):
        return torch_threads
    return min(torch_threads, processors().threads)


def cgroup_quota(root: Path = Path("/")) -> float | None:
    """The smallest quota of the control groups that this process is in, of version 1 or 2; None: there is none.

    A group cannot use more than those around it, as far as they can be seen from here.

    Args:
        root: what stands before ``/proc`` and the places where file systems are mounted.
    """
    try:
        groups = (root / "proc/self/cgroup").read_text()
        mounts = (root / "proc/self/mountinfo").read_text()
    except OSError:
        return None
    quotas = [
        quota
        for base, inside in _folders(groups, mounts)
        for folder in (inside, *inside.parents)
        if (quota := _quota(root / str(base).lstrip("/") / folder)) is not None
    ]
    return min(quotas, default=None)


def _folders(groups: str, mounts: str) -> Iterator[tuple[PurePosixPath, PurePosixPath]]:
    """Where groups that limit processors are mounted, and the process's own, relative to it."""
    paths: dict[str, PurePosixPath] = {}  # by controllers of version 1, or "" for version 2
    for line in groups.splitlines():
        _, controllers, own = line.split(":", 2)
        for controller in controllers.split(","):
            paths[controller] = PurePosixPath(own)
    for line in mounts.splitlines():
        # "36 35 0:31 /root /mounted/at rw,nosuid shared:1 - cgroup2 cgroup rw,nsdelegate"
        before, _, after = line.partition(" - ")
        fields, kind = before.split(), after.split()
        if len(fields) < 5 or len(kind) < 3 or kind[0] not in ("cgroup", "cgroup2"):
            continue
        controller = "" if kind[0] == "cgroup2" else "cpu"
        if controller not in paths or (controller and controller not in kind[2].split(",")):
            continue
        shown, base = PurePosixPath(_unescaped(fields[3])), PurePosixPath(_unescaped(fields[4]))
        path = paths[controller]
        # In a container without a namespace of its own, the path is the host's and the group itself is mounted.
        yield base, path.relative_to(shown) if path.is_relative_to(shown) else PurePosixPath(".")


def _unescaped(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


def _quota(folder: Path) -> float | None:
    try:
        quota, period = (folder / "cpu.max").read_text().split()  # "max 100000" or "150000 100000"
    except (OSError, ValueError):
        try:
            quota = (folder / "cpu.cfs_quota_us").read_text().strip()  # -1: none
            period = (folder / "cpu.cfs_period_us").read_text().strip()
        except OSError:
            return None
    try:
        granted, of = int(quota), int(period)
    except ValueError:
        return None
    return granted / of if granted > 0 and of > 0 else None
