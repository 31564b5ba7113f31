"""The parts that a target divided among ranks lends to a draft head on one of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from draftwise.errors import ConfigError
from draftwise.kernels.select import default_ops
from draftwise.kv.storage import KVStorage
from draftwise.models.base import DecoderModel, SharedWeights
from draftwise.models.checkpoint import copy_tensors
from draftwise.models.dense import DenseDecoder
from draftwise.models.paths import resolve_path
from draftwise.models.registry import resolve_model
from draftwise.models.source import checkpoint_format, read_raw, scan
from draftwise.models.weights import WeightPlan
from draftwise.models.wrapped import WrappedDecoder
from draftwise.quantization.scheme import parse_scheme
from draftwise.types import StepInput, TargetOutput


class WholeTables(WrappedDecoder):
    """``inner``, a part of a model, that lends the whole embedding and output layer, which are read when needed."""

    def __init__(
        self, inner: DecoderModel, path: str | Path, revision: str | None, quantization: str | None
    ) -> None:
        """``path``, ``revision``, ``quantization``: of the model."""
        super().__init__(inner)
        self._source = (path, revision, quantization)

    def forward(self, batch: StepInput, kv: KVStorage, capture: Sequence[int] = ()) -> TargetOutput:
        return self.inner.forward(batch, kv, capture)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.inner.logits(hidden)

    def shared_weights(self) -> SharedWeights:
        path, revision, quantization = self._source
        folder = resolve_path(path, revision)
        _, cls = resolve_model(read_raw(folder))
        if not issubclass(cls, DenseDecoder):
            raise ConfigError(
                f"speculative_config.draft_tensor_parallel_size: {self.config.architecture} lends nothing to a head on "
                "one rank; leave it out"
            )
        scheme = parse_scheme(quantization, device=self.device.type) if quantization else None
        ops = default_ops(self.dtype, self.device, scheme, latent=self.config.latent is not None)
        entries, names = scan(folder), cls.names
        plan = WeightPlan(self.dtype, self.device, checkpoint_format(folder), entries.keys())
        shape = (self.config.vocab_size, self.config.hidden_size)
        table = plan.tensor(names.embedding, shape)
        head = None if self.config.tied else plan.tensor(names.head, shape)
        with torch.no_grad():
            plan.fill_with(lambda targets: copy_tensors(entries, targets))
            packed = ops.pack_tied_head(table) if head is None else ops.pack_head(head)
        cap = self.config.logit_softcap
        return SharedWeights(table, packed, ops, () if cap is None else (("softcap", cap),))
