"""Threads from affinity and control groups, on made-up files of both versions."""

from __future__ import annotations

from pathlib import Path

import pytest

from draftwise import cpus
from draftwise.cpus import Processors, cgroup_quota

V2 = "29 23 0:26 / /sys/fs/cgroup rw,nosuid,nodev,noexec,relatime shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
V1 = (
    "33 32 0:29 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
    "34 32 0:30 {shown} /sys/fs/cgroup/cpu,cpuacct rw,nosuid - cgroup cgroup rw,cpu,cpuacct\n"
)


def tree(root: Path, groups: str, mounts: str, files: dict[str, str]) -> Path:
    for name, text in {"proc/self/cgroup": groups, "proc/self/mountinfo": mounts, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize(
    ("groups", "mounts", "files", "quota"),
    [
        ("0::/\n", V2, {"sys/fs/cgroup/cpu.max": "150000 100000\n"}, 1.5),
        ("0::/\n", V2, {"sys/fs/cgroup/cpu.max": "max 100000\n"}, None),
        ("0::/\n", V2, {}, None),  # the root group of a machine has no such file
        # nested: the smallest around it counts, above or below
        (
            "0::/a.slice/b.service\n", V2,
            {
                "sys/fs/cgroup/a.slice/cpu.max": "200000 100000",
                "sys/fs/cgroup/a.slice/b.service/cpu.max": "800000 100000",
            },
            2.0,
        ),
        (
            "0::/a.slice/b.service\n", V2,
            {"sys/fs/cgroup/a.slice/cpu.max": "max 100000", "sys/fs/cgroup/a.slice/b.service/cpu.max": "25000 50000"},
            0.5,
        ),
        # a sibling's quota does not count
        ("0::/a\n", V2, {"sys/fs/cgroup/a/cpu.max": "max 100000", "sys/fs/cgroup/b/cpu.max": "100000 100000"}, None),
        # a mount point with a space in its name
        (
            "0::/a\n", V2.replace("/sys/fs/cgroup", "/sys/fs/c\\040group"),
            {"sys/fs/c group/a/cpu.max": "300000 100000"},
            3.0,
        ),
        # version 1, seen from the host, and from a container whose own group is what is mounted
        (
            "5:cpu,cpuacct:/docker/7f\n4:memory:/docker/7f\n", V1.format(shown="/"),
            {
                "sys/fs/cgroup/cpu,cpuacct/docker/7f/cpu.cfs_quota_us": "400000\n",
                "sys/fs/cgroup/cpu,cpuacct/docker/7f/cpu.cfs_period_us": "100000\n",
                "sys/fs/cgroup/cpu,cpuacct/docker/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu,cpuacct/docker/cpu.cfs_period_us": "100000\n",
            },
            4.0,
        ),
        (
            "5:cpu,cpuacct:/docker/7f\n", V1.format(shown="/docker/7f"),
            {
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "250000\n",
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
            },
            2.5,
        ),
        (
            "5:cpu,cpuacct:/x\n", V1.format(shown="/"),
            {
                "sys/fs/cgroup/cpu,cpuacct/x/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu,cpuacct/x/cpu.cfs_period_us": "1\n",
            },
            None,
        ),
        # both mounted: processors are limited by version 1, the rest is in version 2
        (
            "5:cpu,cpuacct:/x\n0::/y\n", V2.replace("/sys/fs/cgroup", "/sys/fs/cgroup/unified") + V1.format(shown="/"),
            {
                "sys/fs/cgroup/cpu,cpuacct/x/cpu.cfs_quota_us": "100000\n",
                "sys/fs/cgroup/cpu,cpuacct/x/cpu.cfs_period_us": "100000\n",
            },
            1.0,
        ),
        # outside of what is mounted: the mount point itself is what can be seen
        ("0::/../../elsewhere\n", V2, {"sys/fs/cgroup/cpu.max": "200000 100000"}, 2.0),
        ("0::/\n", V2, {"sys/fs/cgroup/cpu.max": "nonsense\n"}, None),
        ("0::/\n", "no mount\n", {}, None),
    ],
)  # fmt: skip
def test_quota(groups: str, mounts: str, files: dict[str, str], quota: float | None, tmp_path: Path) -> None:
    assert cgroup_quota(tree(tmp_path, groups, mounts, files)) == quota


def test_no_proc(tmp_path: Path) -> None:
    assert cgroup_quota(tmp_path) is None


@pytest.mark.parametrize(
    ("allowed", "quota", "threads"),
    [(8, None, 8), (8, 2.0, 2), (8, 2.9, 2), (8, 0.3, 1), (2, 64.0, 2), (1, None, 1)],
)
def test_threads(allowed: int, quota: float | None, threads: int) -> None:
    assert Processors(allowed, quota).threads == threads


def test_a_number_that_somebody_names_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpus, "processors", lambda: Processors(16, 2.0))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert cpus.default_threads(16) == 2
    assert cpus.default_threads(1) == 1
    monkeypatch.setenv("OMP_NUM_THREADS", "12")
    assert cpus.default_threads(12) == 12


def test_this_process() -> None:
    found = cpus.processors()
    assert found.allowed >= 1 and 1 <= found.threads <= found.allowed


@pytest.mark.parametrize(
    ("text", "name", "features"),
    [
        (
            "processor\t: 0\nmodel name\t: Some CPU @ 2 GHz\nflags\t\t: fma avx2\n",
            "Some CPU @ 2 GHz",
            {"fma", "avx2"},
        ),
        (
            "processor\t: 0\nFeatures\t: asimd asimddp i8mm\nCPU implementer\t: 0x41\nCPU part\t: 0xd40\n",
            "machine, implementer 0x41, part 0xd40",
            {"asimd", "asimddp", "i8mm"},
        ),
        ("nothing known\n", "machine", set()),
        (None, "machine", set()),
    ],
)
def test_model(
    text: str | None, name: str, features: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpus.platform, "processor", lambda: "machine")
    if text is not None:
        (tmp_path / "proc").mkdir()
        (tmp_path / "proc/cpuinfo").write_text(text)
    assert cpus.model(tmp_path) == cpus.Model(name, frozenset(features))
