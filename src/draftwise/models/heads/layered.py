"""The common part of heads with decoder layers over features of the target: EAGLE-3 and block drafters."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from draftwise.errors import ModelLoadError
from draftwise.kernels.base import HeadShape, Ops
from draftwise.models.config import ModelConfig
from draftwise.models.heads.base import HeadModel, TargetLink
from draftwise.models.heads.vocabulary import check_target_ids
from draftwise.models.weights import WeightPlan


class LayeredHead(HeadModel):
    """Embedding and output layer are the target's, or the head's own (``embed_tokens``, ``lm_head``), then perhaps with
    a draft vocabulary."""

    what: ClassVar[str]
    """The head's name in errors."""

    def __init__(
        self,
        config: ModelConfig,
        link: TargetLink,
        ops: Ops,
        plan: WeightPlan,
        *,
        feature_layers: tuple[int, ...] | None,
        own_embedding: bool,
        own_head: bool,
        draft_vocab_size: int | None,
        target_ids: Tensor | None,
    ) -> None:
        """Check the sizes, and declare embedding and output layer.

        Args:
            config: of the head's own layers.
            feature_layers: of the target, whose entering states are read; None: what leaves its final norm, as it is.
            draft_vocab_size: None: the target's.
            target_ids: int64 [Vd], the target's id of each draft token; None: the draft vocabulary is the target's.

        Raises:
            ModelLoadError: the head does not fit the target; the field is named.
        """
        self.config = config
        self.dtype = ops.dtype
        self.device = ops.device
        self.capturable = ops.capturable
        self.feature_size = config.hidden_size
        self.feature_layers = feature_layers
        self.draft_vocab_size = draft_vocab_size or link.vocab_size
        self.max_model_len = link.max_model_len
        if config.hidden_size != link.hidden_size:
            parts = (
                ("reads the target's hidden states as they are", feature_layers is None),
                ("has no embedding of its own", not own_embedding),
                ("has no output layer of its own", not own_head),
            )
            odd = [text for text, wrong in parts if wrong]
            if odd:
                raise ModelLoadError(
                    f"hidden_size {config.hidden_size} is not the target's {link.hidden_size}, and {self.what} "
                    + " and ".join(odd)
                )
        if not own_head and self.draft_vocab_size != link.vocab_size:
            raise ModelLoadError(
                f"draft_vocab_size {draft_vocab_size} needs an lm_head; {self.what} has none, and the target's has "
                f"{link.vocab_size} tokens"
            )
        check_target_ids(target_ids, self.draft_vocab_size, link.vocab_size, self.what, "d2t")
        self.target_ids = None
        if target_ids is not None and self.draft_vocab_size != link.vocab_size:
            self.target_ids = target_ids.to(ops.device)
        self._ops = ops
        self._link = link
        self._heads = HeadShape(config.num_heads, config.num_kv_heads, config.head_dim)
        hidden = config.hidden_size
        self._owns_embedding = own_embedding
        self._embedding = link.embedding
        if own_embedding:
            self._embedding = plan.tensor("embed_tokens.weight", (link.vocab_size, hidden))
        self._loaded_head: Tensor | None = None
        if own_head:
            self._loaded_head = plan.tensor("lm_head.weight", (self.draft_vocab_size, hidden))
        plan.ignored |= {"d2t", "t2d"}

    def _finish_ends(self, plan: WeightPlan) -> None:
        """Fill and pack embedding and output layer."""
        if self._owns_embedding:
            plan.fill(self._embedding)
        self._head = self._link.head
        if self._loaded_head is not None:
            plan.fill(self._loaded_head)
            self._head = self._ops.pack_head(self._loaded_head)
        del self._loaded_head
