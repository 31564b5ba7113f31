"""Small models of any kind on disk, and the logits of a loaded one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftwise.kv.storage import KVStorage
from draftwise.models.base import DecoderModel
from draftwise.models.inputs import RowInput, build_step_input
from tests.fakes.architectures import save, small

CPU = torch.device("cpu")


def made(kind: str, folder: Path, **sizes: Any) -> tuple[Path, Any]:
    """A small model in a folder of its own, and the same in memory."""
    found = small(kind, **sizes)
    save(found, folder / kind)
    return folder / kind, found.model


def logits_of(decoder: DecoderModel, *rows: RowInput, kv: KVStorage | None = None) -> Tensor:
    """[T, V] of one step, in a cache of 8 blocks of 16 or a given one."""
    kv = kv or KVStorage(decoder.kv_layout(), 8, 16, decoder.dtype, CPU)
    with torch.inference_mode():
        return decoder.forward_logits(build_step_input(rows, 16, CPU), kv)[1]
