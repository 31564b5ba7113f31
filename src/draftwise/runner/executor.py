"""The executor: one call per step, forward -> verify -> propose."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from draftwise.kv.storage import KVStorage
from draftwise.models.base import DecoderModel
from draftwise.models.inputs import RowInput, build_step_input
from draftwise.propose.base import Proposer
from draftwise.runner.drafting import Drafting
from draftwise.runner.rows import Row
from draftwise.sampling.logprobs import token_logprobs
from draftwise.sampling.params import SamplingParams
from draftwise.sampling.state import SamplingState
from draftwise.structured.grammars import Grammars
from draftwise.types import (
    EMPTY_PROPOSAL,
    IntArray,
    NewRequest,
    Proposal,
    RowPlan,
    RowResult,
    StepPlan,
    StepResult,
    TokenLogprobs,
    Verification,
)
from draftwise.verify.base import BatchRules, PassSlots, SyntheticAcceptance, VerifyRequest, verify_batch


class Executor(ABC):
    """The seam between the host side (scheduler) and the device side (models)."""

    @abstractmethod
    def execute(self, plan: StepPlan) -> StepResult:
        """Apply the diff, run one step, answer what each row committed. Raises only if the engine is broken.

        A plan may have been made before the result of the step before it was looked at (`sched.ahead`): then
        ``num_draft`` is the most that may wait, and a row whose request has all its tokens is to be passed over.
        """

    def submit(self, plan: StepPlan) -> Future[StepResult]:
        """`execute`, without waiting for it where that is possible; steps run in the order of the calls."""
        future: Future[StepResult] = Future()
        try:
            future.set_result(self.execute(plan))
        except Exception as error:
            future.set_exception(error)
        return future

    def forget(self) -> None:  # noqa: B027
        """Let the drafters forget what they learned from past requests; between two steps."""

    @abstractmethod
    def close(self) -> None:
        """Release models and memory."""


class LocalExecutor(Executor):
    """Target and drafters in this process."""

    def __init__(
        self,
        model: DecoderModel,
        storage: KVStorage,
        proposers: Mapping[str, Proposer],
        *,
        num_blocks: int,
        block_size: int,
        device: torch.device,
        synthetic: SyntheticAcceptance | None = None,
        rules: BatchRules | None = None,
        grammars: Grammars | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """``grammars``: makes the cursors of requests with structured outputs; without it there may be none.
        ``rules``: kernels that verify; None: torch does."""
        self._model = model
        self._storage = storage
        self._block_size = block_size
        self._device = device
        self._synthetic = synthetic
        self._rules = rules
        self._compacting = rules if rules is not None and rules.compacts else None
        self._grammars = grammars
        self._clock = clock
        self._vocab_size = model.config.vocab_size
        # Native kernels have threads of their own. What torch does besides is small, and a second torch thread that
        # waits for more spins on a core the kernels want: with a busy neighbour, a softmax of 10 us took 10 ms.
        self._torch_threads = 1 if model.same_bits and device.type == "cpu" else None
        self._rows: dict[int, Row] = {}
        self._drafting = Drafting(
            proposers,
            storage,
            num_blocks=num_blocks,
            block_size=block_size,
            vocab_size=self._vocab_size,
            device=device,
        )

    # ------------------------------------------------------------------------------------------- the step

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        if self._device.type == "cuda" and self._device.index is not None:
            torch.cuda.set_device(
                self._device
            )  # of this thread, which need not be the one that loaded the models
        if self._torch_threads is None:
            return self._execute(plan)
        before = torch.get_num_threads()
        torch.set_num_threads(self._torch_threads)
        try:
            return self._execute(plan)
        finally:
            torch.set_num_threads(before)

    def _execute(self, plan: StepPlan) -> StepResult:
        self._apply(plan)
        if not plan.rows:
            return StepResult(plan.step, ())
        start = self._clock()
        steps = [self._step_row(p) for p in plan.rows if not self._rows[p.rid].is_full]
        if not steps:
            return StepResult(plan.step, ())
        batch = build_step_input([self._row_input(s) for s in steps], self._block_size, self._model.inputs_on)
        starts = batch.attention.query_start_np.tolist()
        wanted = self._logit_rows(steps, starts)

        built = self._clock()
        output, logits = self._model.forward_logits(
            batch, self._storage, wanted.rows, self._drafting.capture_layers
        )
        forwarded = self._clock()

        prompt = {
            i: self._prompt_logprobs(output.hidden, steps[i], first, n) for i, first, n in wanted.prompt
        }
        self._drafting.observe([s.row.rid for s in steps], batch, output)
        answers: list[Verification | Exception] = []
        if wanted.requests:
            answers = self._verify(logits, wanted, steps, PassSlots(self._storage, batch.slots))
        by_step = dict(zip(wanted.owners, answers, strict=True))
        read: list[tuple[Row, int, IntArray]] = []
        if self._drafting.observes:
            read = [
                (s.row, s.row.num_computed, _committed_rows(s, by_step.get(i), starts[i]))
                for i, s in enumerate(steps)
                if s.planned.follow
            ]
        results = [self._commit_row(s, by_step.get(i), prompt.get(i)) for i, s in enumerate(steps)]
        followed = 0.0
        if read:
            before = self._clock()
            self._drafting.committed(read)
            followed = self._clock() - before
        if self._drafting.transfers:
            results = [self._transferred(s, r) for s, r in zip(steps, results, strict=True)]
        self._drafting.compact()
        verified = self._clock()

        self._drafting.propose(
            [(s.row, s.planned.draft_budget) for s, r in zip(steps, results, strict=True) if _drafts_on(s, r)]
        )
        drafted = self._clock()
        return StepResult(
            step=plan.step,
            rows=tuple(
                r._replace(num_proposed=len(s.row.proposal)) if s.row.proposal.tokens else r
                for s, r in zip(steps, results, strict=True)
            ),
            input_time=built - start,
            forward_time=forwarded - built,
            verify_time=verified - forwarded - followed,
            draft_time=drafted - verified + followed,
            draft_forward_time=self._drafting.take_forward_time(),
            warnings=self._drafting.take_warnings(),
        )

    def forget(self) -> None:
        self._drafting.forget()

    def close(self) -> None:
        self._rows.clear()

    # ------------------------------------------------------------------------------------- applying diffs

    def _apply(self, plan: StepPlan) -> None:
        for rid, kept in plan.trimmed:
            row = self._rows[rid]
            row.num_blocks = kept
            self._drafting.trimmed(row)
        for rid in plan.removed:
            gone = self._rows.pop(rid, None)
            if gone is not None:
                self._drafting.removed(gone)
        for new in plan.new:
            row = self._add(new)
            self._drafting.admitted(row)
        for planned in plan.rows:
            if planned.new_block_ids:
                self._rows[planned.rid].add_blocks(planned.new_block_ids)
                self._drafting.fresh_blocks(planned.new_block_ids)

    def _add(self, new: NewRequest) -> Row:
        assert isinstance(new.sampling, SamplingParams)
        tokens = np.empty(new.max_total + 64, np.int32)
        tokens[: len(new.token_ids_np)] = new.token_ids_np
        row = Row(
            rid=new.rid,
            tokens_np=tokens,
            num_tokens=len(new.token_ids_np),
            num_prompt=new.num_prompt,
            max_total=new.max_total,
            num_computed=new.num_computed,
            state=SamplingState(
                new.sampling,
                seed=new.seed,
                sample_index=new.sample_index,
                token_ids_np=new.token_ids_np,
                num_prompt=new.num_prompt,
                vocab_size=self._vocab_size,
                device=self._device,
                stop_token_ids=new.stop_token_ids,
                bad_words_ids=new.bad_words_ids,
            ),
            speculation=new.speculation,
            stop_token_ids=new.stop_token_ids,
            prompt_logprobs=new.prompt_logprobs,
            block_table_np=np.zeros(max(8, len(new.block_ids) * 2), np.int32),
        )
        row.add_blocks(new.block_ids)
        if new.sampling.structured_outputs is not None:
            assert self._grammars is not None, "admitted without a way to follow its grammar"
            output_ids = new.token_ids_np[new.num_prompt :].tolist()
            row.grammar = self._grammars.cursor(new.sampling, output_ids)
        self._rows[new.rid] = row
        return row

    # ------------------------------------------------------------------------------------ inputs, logits

    def _step_row(self, planned: RowPlan) -> _StepRow:
        row = self._rows[planned.rid]
        proposal = row.proposal.prefix(planned.num_draft) if planned.num_draft else EMPTY_PROPOSAL
        return _StepRow(row, planned, proposal)

    def _row_input(self, step: _StepRow) -> RowInput:
        row, proposal = step.row, step.proposal
        start = row.num_computed
        known = row.tokens_np[start : start + step.planned.num_new]
        if not proposal.tokens:
            return RowInput(known, start, row.blocks_np)
        # A chain is a causal run of rows: no mask is needed for it.
        parents = None if proposal.is_chain else proposal.parents
        return RowInput([*known.tolist(), *proposal.tokens], start, row.blocks_np, parents)

    def _logit_rows(self, steps: Sequence[_StepRow], starts: Sequence[int]) -> _LogitRows:
        """Choose the rows that need logits: root and nodes of every request that reaches its last token.

        ``starts`` [R + 1]: first row of each request in the batch.
        """
        requests: list[VerifyRequest] = []
        owners: list[int] = []
        rows: list[int] = []
        prompt: list[tuple[int, int, int]] = []
        for i, step in enumerate(steps):
            row, planned = step.row, step.planned
            if row.prompt_logprobs is not None and row.num_computed < row.num_prompt - 1:
                prompt.append((i, starts[i], min(planned.num_new, row.num_prompt - 1 - row.num_computed)))
            if row.num_computed + planned.num_new < row.num_tokens:
                continue  # a chunk: nothing to sample yet
            requests.append(
                VerifyRequest(
                    state=row.state,
                    proposal=step.proposal,
                    first_row=len(rows),
                    rule=row.speculation.rule,
                    token_ids_np=row.tokens_np[: row.num_tokens],
                    pass_row=starts[i] + planned.num_new - 1,
                )
            )
            if step.proposal.tokens:
                rows.extend(range(starts[i] + planned.num_new - 1, starts[i + 1]))
            else:
                rows.append(starts[i + 1] - 1)
            owners.append(i)
        return _LogitRows(requests, owners, None if len(rows) == starts[-1] else rows, prompt)

    def _prompt_logprobs(
        self, hidden: torch.Tensor, step: _StepRow, first: int, count: int
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

    def _verify(
        self, logits: torch.Tensor, wanted: _LogitRows, steps: Sequence[_StepRow], stored: PassSlots
    ) -> list[Verification | Exception]:
        """Decide all requests, each structured one under its grammar's masks; made while a GPU still computes."""
        requests = wanted.requests
        failed: dict[int, Exception] = {}
        for j, i in enumerate(wanted.owners):
            grammar = steps[i].row.grammar
            if grammar is None:
                continue
            if requests is wanted.requests:
                requests = list(requests)
            try:
                masks = grammar.masks(steps[i].proposal)
            except Exception as error:  # its grammar is too complex, say: it fails alone
                failed[j] = error
                continue
            requests[j] = requests[j]._replace(masks=masks)
        answers = verify_batch(
            logits, requests, synthetic=self._synthetic, kernels=self._rules, stored=stored
        )
        for j, failure in failed.items():
            answers[j] = failure
        return answers

    # -------------------------------------------------------------------------------------------- commit

    def _commit_row(
        self,
        step: _StepRow,
        answer: Verification | Exception | None,
        prompt_logprobs: tuple[TokenLogprobs, ...] | None,
    ) -> RowResult:
        row, proposal = step.row, step.proposal
        row.proposal = EMPTY_PROPOSAL
        if answer is None:
            row.num_computed += step.planned.num_new
            return RowResult(row.rid, prompt_logprobs=prompt_logprobs)
        if isinstance(answer, Exception):
            return RowResult(row.rid, error=f"{type(answer).__name__}: {answer}")
        base = row.num_computed + step.planned.num_new
        moved = self._compacting is not None and self._compacting.decides(row.state, row.speculation.rule)
        self._drafting.accepted(row, proposal, answer.path, base, moved=moved)
        row.num_computed = base + len(answer.path)
        row.append(answer.token_ids)
        row.state.commit(answer.token_ids)
        if row.grammar is not None:
            try:
                row.grammar.commit(answer.token_ids)
            except Exception as error:  # a rule that does not look at the target, such as "synthetic"
                return RowResult(row.rid, error=f"{type(error).__name__}: {error}")
        if not proposal.tokens:
            return RowResult(
                row.rid, answer.token_ids, logprobs=answer.logprobs, prompt_logprobs=prompt_logprobs
            )
        return RowResult(
            rid=row.rid,
            token_ids=answer.token_ids,
            num_drafted=len(proposal),
            num_accepted=len(answer.path),
            accepted_nodes=answer.path,
            draft_tokens=proposal.tokens,
            draft_parents=proposal.parents,
            method=proposal.method,
            logprobs=answer.logprobs,
            prompt_logprobs=prompt_logprobs,
        )

    def _transferred(self, step: _StepRow, result: RowResult) -> RowResult:
        """The result with what came of the request's prompt."""
        if not result.token_ids:
            return result
        try:
            params = self._drafting.transfer(step.row)
        except Exception as error:  # a full disk, say: the request fails, and nobody else
            return RowResult(step.row.rid, error=f"{type(error).__name__}: {error}")
        return result if params is None else result._replace(kv_transfer_params=params)


class _StepRow(NamedTuple):
    """A request's part in this step, with that prefix of its waiting proposal which is verified."""

    row: Row
    planned: RowPlan
    proposal: Proposal


@dataclass(frozen=True, slots=True)
class _LogitRows:
    """``rows``: batch rows with logits, None for all; ``owners[j]``: step row of ``requests[j]``;
    ``prompt``: (step row, first batch row, count) where prompt logprobs were asked for."""

    requests: list[VerifyRequest]
    owners: list[int]
    rows: list[int] | None
    prompt: list[tuple[int, int, int]]


def _committed_rows(step: _StepRow, answer: Verification | Exception | None, start: int) -> IntArray:
    """[n] rows of the batch whose tokens are final now; ``start`` is the request's first one.

    Example: rows 5.. are one known token and four nodes, of which nodes 1 and 3 were accepted: rows 5, 7 and 9.
    """
    if isinstance(answer, Exception):
        return np.empty(0, np.int32)
    num_new = step.planned.num_new
    known = np.arange(start, start + num_new, dtype=np.int32)
    if answer is None or not answer.path:
        return known
    return np.concatenate([known, np.asarray(answer.path, np.int32) + (start + num_new)])


def _drafts_on(step: _StepRow, result: RowResult) -> bool:
    """Whether the request drafts after this step: it may, it reached its root, and is not known to have ended."""
    if not step.planned.draft_budget or not result.token_ids:
        return False
    return step.row.stop_token_ids.isdisjoint(result.token_ids)
