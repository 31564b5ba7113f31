"""Drafters whose captured loops take part in steps of seats: what is found of them, and what is left behind."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from draftwise.graphs.capture import Loops
from draftwise.graphs.loop import DraftLoop, LoopKind
from draftwise.graphs.plans import TreePlan
from draftwise.graphs.seats.features import DrafterSeats
from draftwise.graphs.seats.lookup import LookUp
from draftwise.graphs.trees import TreeLoop
from draftwise.sampling.draw import POINT_MASS_RULES, DraftSampleMethod
from draftwise.types import IntArray


class Joined(NamedTuple):
    """A look-up that is asked beside a drafter, and what drafts are named that have some of its own, or none: see
    `propose.hybrid`."""

    look: LookUp
    looked_up: str
    drafted: str


class Place(NamedTuple):
    """Where a request stands that takes a seat: leading tokens whose K/V the drafter has, drafts behind them of
    which it has it, too, and the first key that it looks at. ``carried`` [depths - 1, F]: of heads with several layers,
    see `graphs.seats.features`."""

    fed: int
    stored: int
    first_key: int
    carried: Tensor | None = None


def seat_loops(loops: Loops) -> Sequence[DraftLoop]:
    """Those that take part: where chains and trees are captured, chains."""
    return loops.chains or loops.trees


class SeatedDrafter(ABC):
    """One drafter's part. While a request has a seat, no other drafter drafts for it, but a look-up may (``joined``):
    its drafts take the place of the drafter's, which has drafted them in vain."""

    joined: Joined | None = None

    def __init__(
        self,
        loops: Sequence[DraftLoop],
        max_len: int,
        sample_method: DraftSampleMethod,
        scratch: Sequence[range] = (),
    ) -> None:
        """``scratch``: blocks of its storage for each request that may have a seat, if it feeds more than is verified:
        nodes of dynamic trees, blocks of masks."""
        self._loops = loops
        self._max_len = max_len
        self._sample_method = sample_method
        self.scratch = scratch
        loop = loops[0]
        self.draws = loop.seats.noise.shape[1]
        """Distributions that a request's drafts may be drawn from."""
        self.plan: TreePlan | None = loop.plan if isinstance(loop, TreeLoop) else None
        """The tree of its loops; None: chains."""
        self.rows = loop.shape.rows - loop.masks
        """Tokens of a request that it may read at once."""
        self.keeps_drafts = self.plan is None and not loop.masks
        """Whether drafts that it has fed stay stored until they are accepted."""

    @property
    def steps(self) -> int:
        """Most drafts of a request."""
        most = self._loops[0].steps
        return most if self.joined is None else max(most, self.joined.look.steps)

    def kind(self, greedy: bool, rule: str) -> LoopKind:
        """How drafts are drawn of a request under a rule; ``greedy``: at temperature 0. See `sampling.draw`."""
        if greedy or self._sample_method == "greedy" or rule in POINT_MASS_RULES:
            return "argmax"
        if rule == "coupled":
            return "shared"
        return "draft" if self.plan is None or "draft" in self.plan.kinds else "argmax"

    def seats(self, requests: int, keys: int, kind: LoopKind) -> DrafterSeats | None:
        """The smallest loop for exactly so many requests of up to ``keys`` keys."""
        for loop in self._loops:
            if loop.kind == kind and loop.shape.requests == requests and loop.shape.keys >= keys:
                return self._seats(loop)
        return None

    @abstractmethod
    def _seats(self, loop: DraftLoop) -> DrafterSeats: ...

    def prepare(self) -> None:  # noqa: B027
        """Requests are about to take seats."""

    @abstractmethod
    def catch_up(self, rid: int, token_ids_np: IntArray, blocks_np: IntArray, filled: int) -> int:
        """Read what the target has read of a prompt, so that the request can take a seat now; without waiting for it.

        Args:
            rid: the request, none of whose drafts wait.
            token_ids_np: [known] its tokens; the target has read all but the last.
            blocks_np: [blocks] they reach so far.
            filled: as `DraftRow.filled`.

        Returns:
            What is filled then.
        """

    @abstractmethod
    def place(self, rid: int, known: int, filled: int, stored: int, drafts: int) -> Place | None:
        """Where a request stands; None: it cannot have a seat yet.

        Args:
            rid: the request.
            known: its tokens.
            filled: as `DraftRow.filled`.
            stored: drafts behind them that are stored.
            drafts: drafts that wait.
        """

    @abstractmethod
    def went_on(self, rid: int, fed: int, drafts: int) -> tuple[int, int]:
        """A step was read: the drafter has the first ``fed`` tokens now, and ``drafts`` of its drafts wait. What
        `Proposer.filled_after` and `Proposer.drafts_stored` would answer."""

    def left(self, rid: int, known: int, fed: int, feature: Tensor | None) -> None:  # noqa: B027
        """The request goes on in the ordinary way. ``feature`` [depths, F] of heads: of its last token but one,
        and what is carried."""
