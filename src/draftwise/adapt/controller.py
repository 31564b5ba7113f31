"""Chooses how much to draft and to verify, for whom. The contract, and the controller that does as it is told."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass

from draftwise.types import RoundCuts, Speculation, StepResult

Tables = Mapping[str, Sequence[tuple[int, int, int]]]
"""method -> ((from, to, K), ...), batch sizes inclusive: vLLM's ``num_speculative_tokens_per_batch_size``."""


@dataclass(slots=True)
class StepShape:
    """How much a step computed. The scheduler adds it up while it plans.

    Example: a prompt chunk of 100 tokens, a plain decode and a verification of 4 drafts, the two with 50 and 70
    tokens in the cache: requests 2, rows 6, prompt_rows 100, context 120.
    """

    requests: int = 0  # that reached their last known token with one row: they decode
    rows: int = 0  # of those requests: a root each, and the draft nodes verified
    prompt_rows: int = 0  # of the others: prompts, and what a preempted request computes again
    context: int = 0  # tokens in the cache of the requests that decode
    sampled: bool = False  # some request that decodes draws at a temperature
    note: object = None  # what `Controller.begin` gave for the step


@dataclass(frozen=True, slots=True)
class GroupControl:
    """A controller's estimates for requests that share a method, a rule and a shape of proposals.

    ``cap``: nodes drafted per request that drafts; ``gain``: predicted tokens per second over plain decoding's
    (None: nothing is known yet); ``accepted``: expected accepted drafts of one proposal of ``cap`` nodes.
    """

    method: str
    rule: str
    num_requests: int
    num_drafting: int
    cap: int
    gain: float | None
    accepted: float | None

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, slots=True)
class ControlStats:
    """``probes``: proposals made to learn whether drafting pays again; ``pauses``: plain steps to learn what they cost;
    ``suspended_steps``: steps without drafting because speculation had lost time; ``decisions``: times the choice
    was thought over."""

    mode: str = "static"
    groups: tuple[GroupControl, ...] = ()
    decisions: int = 0
    probes: int = 0
    pauses: int = 0
    suspended_steps: int = 0

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        out: dict[str, object] = {name: getattr(self, name) for name in self.__slots__}
        return {**out, "groups": [group.as_dict() for group in self.groups]}


class Controller(ABC):
    """Called while a step is planned, and with its outcome afterwards.

    What it decides may depend on sizes, times and what was accepted before, never on the tokens of a waiting proposal:
    otherwise a cut would not be lossless. The size of a proposal is told; it may decide only where the proposer says
    that it follows from committed tokens alone (`Proposer.evident`).
    """

    resting: Container[int] = frozenset()
    """Requests whose drafters are not told what a step commits that is planned now, because they will not draft soon
    (`RowPlan.follow`)."""

    @property
    def settled(self) -> bool:
        """Whether a step may be as long as there is time for: one that is wrong loses little."""
        return True

    def begin(self, batch_size: int) -> object:
        """A step is about to be planned. ``batch_size``: requests that run once everybody who can is admitted. What is
        returned comes back as `StepShape.note`: ahead, the next step is planned before this one is observed."""
        return None

    def admit(  # noqa: B027
        self, rid: int, speculation: Speculation, missing: int, remaining: int
    ) -> None:
        """A request takes its place, with ``missing`` tokens to compute and at most ``remaining`` tokens to come; again
        if it was preempted."""

    @abstractmethod
    def draft_budget(self, rid: int, speculation: Speculation, batch_size: int) -> int:
        """Nodes to propose at the end of the coming step; 0 switches drafting off for it. A question: there may be room
        for fewer, or for none (`granted`)."""

    def granted(self, rid: int, nodes: int) -> None:  # noqa: B027
        """The request will propose up to ``nodes`` nodes, at least 1, at the end of the coming step."""

    def nodes_to_verify(self, rid: int, num_proposed: int) -> int:
        """How many of the nodes that wait, the first ones, the coming step verifies."""
        return num_proposed

    def wishes(
        self, rids: Sequence[int], speculations: Sequence[Speculation], waiting: list[int], batch_size: int
    ) -> tuple[list[int], list[int]]:
        """Of R requests side by side how many of their ``waiting`` nodes are verified (`nodes_to_verify`, of those that
        have some), and how many are drafted (`draft_budget`)."""
        verified: list[int] = []
        budgets: list[int] = []
        for rid, speculation, nodes in zip(rids, speculations, waiting, strict=True):
            verified.append(self.nodes_to_verify(rid, nodes) if nodes else 0)
            budgets.append(self.draft_budget(rid, speculation, batch_size))
        return verified, budgets

    def grant(self, rids: Sequence[int], budgets: Sequence[int]) -> None:
        """`granted` of all requests that will propose something."""
        for rid, nodes in zip(rids, budgets, strict=True):
            if nodes:
                self.granted(rid, nodes)

    def rounds(self, rids: Sequence[int], most: int, usual: int = 0) -> tuple[int, RoundCuts | None]:
        """How many rounds the step that is planned may have, at most ``most``, for requests ``rids`` that all decode:
        in later ones each drafts as much as in the first (`granted`), and verifies what it drafted as far as is said
        here. A round is what a step without further ones is. ``usual``: where more, what ``most`` is without the limit
        for `settled`."""
        return 1, None

    def observe(  # noqa: B027
        self, result: StepResult, shape: StepShape, seconds: float | None
    ) -> None:
        """Learn from a finished step; steps come in their order.

        ``seconds``: from before it was planned to after it was taken in, or, ahead, from when the step before it was
        taken in; None: not known, such as that of a step which nothing ran before.
        """

    def forget(self, rid: int) -> None:  # noqa: B027
        """The request has ended. A last row of it may still be observed."""

    def stats(self) -> ControlStats:
        """The current decisions, and how often they were reconsidered."""
        return ControlStats()


class StaticController(Controller):
    """Drafts what the request asks for, unless a table by batch size says less.

    A batch size outside of all ranges keeps the request's own K.
    """

    def __init__(self, tables: Tables | None = None) -> None:
        self._tables = dict(tables or {})
        self._latest: tuple[Sequence[Speculation], int, list[int]] = ((), 0, [])
        """What `wishes` was asked last and answered: requests that run stay the same for many steps."""

    def draft_budget(self, rid: int, speculation: Speculation, batch_size: int) -> int:
        return most_nodes(speculation, batch_size, self._tables)

    def wishes(
        self, rids: Sequence[int], speculations: Sequence[Speculation], waiting: list[int], batch_size: int
    ) -> tuple[list[int], list[int]]:
        if type(self) is not StaticController:
            return super().wishes(rids, speculations, waiting, batch_size)
        known, size, budgets = self._latest
        if known is not speculations or size != batch_size:
            budgets = [most_nodes(speculation, batch_size, self._tables) for speculation in speculations]
            self._latest = speculations, batch_size, budgets
        return waiting, budgets.copy()

    def grant(self, rids: Sequence[int], budgets: Sequence[int]) -> None:
        if type(self) is not StaticController:
            super().grant(rids, budgets)

    def rounds(self, rids: Sequence[int], most: int, usual: int = 0) -> tuple[int, RoundCuts | None]:
        return (most, None) if type(self) is StaticController else (1, None)


def most_nodes(speculation: Speculation, batch_size: int, tables: Tables) -> int:
    """Nodes the request may draft: its K or its tree, less where the method's table says so."""
    if speculation.method == "none":
        return 0
    nodes = len(speculation.tree) if speculation.tree is not None else speculation.num_speculative_tokens
    for low, high, limit in tables.get(speculation.method, ()):
        if low <= batch_size <= high:
            return min(nodes, limit)
    return nodes
