"""A small driver that plays the part of the engine, and what tests of models share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from draftwise.kernels.torch_ops import TorchOps
from draftwise.kv.storage import KVStorage
from draftwise.models.base import DecoderModel
from draftwise.models.inputs import RowInput, build_step_input
from draftwise.models.loader import load_model

VOCAB = 131
BLOCK = 4
MakeModel = Callable[..., tuple[Any, Path]]


class Driver:
    """Computes logits of sequences through a `DecoderModel`, with scattered blocks and any chunking."""

    def __init__(self, model: DecoderModel, num_blocks: int = 512, scatter: bool = True) -> None:
        self.model = model
        self.kv = KVStorage(model.kv_layout(), num_blocks, BLOCK, model.dtype, model.device)
        for i in range(len(model.kv_layout())):
            for tensor in self.kv.layer(i):
                tensor.fill_(float("nan"))  # what nobody wrote must not matter
        free = np.arange(1, num_blocks, dtype=np.int32)
        if scatter:
            np.random.default_rng(0).shuffle(free)
        self._free = list(free)
        self.tables: dict[int, np.ndarray] = {}
        self.context: dict[int, int] = {}

    def step(
        self, rows: Sequence[tuple[int, Sequence[int]]], trees: dict[int, Sequence[int]] | None = None
    ) -> list[torch.Tensor]:
        """One pass; (request, its tokens) each. Returns logits [n, V] of each. Trees are not committed."""
        inputs = []
        for rid, tokens in rows:
            context = self.context.setdefault(rid, 0)
            table = self.tables.get(rid, np.zeros(0, np.int32))
            need = -(-(context + len(tokens)) // BLOCK) - len(table)
            if need > 0:
                table = np.concatenate((table, np.array([self._free.pop(0) for _ in range(need)], np.int32)))
                self.tables[rid] = table
            parents = (trees or {}).get(rid)
            inputs.append(RowInput(tokens, context, table, parents))
        batch = build_step_input(inputs, BLOCK, self.model.device)
        with torch.inference_mode():
            hidden = self.model.forward(batch, self.kv).hidden
            logits = self.model.logits(hidden)
        for rid, tokens in rows:
            if rid not in (trees or {}):
                self.context[rid] += len(tokens)
        return list(logits.split([len(tokens) for _, tokens in rows]))

    def whole(self, rid: int, tokens: Sequence[int], chunk: int | None = None) -> torch.Tensor:
        """Logits [n, V] of a sequence computed in chunks."""
        size = chunk or len(tokens)
        parts = [self.step([(rid, tokens[i : i + size])])[0] for i in range(0, len(tokens), size)]
        return torch.cat(parts)

    def greedy(self, rid: int, prompt: Sequence[int], count: int) -> list[int]:
        """``count`` greedy tokens after a prompt."""
        logits = self.whole(rid, prompt)[-1]
        out = [int(logits.argmax())]
        while len(out) < count:
            out.append(int(self.step([(rid, out[-1:])])[0][-1].argmax()))
        return out


def tokens_of(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB, length).tolist()


def load(folder: Path | str, dtype: torch.dtype = torch.float32, **options: Any) -> DecoderModel:
    ops = TorchOps(dtype, torch.device("cpu"))  # other kernels have tests of their own
    return load_model(str(folder), dtype=dtype, device=torch.device("cpu"), ops=ops, **options)


def expected_logits(reference: Any, tokens: Sequence[int]) -> torch.Tensor:
    with torch.no_grad():
        return reference(torch.tensor([tokens])).logits[0].float()
