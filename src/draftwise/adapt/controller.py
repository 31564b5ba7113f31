"""Chooses how much to draft, for whom. The contract, and the controller that does as it is told."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

from draftwise.types import Speculation, StepResult


class Controller(ABC):
    """Asked once per request and step, before the step is planned."""

    @abstractmethod
    def draft_budget(self, speculation: Speculation, num_running: int) -> int:
        """Nodes to propose at the end of the coming step; 0 switches drafting off for it."""

    def observe(self, result: StepResult) -> None:  # noqa: B027
        """Learn from a finished step."""


class StaticController(Controller):
    """Drafts what the request asks for, unless a table by batch size says less.

    ``tables``: method -> ((from, to, K), ...), batch sizes inclusive, as vLLM's
    ``num_speculative_tokens_per_batch_size``. A batch size outside of all ranges keeps the request's own K.
    """

    def __init__(self, tables: Mapping[str, Sequence[tuple[int, int, int]]] | None = None) -> None:
        self._tables = dict(tables or {})

    def draft_budget(self, speculation: Speculation, num_running: int) -> int:
        if speculation.method == "none":
            return 0
        nodes = len(speculation.tree) if speculation.tree is not None else speculation.num_speculative_tokens
        for low, high, limit in self._tables.get(speculation.method, ()):
            if low <= num_running <= high:
                return min(nodes, limit)
        return nodes
