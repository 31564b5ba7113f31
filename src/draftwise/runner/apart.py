"""What follows from a step for requests one by one: those that are not decided in columns, or all of them.

This is the reference of ``csrc/steps.cpp``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from draftwise.models.base import DecoderModel
from draftwise.runner.batch import StepBatch, StepRow
from draftwise.runner.compaction import Compaction
from draftwise.runner.drafting import Drafting
from draftwise.runner.ordinary import OrdinarySteps
from draftwise.runner.outcome import Outcome, committed_rows
from draftwise.runner.rows import Row
from draftwise.runner.verifying import Verifying
from draftwise.sampling.logprobs import token_logprobs
from draftwise.types import EMPTY_PROPOSAL, TokenLogprobs, Verification


class OneByOne:
    """Takes in what a step did to requests, and what is reported of them, for one executor."""

    def __init__(
        self,
        model: DecoderModel,
        drafting: Drafting,
        verifying: Verifying,
        compaction: Compaction,
        ordinary: OrdinarySteps | None,
    ) -> None:
        """``ordinary``: who is to know that a request may be decided in columns from now on."""
        self._model = model
        self._drafting = drafting
        self._verifying = verifying
        self._compaction = compaction
        self._ordinary = ordinary

    def prompt_logprobs(self, batch: StepBatch, hidden: torch.Tensor) -> dict[int, tuple[TokenLogprobs, ...]]:
        """Those that were asked for, by step row. ``hidden`` [T, H]: of all rows of the pass."""
        return {i: self._prompt_logprobs(hidden, batch.steps[i], first, n) for i, first, n in batch.prompt}

    def _prompt_logprobs(
        self, hidden: torch.Tensor, step: StepRow, first: int, count: int
    ) -> tuple[TokenLogprobs, ...]:
        """Logprobs of prompt tokens num_computed + 1 ...: the row of token j predicts token j + 1."""
        row = step.row
        assert row.prompt_logprobs is not None
        low = row.num_computed + 1
        targets = row.tokens_np[low : low + count].tolist()
        entries: list[TokenLogprobs] = []
        # In slices, so that a long chunk times a large vocabulary does not need gigabytes.
        for i in range(0, count, 256):
            part = hidden[first + i : first + min(i + 256, count)]
            entries.extend(
                token_logprobs(self._model.logits(part), targets[i : i + 256], row.prompt_logprobs)
            )
        return tuple(entries)

    def commit(
        self, batch: StepBatch, decided: Sequence[Outcome]
    ) -> tuple[list[Outcome], list[tuple[Row, int, Sequence[int]]]]:
        """Take in what was decided of each request that reached its last token (``decided``, see `StepBatch.owners`),
        and that chunks were computed of the others: what came of each, and what drafters are told
        (`Drafting.committed`)."""
        answers = decided
        if len(decided) < len(batch.steps):
            spread: list[Outcome] = [None] * len(batch.steps)
            for i, answer in zip(batch.owners, decided, strict=True):
                spread[i] = answer
            answers = spread
        outcomes: list[Outcome] = []
        read: list[tuple[Row, int, Sequence[int]]] = []
        fills, observes = self._drafting.fills, self._drafting.observes
        for (row, planned, _), answer, start in zip(batch.steps, answers, batch.starts, strict=False):
            row.proposal = EMPTY_PROPOSAL
            before, num_new = row.num_computed, planned.num_new
            base = before + num_new
            outcome = answer if row.error is None else row.error
            path: tuple[int, ...] = ()
            if outcome.__class__ is Verification:
                path, token_ids, _ = outcome
                for fill in row.fill.values():
                    if fill.drafts:
                        fills.accepted(row, len(path), base)
                        break
                # Nodes 0, 1, ... stand where they belong.
                if path and path[-1] != len(path) - 1 and not self._verifying.compacts(row):
                    self._compaction.move(row, path, base)
                row.num_computed = base + len(path)
                row.append(token_ids)
                row.state.commit(token_ids)
                if row.native_rule < 0 and self._ordinary is not None:
                    self._ordinary.enters(row)  # it may have been short of tokens until now
                if row.grammar is not None:
                    try:
                        row.grammar.commit(token_ids)
                    except Exception as error:  # a rule that does not look at the target, such as "synthetic"
                        outcome = error
            elif outcome is None:
                row.num_computed = base
            else:
                outcomes.append(outcome)
                continue
            outcomes.append(outcome)
            if observes and planned.follow:
                read.append((row, before, committed_rows(start, num_new, path)))
        return outcomes, read

    def transfer(
        self, steps: Sequence[StepRow], outcomes: list[Outcome]
    ) -> dict[int, Mapping[str, object] | None]:
        """The results of prompts, by step row. If that fails, the request fails (in ``outcomes``)."""
        found: dict[int, Mapping[str, object] | None] = {}
        if not self._drafting.transfers:
            return found
        for i, (step, outcome) in enumerate(zip(steps, outcomes, strict=True)):
            if isinstance(outcome, Verification):
                try:
                    found[i] = self._drafting.transfer(step.row)
                except Exception as error:  # a full disk, say: only this request fails
                    outcomes[i] = error
        return found
