"""Verification: which draft tokens a step keeps, and what follows them. Rules stand beside this file."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar, NamedTuple

import torch

from draftwise.kv.storage import KVStorage
from draftwise.sampling.masks import Words
from draftwise.sampling.state import SamplingState
from draftwise.types import IntArray, Proposal, Verification
from draftwise.verify.rates import SyntheticAcceptance


class VerifyRequest(NamedTuple):
    """One request's rows in the logits of a step: the root's row, then one per node, consecutive.

    Row ``first_row`` holds the target's logits after the last committed token, row ``first_row + 1 + i``
    those after node i. Without a proposal the rule draws one token from the root's row.
    """

    state: SamplingState
    proposal: Proposal
    first_row: int
    rule: str
    token_ids_np: IntArray  # [num_tokens] committed tokens, the root last; a view
    masks: Words | None = (
        None  # [1 + nodes, W] int32, packed: what a grammar allows after the root and each node
    )
    pass_row: int = -1  # the root's row in the target's pass; see `PassSlots`

    @property
    def num_rows(self) -> int:
        return 1 + len(self.proposal.tokens)

    def rows_of(self, logits: torch.Tensor) -> torch.Tensor:
        """[num_rows, V] a view of its rows."""
        return logits[self.first_row : self.first_row + self.num_rows]

    def row_of(self, node: int) -> int:
        """The logits row after node ``node`` (-1: the root)."""
        return self.first_row + 1 + node


class VerifyColumns(NamedTuple):
    """R requests in columns, for kernels that shape distributions themselves. None is adjusted, masked or
    reported."""

    states: Sequence[SamplingState]
    proposals: Sequence[Proposal]
    first_rows: Sequence[int]  # as `VerifyRequest.first_row`
    rules: Sequence[str]  # as `effective_rule` says


class Rule(ABC):
    """Decides which path of a proposal is kept. One instance serves all requests that name the rule; it
    keeps no state (noise comes from `sampling.noise`, keyed by request, position and step)."""

    lossless: ClassVar[bool]
    """Whether the committed tokens have exactly the target's distribution."""

    @abstractmethod
    def verify(self, logits: torch.Tensor, requests: Sequence[VerifyRequest]) -> list[Verification]:
        """``logits`` [M, V] float32, processed (softmax gives p), rows as the requests say. One result each,
        in order. Must not write to ``logits``. A rule from outside that raises, or answers with something else, fails
        its requests (`verify.contained`)."""


class PassSlots(NamedTuple):
    """Where the target's pass stored its rows: ``slots`` [T] int64 of ``storage``. Kernels that are given it compact
    accepted paths (see `KVStorage.move`) at once, before anybody has read which they are."""

    storage: KVStorage
    slots: torch.Tensor


FORCED = frozenset({"typical", "synthetic"})
"""Rules that differ from the argmax walk at temperature 0; all others are `greedy` there."""


def effective_rule(state: SamplingState, rule: str) -> str:
    """The rule that decides a request: ``greedy`` at temperature 0, unless the rule differs there."""
    return rule if not state.is_greedy or rule in FORCED else "greedy"


class BatchRules(ABC):
    """Several rules as kernels, for all requests of a step at once. They decide like the rules of the same names, up to
    the last bits of sums."""

    names: ClassVar[frozenset[str]]
    """Rules that the kernels have; others are decided one by one in torch."""
    shapes: ClassVar[bool] = False
    """Whether the kernels apply temperature, min_p, top_k and top_p themselves."""
    compacts: ClassVar[bool] = True
    """Whether the kernels compact accepted paths; otherwise the executor does, as for rules in torch."""

    forced: SyntheticAcceptance | None = None
    """For benchmarks: the drafts that rule ``greedy`` accepts, whatever the target's logits are."""

    def decides(self, state: SamplingState, rule: str) -> bool:
        """Whether the kernels decide requests of this rule."""
        return effective_rule(state, rule) in self.names

    @abstractmethod
    def verify(
        self,
        logits: torch.Tensor,
        requests: Sequence[VerifyRequest],
        rules: Sequence[str],
        stored: PassSlots | None = None,
    ) -> list[Verification]:
        """As `Rule.verify`; ``rules``: each request's, one of ``names``. With ``stored``, paths are compacted, too."""

    def deciding(self, columns: VerifyColumns) -> Callable[[torch.Tensor], list[Verification]]:
        """A function that decides all requests from their raw logits [M, V] float32, if the kernels shape
        distributions (``shapes``) and do not compact. The requests' data is packed here, before the target's pass
        fills the CPU's caches with weights."""
        raise NotImplementedError
