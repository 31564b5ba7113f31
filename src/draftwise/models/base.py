"""The contract of a decoder model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from draftwise.kernels.base import Ops
from draftwise.kernels.cpu.book_drafts import BookDrafts, InBooks
from draftwise.kernels.cpu.program import Program
from draftwise.kernels.cpu.rounds import RoundPasses
from draftwise.kernels.handles import Linear
from draftwise.kv.states import StateSpec
from draftwise.kv.storage import KVLayerSpec, KVStorage
from draftwise.models.config import ModelConfig as ModelConfig  # part of this contract
from draftwise.models.config import RawConfig
from draftwise.models.cuts import Cut
from draftwise.models.weights import WeightPlan
from draftwise.types import ChainDraws, DraftedTree, StepInput, TargetOutput, TreeDraws


@dataclass(frozen=True, slots=True)
class SitePart:
    """A layer of the checkpoint in a packed one: ``rows`` int64 of its outputs, in the order in which they stand there;
    None: all, as they are.

    On one of several ranks outputs are the rank's own.

    Example: a head of 4 whose neighbours are rotated, packed for kernels that rotate halves: rows [0, 2, 1, 3].
    """

    name: str  # without ".weight"
    outputs: int
    rows: Tensor | None = None
    cut: Cut | None = None  # the rank's part of the stored layer; None: it is here whole

    @property
    def size(self) -> int:
        """Outputs of it that stand there."""
        return self.outputs if self.rows is None else len(self.rows)


@dataclass(frozen=True, slots=True)
class LinearSite:
    """A packed linear layer [outputs, inputs] and the layers of the checkpoint that it is stacked of."""

    weight: Linear
    inputs: int
    parts: tuple[SitePart, ...]


LogitsTail = tuple[tuple[str, float], ...]
"""Operations on logits behind the output layer, in order: ("scale", factor) or ("softcap", cap)."""


def finish_logits(ops: Ops, logits: Tensor, tail: LogitsTail) -> Tensor:
    """``logits`` [M, V] float32, as the output layer made them -> the same tensor, as the model means them."""
    for what, number in tail:
        logits = ops.scale(logits, number) if what == "scale" else ops.softcap(logits, number)
    return logits


@dataclass(frozen=True, slots=True)
class SharedWeights:
    """The parts of a target that a draft head may borrow."""

    embedding: Tensor  # [V, H]
    head: Linear  # output layer [V, H], packed by `ops`
    ops: Ops
    tail: LogitsTail = ()  # belongs to the output layer


class DecoderModel(ABC):
    """A causal language model that computes the rows of a ragged batch against a paged cache.

    Life: ``cls.parse(raw)`` reads config.json; ``cls(config, ops, plan)`` declares its parameters on the plan; the
    loader fills them; ``finish()`` packs them. From then on the model is immutable and serves any number of batches.

    Run it inside ``torch.inference_mode()``: nothing needs gradients, and small models are measurably faster for it.
    """

    config: ModelConfig
    dtype: torch.dtype
    device: torch.device
    same_bits: bool = False
    """Whether a row's hidden states and logits are the same bits in any batch, chunk or tree."""
    capturable: bool = True
    """Whether a pass asks nothing of the host, if its operations do not."""
    rows_in_order: bool = True
    """Whether its linear layers are given all rows of a pass at once, in their order; else several adapters need a pass
    each."""
    pads: bool = False
    """Whether passes fill up batches with rows that go to `KVStorage.spare_slot`: storage for it must have one."""

    @property
    def inputs_on(self) -> torch.device:
        """Where the tensors of a `StepInput` are best put: a model that replays captured passes takes them from the
        host and moves all in one copy."""
        return self.device

    @classmethod
    @abstractmethod
    def parse(cls, raw: RawConfig, architecture: str, max_model_len: int | None = None) -> ModelConfig:
        """Read ``config.json``. Raises ModelLoadError for what this family does not support."""

    @abstractmethod
    def __init__(self, config: ModelConfig, ops: Ops, plan: WeightPlan) -> None: ...

    @abstractmethod
    def finish(self) -> None:
        """Every parameter is filled: pack them for the kernels."""

    def prepare(self, kv: KVStorage, capture: Sequence[int] = ()) -> None:  # noqa: B027
        """Called once before the first pass over a storage, with the layers that will be captured: the time to record
        or capture what is replayed later."""

    def static_bytes(self) -> int:
        """Bytes that `prepare` will take for buffers of a fixed size, graphs' own memory aside."""
        return 0

    @abstractmethod
    def kv_layout(self) -> tuple[KVLayerSpec, ...]:
        """The storage of each layer per token."""

    def state_spec(self) -> StateSpec | None:
        """The model's state of a request besides keys and values; None: none. Storage for a model that keeps
        something has `KVStorage.states`, and each `StepInput` says ``states``; requests do not share blocks, and there
        are no trees."""
        return None

    @abstractmethod
    def forward(self, batch: StepInput, kv: KVStorage, capture: Sequence[int] = ()) -> TargetOutput:
        """Compute all rows of a batch and write their K/V.

        Args:
            batch: T rows; token ids in 0..V-1, positions in 0..max_model_len-1, slots distinct.
            kv: storage made from `kv_layout`; committed keys of every request are in it.
            capture: layers whose entering hidden states are wanted, 0..num_layers (the last: what leaves the
                last layer, before the final norm).

        Returns:
            `TargetOutput`: hidden [T, H] after the final norm, captured {layer: [T, H]}, in the model's dtype.
        """

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """``hidden`` [M, H] (any rows of `TargetOutput.hidden`) -> [M, V] float32."""

    def forward_logits(
        self, batch: StepInput, kv: KVStorage, rows: Sequence[int] | None = None, capture: Sequence[int] = ()
    ) -> tuple[TargetOutput, Tensor]:
        """`forward`, then `logits` of its rows ``rows`` (None: all): [M, V] float32. Models that replay a recorded
        pass do both in one call."""
        output = self.forward(batch, kv, capture)
        hidden = output.hidden
        if rows is not None:
            if not rows:
                return output, hidden.new_empty((0, self.config.vocab_size), dtype=torch.float32)
            hidden = hidden[torch.tensor(rows, dtype=torch.int64, device=hidden.device)]
        return output, self.logits(hidden)

    def logits_alone(self, batch: StepInput, kv: KVStorage, rows: Sequence[int] | None = None) -> Tensor:
        """The logits of `forward_logits` where nobody reads its other results, [M, V] float32. K/V of all rows is
        written. A model may leave out what only other rows' hidden states need: of a prompt, nearly all that lies
        behind the last layer's K/V."""
        return self.forward_logits(batch, kv, rows)[1]

    def draft_chains(
        self,
        batch: StepInput,
        kv: KVStorage,
        rows: Sequence[int] | None,
        steps: int,
        draws: ChainDraws | None = None,
    ) -> tuple[npt.NDArray[np.int64], Tensor | None] | None:
        """Continue each request of a batch by ``steps`` tokens, int64 [R, steps]; K/V of all but the last of them are
        written. Sampled tokens come with the distributions they were drawn from, float32 [R, steps, V]. None: there
        is no quicker way than `forward_logits` token by token.

        Args:
            batch: R requests without trees; their block tables reach ``steps - 1`` tokens further.
            rows: the last row of each request; None: each has one row.
            draws: how tokens are drawn; None: greedily.
        """
        return None

    def pass_of(self, kv: KVStorage, capture: Sequence[int], *, adapted: bool = False) -> Program | None:
        """The pass that `forward_logits` replays with these captured layers, if that is all it does. ``adapted``: for
        batches of which a request has an adapter."""
        return None

    def round_passes(self, asked: BookDrafts, kv: KVStorage, rows: int) -> RoundPasses | None:
        """`draft_books` behind every round of several (`BookPasses.for_rounds`); None: it cannot."""
        return None

    def draft_books(self, asked: BookDrafts, kv: KVStorage) -> InBooks | None:
        """Draft chains for requests that stand in books, as `draft_chains` would, and write them there: what is read,
        drawn and written follows from the books. None: it cannot be done so, and nothing has changed."""
        return None

    def shared_weights(self) -> SharedWeights:
        """Embedding and output layer, for draft heads that have none of their own.

        Raises:
            NotImplementedError: the family does not lend them.
        """
        raise NotImplementedError(f"{type(self).__name__} cannot lend its embedding to a draft head")

    def first_layers(self, count: int) -> DecoderModel:
        """A model of this one's first ``count`` layers, final norm and head: the same weights, not copies. It runs on
        this model's own storage, whose first ``count`` layers it reads and writes (propose/models/early_exit.py).

        Raises:
            NotImplementedError: the family's layers cannot be run without the later ones.
        """
        raise NotImplementedError(f"{type(self).__name__} cannot be cut behind a layer")

    def draft_trees(
        self, batch: StepInput, kv: KVStorage, rows: Sequence[int] | None, draws: Sequence[TreeDraws]
    ) -> Sequence[DraftedTree] | None:
        """Draft a tree below each request of a batch, one pass per level. None: there is no quicker way than
        `forward_logits` level by level.

        Args:
            batch: R requests without trees; their block tables reach as far as nodes are fed.
            rows: the last row of each request; None: each has one row.
            draws: one per request.
        """
        return None

    def linear_sites(self) -> tuple[LinearSite, ...]:
        """Linear layers that adapters may add to.

        Raises:
            NotImplementedError: the family lets nobody add to them.
        """
        raise NotImplementedError(f"{type(self).__name__} does not support adapters")

    def operations(self) -> Ops:
        """The operations that its layers are computed with. Raises NotImplementedError as `linear_sites`."""
        raise NotImplementedError(f"{type(self).__name__} does not support adapters")

    def with_operations(self, ops: Ops) -> DecoderModel:
        """The same weights, not copies, computed with other operations, which take the same handles. The model itself
        may be changed by this and is used no more, unless `operations` stand for themselves where ``ops`` adds nothing.
        """
        raise NotImplementedError(f"{type(self).__name__} does not support adapters")

    @classmethod
    def experts_one_by_one(cls) -> bool:
        """Whether a rank can have some of its experts whole."""
        return False

    @abstractmethod
    def weight_bytes(self) -> int:
        """Bytes that all parameters take as they are kept: packed, rounded, a tied table twice if kernels copy it."""
