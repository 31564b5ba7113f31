"""Transformers builds models in one thread at a time: it exchanges functions of torch meanwhile."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import torch

from draftwise.models.general.filling import _from_state


class Builder:
    """Stands for a class of Transformers: it notes how many threads build at once."""

    inside = most = 0

    @classmethod
    def from_pretrained(cls, *args: Any, **options: Any) -> tuple[torch.nn.Module, dict[str, list[str]]]:
        cls.inside += 1
        cls.most = max(cls.most, cls.inside)
        time.sleep(0.01)
        cls.inside -= 1
        return torch.nn.Identity(), {"missing_keys": [], "mismatched_keys": [], "unexpected_keys": []}


def test_threads_build_one_after_the_other() -> None:
    def build() -> None:
        _from_state(Path("m"), Builder, None, torch.float32, {}, whole=True)

    threads = [threading.Thread(target=build) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert Builder.most == 1
