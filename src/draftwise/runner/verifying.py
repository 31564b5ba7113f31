"""How the executor decides the requests of a step: in columns where kernels take them, else one record each."""

from __future__ import annotations

from collections.abc import Callable

import torch

from draftwise.errors import RequestError
from draftwise.kv.storage import KVStorage
from draftwise.runner.batch import StepBatch
from draftwise.runner.outcome import Outcome
from draftwise.runner.rows import Row
from draftwise.types import Verification
from draftwise.verify.base import BatchRules, PassSlots
from draftwise.verify.batch import verify_batch
from draftwise.verify.rates import SyntheticAcceptance

Deciding = Callable[[torch.Tensor], list[Verification]]
_NOT_FINITE = RequestError("the model's logits are not finite")


class Verifying:
    """The rules of one executor."""

    def __init__(
        self, storage: KVStorage, rules: BatchRules | None, synthetic: SyntheticAcceptance | None
    ) -> None:
        """``rules``: kernels that verify; None: torch does. ``storage``: the target's."""
        self._storage = storage
        self._synthetic = synthetic
        self._rules = rules
        self._compacting = rules if rules is not None and rules.compacts else None
        self._columns = rules if rules is not None and rules.shapes and not rules.compacts else None

    def compacts(self, row: Row) -> bool:
        """Whether the accepted path of a request stands where it belongs once it is decided."""
        return self._compacting is not None and self._compacting.decides(row.state, row.speculation.rule)

    def deciding(self, batch: StepBatch) -> Deciding | None:
        """To be asked before the target's pass, for `verify`: what decides the step if kernels can."""
        rules = self._columns
        if rules is None or not (
            batch.owners and batch.plain and rules.names.issuperset(batch.decided.rules)
        ):
            return None
        return rules.deciding(batch.decided)

    def verify(self, logits: torch.Tensor, batch: StepBatch, deciding: Deciding | None) -> list[Outcome]:
        """Decide all requests, each structured one under its grammar's masks, made while a GPU still computes.

        Args:
            logits: [M, V] float32, raw, of ``batch.rows``; overwritten.
            batch: the step.
            deciding: of the step.
        """
        if deciding is not None:
            return [_NOT_FINITE if answer.token_ids[-1] < 0 else answer for answer in deciding(logits)]
        if not batch.owners:
            return []
        requests = batch.requests()
        failed: dict[int, Exception] = {}
        for j in batch.structured:
            step = batch.steps[batch.owners[j]]
            assert step.row.grammar is not None
            try:
                masks = step.row.grammar.masks(step.proposal)
            except Exception as error:  # its grammar is too complex, say: it fails alone
                failed[j] = error
                continue
            requests[j] = requests[j]._replace(masks=masks)
        answers: list[Outcome] = []
        answers += verify_batch(
            logits,
            requests,
            synthetic=self._synthetic,
            kernels=self._rules,
            stored=PassSlots(self._storage, batch.input.slots),
        )
        for j, failure in failed.items():
            answers[j] = failure
        return answers
