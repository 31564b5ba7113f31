"""The contract of a draft head with K/V of its own: EAGLE, EAGLE-3, MTP layers.

**Rows.** A head predicts token s + 1 from token s and a *feature* of token s - 1: what the target computed when it read
token s - 1, or, further into a draft, what the head itself gave for the row before. The row of token s has its K/V in
slot s and its rotation at position s - 1, where published heads were trained to have it (they pair the target's row
with the token after it). Token 0 has no row: no key is ever looked for in slot 0.

Example: tokens a b c, of which c has just been committed and not been read by the target. Its hidden states h_a and h_b
are known. Rows (b, h_a) in slot 1 at position 0, (c, h_b) in slot 2 at position 1; the last one gives the first draft.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from draftwise.kernels.cpu.book_drafts import BookDrafts, InBooks
from draftwise.kernels.cpu.rounds import FeatureJoin, RoundPasses
from draftwise.kernels.handles import Linear
from draftwise.kv.storage import KVLayerSpec, KVStorage
from draftwise.models.base import LogitsTail
from draftwise.types import ChainDraws, DraftedTree, StepInput, TargetOutput, TreeDraws


@dataclass(frozen=True, slots=True)
class TargetLink:
    """Settings that heads share with their target, or have to fit."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    max_model_len: int  # no position of the engine reaches it
    embedding: Tensor  # [V, H] of the target, in its dtype
    head: Linear  # the target's output layer [V, H], packed by the same Ops as the head's own weights
    tail: LogitsTail = ()  # what the target does to what its output layer gives: `finish_logits`


def logits_tail(link: TargetLink, *, own_head: bool, logit_scale: float = 1.0) -> LogitsTail:
    """Operations on a draft head's logits: those of its own settings, or of the target's output layer if it borrows
    that."""
    if logit_scale != 1.0:
        return (("scale", logit_scale),)
    return () if own_head else link.tail


@dataclass(frozen=True, slots=True)
class HeadOutput:
    """Results for every row of a pass: ``hidden`` goes to `HeadModel.logits`, ``features`` into the row of the next
    token."""

    hidden: Tensor  # [T, H]
    features: Tensor  # [T, F]


def pick_rows(x: Tensor, rows: Tensor | slice) -> Tensor:
    """Rows of ``x`` [T, ...]: int64 [n] of them, copied, or a slice, as a view."""
    if not isinstance(rows, slice):
        return x.index_select(0, rows)
    return x if rows.stop - rows.start == x.shape[0] else x[rows]


class HeadModel(ABC):
    """A draft head. Immutable once `finish` was called; run it inside ``torch.inference_mode()``.

    Life as a `DecoderModel`'s: the constructor declares its parameters on a `WeightPlan`, the loader fills them,
    ``finish()`` packs them.
    """

    dtype: torch.dtype
    device: torch.device
    same_bits: bool = False
    """Whether a row's results are the same bits in any batch, chunk or tree."""
    pads: bool = False
    """As `DecoderModel.pads`."""
    capturable: bool = True
    """Whether its passes over captured rows read nothing of the host."""
    feature_size: int
    """F: width of a feature."""
    feature_layers: tuple[int, ...] | None = None
    """Target layers whose entering hidden states `combine` reads; None: the hidden states after its final norm."""
    num_passes: int = 1
    """Kinds of passes that `forward` tells apart by ``depth``, where they are more than the depths (block drafters)."""
    num_depths: int = 1
    """Distinct layers for successive drafts (several MTP layers): draft d, from 0, uses number min(d, this - 1)."""
    target_ids: Tensor | None = None
    """int64 [Vd]: the target's id of each id of the draft vocabulary, ascending; None: both are the same."""
    draft_vocab_size: int
    """Vd."""
    mask_token: int | None = None
    """P-EAGLE: the mask token, for drafts that are not known yet; None: the head drafts one token after another."""
    mask_feature: Tensor | None = None
    """[1, F] the feature of such a row, there with ``mask_token``."""
    max_model_len: int
    """No row at this position or later can be computed."""

    @property
    def inputs_on(self) -> torch.device:
        """As `DecoderModel.inputs_on`; features always lie on the head's own device."""
        return self.device

    @abstractmethod
    def finish(self) -> None:
        """Every parameter is filled: pack them for the kernels."""

    def prepare(self, kv: KVStorage) -> None:  # noqa: B027
        """As `DecoderModel.prepare`."""

    def static_bytes(self) -> int:
        """As `DecoderModel.static_bytes`."""
        return 0

    @abstractmethod
    def kv_layout(self) -> tuple[KVLayerSpec, ...]:
        """The storage of each layer per token, of all depths."""

    @abstractmethod
    def combine(self, output: TargetOutput, rows: Tensor | slice) -> Tensor:
        """The features of some of the target's rows: ``rows`` int64 [n] of a pass, or a slice of them -> [n, F]. Of a
        slice they may be views of ``output``."""

    @abstractmethod
    def forward(self, batch: StepInput, features: Tensor, kv: KVStorage, depth: int = 0) -> HeadOutput:
        """Compute rows and write their K/V.

        Args:
            batch: T rows; ``positions`` are one less than the keys' numbers, see the module's text.
            features: [T, F], of the token before each row's.
            kv: storage made from `kv_layout`.
            depth: which of `num_depths` layers computes; each has K/V of its own.
        """

    def recordable(self) -> bool:
        """Whether `forward` does the same operations whatever its rows are. Passes of one that does not are run call by
        call, and nothing is drafted in one call."""
        return True

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """``hidden`` [M, H], rows of `HeadOutput.hidden` -> [M, Vd] float32, over the draft vocabulary."""

    def forward_logits(
        self,
        batch: StepInput,
        features: Tensor,
        kv: KVStorage,
        rows: Sequence[int] | None = None,
        depth: int = 0,
    ) -> tuple[HeadOutput, Tensor]:
        """`forward`, then `logits` of its rows ``rows`` (None: all): [M, Vd] float32."""
        output = self.forward(batch, features, kv, depth)
        hidden = output.hidden
        if rows is not None:
            if not rows:
                return output, hidden.new_empty((0, self.draft_vocab_size), dtype=torch.float32)
            hidden = hidden[torch.tensor(rows, dtype=torch.int64, device=hidden.device)]
        return output, self.logits(hidden)

    def draft_chains(
        self,
        batch: StepInput,
        features: Tensor,
        kv: KVStorage,
        rows: Sequence[int] | None,
        steps: int,
        draws: ChainDraws | None = None,
    ) -> tuple[npt.NDArray[np.int64], Tensor | None] | None:
        """Continue each request by ``steps`` tokens of the *target's* vocabulary, int64 [R, steps], as
        `DecoderModel.draft_chains` does; the head's own features are fed back.

        Sampled tokens come with the distributions they were drawn from, float32 [R, steps, Vd], over the *draft*
        vocabulary; so are ``draws.noise`` [R, steps, Vd]. None: there is no quicker way than pass by pass.
        """
        return None

    def draft_trees(
        self,
        batch: StepInput,
        features: Tensor,
        kv: KVStorage,
        rows: Sequence[int] | None,
        draws: Sequence[TreeDraws],
    ) -> Sequence[DraftedTree] | None:
        """Draft a tree below each request, as `DecoderModel.draft_trees` does; a node's row reads the features that its
        parent's row gave. Tokens are the target's; ``draws`` speak the draft vocabulary. None: there is no quicker way
        than level by level.
        """
        return None

    def feature_join(self) -> FeatureJoin | None:
        """What `combine` does, where native code can do it by itself."""
        return None

    def round_passes(self, asked: BookDrafts, kv: KVStorage, rows: int) -> RoundPasses | None:
        """As `DecoderModel.round_passes`."""
        return None

    def draft_books(self, asked: BookDrafts, kv: KVStorage) -> InBooks | None:
        """Draft for requests that stand in books, as `draft_chains` and `draft_trees` would, and write drafts, over the
        target's vocabulary, there. None: it cannot be done so, and nothing has changed."""
        return None

    @abstractmethod
    def weight_bytes(self) -> int:
        """Bytes of its own parameters; what it shares with the target does not count."""
