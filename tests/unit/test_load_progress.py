"""What a user sees while weights are read."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from draftwise.models import progress
from draftwise.models.checkpoint import copy_tensors, scan_checkpoint


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Shown:
    def __init__(self, name: str, size: float) -> None:
        self.name, self.size, self.done, self.closed = name, size, [], False
        self.done: list[float]

    def update(self, done: float) -> None:
        self.done.append(done)

    def close(self) -> None:
        self.closed = True


def test_a_bar_comes_after_a_second_and_goes() -> None:
    clock, made = Clock(), []

    def bar(name: str, size: float) -> Shown:
        made.append(Shown(name, size))
        return made[-1]

    loading = progress.LoadProgress("llama", 100, 2e9, bar=bar, clock=clock)
    clock.now = 0.5
    loading.count(20)
    assert not made
    clock.now = 1.5
    loading.count(30)
    loading.count(50)
    assert [(b.name, b.size, b.done) for b in made] == [("llama", 2e9, [1e9, 2e9])]
    assert not made[0].closed
    loading.close()
    assert made[0].closed


def test_a_log_gets_a_line_every_ten_seconds(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    loading = progress.LoadProgress("llama", 100, 2e9, bar=None, clock=clock)
    with caplog.at_level(logging.INFO, "draftwise"):
        for second in range(25):
            clock.now = second
            loading.count(4)
        loading.close()
    assert [r.getMessage() for r in caplog.records] == [
        "loading llama: 0.9 of 2.0 GB (44 %)",
        "loading llama: 1.7 of 2.0 GB (84 %)",
        "loaded llama: 2.0 GB in 24 s",
    ]


def test_a_short_load_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "draftwise"):
        loading = progress.LoadProgress("llama", 100, 2e9, bar=None, clock=Clock())
        loading.count(100)
        loading.close()
    assert not caplog.records


@pytest.mark.parametrize("part", [None, 4])
def test_all_that_is_read_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: int | None
) -> None:
    """Also where a model takes one tensor of two."""
    save_file(
        {"a": torch.ones(4), "b": torch.ones(3, 2), "one": torch.ones(1)}, tmp_path / "model.safetensors"
    )
    entries = scan_checkpoint(tmp_path)
    seen: list[progress.LoadProgress] = []

    class Kept(progress.LoadProgress):
        def close(self) -> None:
            seen.append(self)

    monkeypatch.setattr(progress, "LoadProgress", Kept)
    with progress.told(tmp_path, entries, part):
        names = ["a"] if part else ["a", "b"]
        copy_tensors(entries, {name: torch.empty(entries[name].shape) for name in names})
    (loading,) = seen
    assert loading._done == (4 if part else 10)
    assert loading._elements == (4 if part else 11)
    copy_tensors(entries, {"a": torch.empty(4)})  # outside, nobody counts
    assert loading._done == (4 if part else 10)
