"""Memory of caches: zeros, and what the system is asked for."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from draftwise.kv import pages
from draftwise.kv.pages import LARGE_PAGE, wish_large_pages, zeros


@pytest.mark.parametrize("shape", [(3, 5), (2, 3 << 20), (0, 4)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8, torch.float32], ids=str)
def test_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    made = zeros(shape, dtype, torch.device("cpu"))
    assert made.shape == shape and made.dtype == dtype and made.is_contiguous() and not made.any()


@pytest.mark.parametrize(
    ("begin", "size", "wanted"),
    [
        (0, 3 * LARGE_PAGE, (0, 3)),
        (1, 3 * LARGE_PAGE, (1, 2)),
        (LARGE_PAGE - 1, LARGE_PAGE + 1, (1, 1)),
        (LARGE_PAGE - 1, LARGE_PAGE, None),
        (5 * LARGE_PAGE, LARGE_PAGE - 1, None),
        (LARGE_PAGE, 0, None),
    ],
)
def test_only_whole_pages_inside_are_asked_for(
    begin: int, size: int, wanted: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What lies beside the tensor belongs to somebody else."""
    if pages._madvise() is None:
        pytest.skip("there are no such pages here")
    asked: list[tuple[int, int]] = []

    def advise(first: int, length: int, _advice: int) -> int:
        asked.append((first // LARGE_PAGE, length // LARGE_PAGE))
        assert first % LARGE_PAGE == length % LARGE_PAGE == 0
        return 0

    monkeypatch.setattr(pages, "_madvise", lambda: advise)
    wish_large_pages(begin, size)
    assert asked == ([] if wanted is None else [wanted])


@pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").is_dir(), reason="a system without large pages"
)
def test_the_system_takes_the_wish() -> None:
    """The flag of the mapping (``hg``: asked for large pages) is there for a tensor that holds some."""
    made = zeros((16 * LARGE_PAGE,), torch.int8, torch.device("cpu"))
    inside = made.data_ptr() + 2 * LARGE_PAGE
    flags = ""
    begins = False
    with open("/proc/self/smaps", encoding="ascii", errors="replace") as lines:
        for line in lines:
            if "-" in line.split(" ", 1)[0] and ":" not in line.split(" ", 1)[0]:
                low, _, high = line.split(" ", 1)[0].partition("-")
                begins = int(low, 16) <= inside < int(high, 16)
            elif begins and line.startswith("VmFlags:"):
                flags = line
    if not flags:
        pytest.skip("the system shows no flags")
    assert " hg" in flags


def resident(begin: int, size: int) -> int:
    """Bytes from an address on that have memory. Other threads of this process take some meanwhile, but not there."""
    page = os.sysconf("SC_PAGE_SIZE")
    with open("/proc/self/pagemap", "rb") as pages_of_process:
        pages_of_process.seek(begin // page * 8)
        entries = np.frombuffer(pages_of_process.read(size // page * 8), np.uint64)
    return int((entries >> np.uint64(63)).sum()) * page


@pytest.mark.skipif(
    not Path("/proc/self/pagemap").exists(), reason="the system does not show which pages are there"
)
@pytest.mark.parametrize("scarce", [False, True])
def test_zeros_take_memory_when_they_are_written_to(scarce: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or at once, where they are much of what there is; and give it back."""
    size = 64 << 20
    if scarce:
        monkeypatch.setattr(pages, "_free_memory", lambda: size)
    made = zeros((2, size // 4), torch.bfloat16, torch.device("cpu"))
    begin = made.data_ptr()
    taken = resident(begin, size)
    assert taken > 0.9 * size if scarce else taken < 0.2 * size
    made.fill_(3)
    assert resident(begin, size) > 0.9 * size and bool((made == 3).all())
    del made
    assert resident(begin, size) < 0.2 * size


@pytest.mark.skipif(sys.platform != "linux", reason="other systems get their zeros written")
def test_a_lack_of_addresses_is_a_lack_of_memory() -> None:
    with pytest.raises(MemoryError):
        zeros((1 << 60,), torch.int8, torch.device("cpu"))
