"""The executor of one process: target and drafters beside it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from typing import TypeVar

import numpy as np
import torch

from draftwise.graphs.decoder import GraphedDecoder
from draftwise.kernels.cpu.columns import own_packer
from draftwise.kernels.cpu.library import native_library
from draftwise.kv.storage import KVStorage
from draftwise.lifetime import computing
from draftwise.models.base import DecoderModel
from draftwise.models.lora.decoder import adapted_of
from draftwise.models.lora.low_rank import LowRank
from draftwise.propose.base import Proposer
from draftwise.runner.apart import OneByOne
from draftwise.runner.batch import assemble
from draftwise.runner.compaction import Compaction
from draftwise.runner.drafting import Drafting
from draftwise.runner.executor import Executor
from draftwise.runner.launched import Launched
from draftwise.runner.ordinary import OrdinarySteps
from draftwise.runner.outcome import Outcome, drafting, row_results
from draftwise.runner.own_threads import thread_numbers
from draftwise.runner.placing import Placing, Wanted
from draftwise.runner.rounds import MOST_ROUNDS, ComputedRounds, RoundSteps
from draftwise.runner.rows import BlockTables, Row
from draftwise.runner.seat_results import Flight
from draftwise.runner.seats import Seats
from draftwise.runner.side_by_side import OrdinaryStep
from draftwise.runner.verifying import Verifying
from draftwise.sampling.params import SamplingParams
from draftwise.sampling.state import SamplingState
from draftwise.sched.columns import PlanColumns
from draftwise.structured.grammars import Grammars
from draftwise.types import (
    DrafterFailure,
    NewRequest,
    StepInput,
    StepPlan,
    StepResult,
    TargetOutput,
    TokenLogprobs,
)
from draftwise.verify.base import BatchRules
from draftwise.verify.native import NativeRules
from draftwise.verify.rates import SyntheticAcceptance

T = TypeVar("T")


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
        seated: bool = False,
        clock: Callable[[], float] = time.perf_counter,
        threads: int | None = None,
    ) -> None:
        """``grammars``: makes the cursors of requests with structured outputs; without it there may be none.
        ``rules``: kernels that verify; None: torch does. ``seated``: let requests decode on the device where they
        can, if the model's passes are captured; steps then cannot be timed one by one. ``threads``: torch's during a
        step, where torch computes on a CPU; None: as many as it has."""
        self._model = model
        self._storage = storage
        self._block_size = block_size
        self._device = device
        self._verifying = Verifying(storage, rules, synthetic)
        self._grammars = grammars
        self._clock = clock
        self._vocab_size = model.config.vocab_size
        # Native kernels have threads of their own. What torch does besides is small, and a second torch thread that
        # waits for more spins on a core the kernels want: with a busy neighbour, a softmax of 10 us took 10 ms.
        self._torch_threads = (1 if model.same_bits else threads) if device.type == "cpu" else None
        self._threads = thread_numbers()
        self._rows: dict[int, Row] = {}
        self._tables = BlockTables()
        self._packer = own_packer(device)
        library = None if self._packer is None else native_library()
        self._ordinary: OrdinarySteps | None = None
        captured = seated and isinstance(model, GraphedDecoder)
        if library is not None and isinstance(rules, NativeRules) and not captured and storage.states is None:
            assert self._packer is not None, "made of the same library"
            self._ordinary = OrdinarySteps(library, rules, self._packer, block_size)
        self._drafting = Drafting(
            proposers,
            num_blocks=num_blocks,
            block_size=block_size,
            vocab_size=self._vocab_size,
            device=device,
            chains_only=storage.states is not None,
            placing=None if library is None or self._ordinary is None else Placing(library, block_size),
        )
        self._rounds: RoundSteps | None = None
        if self._ordinary is not None and library is not None and isinstance(rules, NativeRules):
            self._rounds = RoundSteps(
                library, rules, model, storage, self._drafting, self._ordinary, block_size
            )
        self._compaction = Compaction(storage, block_size, device)
        self._one_by_one = OneByOne(model, self._drafting, self._verifying, self._compaction, self._ordinary)
        self.seats: Seats | None = None  # of requests that decode on the device
        if seated and isinstance(model, GraphedDecoder):
            seats = Seats(
                model,
                proposers,
                self._drafting,
                self._rows,
                block_size=block_size,
                synthetic=synthetic,
                forced=None if rules is None else rules.forced,
                spare_block=num_blocks,
            )
            if seats and (device.type != "cuda" or seats.prepare()):
                self.seats = seats

    # ------------------------------------------------------------------------------------------- the step

    def many_steps(self) -> AbstractContextManager[None]:
        return nullcontext() if self._torch_threads is None else self._threads.kept(self._torch_threads)

    def execute(self, plan: StepPlan) -> StepResult:
        if self.seats is not None:
            return self.launch(plan).finish()
        return self._here(lambda: self._execute(plan))

    def forked(self) -> bool:
        # other threads stayed in the parent, and OpenMP would wait for them for ever
        if self._torch_threads is not None:
            self._torch_threads = 1
        return True

    @property
    def most_rounds(self) -> int:
        return 1 if self._rounds is None else MOST_ROUNDS

    def hurry(self, now: bool) -> None:
        if self._rounds is not None:
            self._rounds.hurry(now)

    def launch(self, plan: StepPlan) -> Launched:
        seats = self.seats
        if seats is None:
            return Launched(self.execute(plan))
        return self._here(lambda: self._launch(plan, seats))

    @property
    def num_captured(self) -> int:
        return 0 if self.seats is None else self.seats.num_captured

    def _launch(self, plan: StepPlan, seats: Seats) -> Launched:
        """Start the step of requests with seats; the step of the others is executed behind it."""
        seats.leave(plan)
        self._apply(plan)
        arrived, failures = self._arrive(plan, seats)
        rows = tuple(p._replace(num_new=1) if p.rid in arrived else p for p in plan.rows)
        taking = seats.take(replace(plan, rows=rows) if arrived else plan)
        flight = seats.launch(taking) if taking else None
        own = set() if flight is None else {p.rid for p in taking}
        rest = tuple(p for p in rows if p.rid not in own)
        others = StepResult(plan.step, ())
        if rest or flight is None:
            others = self._execute(replace(plan, rows=rest), applied=True)
        others = replace(others, drafter_failures=(*failures, *others.drafter_failures))
        if flight is None:
            return Launched(others)
        return Launched(finish=lambda: self._here(lambda: self._finish(seats, flight, others)))

    def _arrive(self, plan: StepPlan, seats: Seats) -> tuple[set[int], tuple[DrafterFailure, ...]]:
        """Compute the ends of prompts up to their last tokens, without waiting for it: of whom it was done."""
        arriving = seats.arriving(plan)
        failures: tuple[DrafterFailure, ...] = ()
        chunks = tuple(
            p._replace(num_new=p.num_new - 1, num_draft=0, draft_budget=0, follow=True)
            for p in arriving
            if p.num_new > 1
        )
        if chunks:
            failures = self._execute(replace(plan, rows=chunks), applied=True).drafter_failures
        seats.caught_up(arriving)
        return {p.rid for p in arriving}, failures

    def _finish(self, seats: Seats, flight: Flight, others: StepResult) -> StepResult:
        """The results of a step of seats, and of the others in it. The times of its parts are unknown."""
        rows = (*seats.finish(flight), *others.rows)
        failures = (*others.drafter_failures, *self._drafting.take_failures())
        return StepResult(others.step, rows, drafter_failures=failures)

    def _here(self, run: Callable[[], T]) -> T:
        """Run something with this executor's device and number of threads.

        Raises ProgramEnding at the end of the program."""
        if not torch.is_inference_mode_enabled():  # callers of many steps enter it once
            with torch.inference_mode():
                return self._here(run)
        with computing():
            if self._device.type == "cuda" and self._device.index is not None:
                # of this thread, which need not be the one that loaded the models
                torch.cuda.set_device(self._device)
            if self._torch_threads is None:
                return run()
            before = torch.get_num_threads()
            if before == self._torch_threads:
                return run()
            mkl = self._threads.set(self._torch_threads)
            try:
                return run()
            finally:
                self._threads.set(before, mkl)

    def _execute(self, plan: StepPlan, *, applied: bool = False) -> StepResult:
        if not applied:
            self._apply(plan)
        if not plan.rows:
            return self._nothing(plan)
        start = self._clock()
        ordinary = self._ordinary
        if self._rounds is not None and ordinary is not None and not plan.new:
            done = self._rounds.run(plan, self._rows)
            if done is not None:
                return self._end_rounds(plan.step, ordinary, done, start)
        if ordinary is not None:
            step = None if self._drafting.transfers else ordinary.gather(plan.rows, self._rows)
            if step is not None:
                return self._in_columns(plan.step, ordinary, step, start)
            ordinary.catch_up(self._rows)
        states = self._storage.states is not None
        batch = assemble(
            plan.rows, self._rows, self._tables, self._block_size, self._model.inputs_on, self._packer, states
        )
        if batch is None:
            return self._nothing(plan)
        steps = batch.steps
        deciding = self._verifying.deciding(batch)
        built = self._clock()
        output, logits = self._forward(batch.input, batch.rows, read=bool(batch.prompt))
        forwarded = self._clock()
        prompt = {} if output is None else self._one_by_one.prompt_logprobs(batch, output.hidden)
        if self._drafting.observes:
            assert output is not None
            rows = [step.row for step in steps]
            self._drafting.observe(rows, [row.rid for row in rows], batch.input, output)
        outcomes, read = self._one_by_one.commit(batch, self._verifying.verify(logits, batch, deciding))
        followed = 0.0
        if read:
            before = self._clock()
            self._drafting.committed(read)
            followed = self._clock() - before
        transferred = self._one_by_one.transfer(steps, outcomes)
        self._compaction.compact()
        verified = self._clock()

        self._drafting.propose(Wanted.of(drafting(steps, outcomes)))
        drafted = self._clock()
        return StepResult(
            step=plan.step,
            rows=row_results(steps, outcomes, prompt, transferred),
            input_time=built - start,
            forward_time=forwarded - built,
            verify_time=verified - forwarded - followed,
            draft_time=drafted - verified + followed,
            draft_forward_time=self._drafting.take_forward_time(),
            drafter_failures=self._drafting.take_failures(),
        )

    def _end_rounds(
        self, number: int, ordinary: OrdinarySteps, found: ComputedRounds, start: float
    ) -> StepResult:
        """Draft what native code could not, behind the last of several rounds."""
        drafting, before = self._drafting, self._clock()
        rounds, members, wanted, forward_time, verify_time, draft_time, computing, steady = found
        input_time = max(before - start - forward_time - verify_time - draft_time, 0.0)
        if wanted.rows:
            drafting.propose(wanted)
            ordinary.wait(members, rounds[-1])
            draft_time += self._clock() - before
            computing += drafting.take_forward_time()
        return StepResult(
            number,
            rounds.pop(),
            input_time,
            forward_time,
            verify_time,
            draft_time,
            computing,
            steady,
            drafting.take_failures(),
            tuple(rounds),
        )

    def _in_columns(
        self, number: int, ordinary: OrdinarySteps, step: OrdinaryStep, start: float
    ) -> StepResult:
        """`_execute` of a step in columns."""
        drafting, apart, one_by_one = self._drafting, step.apart, self._one_by_one
        deciding = None if apart is None else self._verifying.deciding(apart)
        built = self._clock()
        output, logits = self._forward(
            step.input, step.logit_rows, read=apart is not None and bool(apart.prompt)
        )
        forwarded = self._clock()
        prompt: Mapping[int, tuple[TokenLogprobs, ...]] = {}
        if apart is not None and output is not None:
            prompt = one_by_one.prompt_logprobs(apart, output.hidden)
        if drafting.observes:
            assert output is not None
            drafting.observe(step.rows, step.plan.rids, step.input, output, step.method)
        # first: torch may overwrite what it decides by
        moved = ordinary.decide(step, logits, told=drafting.observes)
        outcomes: list[Outcome] = []
        read: Sequence[tuple[Row, int, Sequence[int]]] = ()
        if apart is not None:
            outcomes, read = one_by_one.commit(apart, self._verifying.verify(logits, apart, deciding))
        followed = 0.0
        if drafting.observes:
            before = self._clock()
            if not drafting.read_columns(step.rows, step.method, step.read_columns):
                drafting.committed(step.read(read))
            followed = self._clock() - before
        ordinary.compact(self._storage, *moved)
        self._compaction.compact()
        verified = self._clock()
        drafting.propose(step.drafting(outcomes))
        drafted = self._clock()
        of_others = () if apart is None else row_results(apart.steps, outcomes, prompt, {})
        return StepResult(
            step=number,
            rows=ordinary.results(step, of_others),
            input_time=built - start,
            forward_time=forwarded - built,
            verify_time=verified - forwarded - followed,
            draft_time=drafted - verified + followed,
            draft_forward_time=drafting.take_forward_time(),
            drafter_failures=drafting.take_failures(),
        )

    def _forward(
        self, batch: StepInput, rows: list[int] | None, *, read: bool
    ) -> tuple[TargetOutput | None, torch.Tensor]:
        """The target's pass, with logits of ``rows``. Its hidden states only if a drafter or somebody else (``read``)
        reads them: a prompt is computed faster without."""
        drafting = self._drafting
        if drafting.observes or read:
            return self._model.forward_logits(batch, self._storage, rows, drafting.capture_layers)
        return None, self._model.logits_alone(batch, self._storage, rows)

    def _nothing(self, plan: StepPlan) -> StepResult:
        return StepResult(plan.step, (), drafter_failures=self._drafting.take_failures())

    def check_adapter(self, adapter: Mapping[str, LowRank]) -> None:
        model = adapted_of(self._model)
        if model is None:
            super().check_adapter(adapter)
        else:
            model.check(adapter)

    def load_adapter(self, slot: int, adapter: Mapping[str, LowRank]) -> None:
        model = adapted_of(self._model)
        if model is not None:
            self._here(lambda: model.load(slot, adapter))

    def drop_adapter(self, slot: int) -> None:
        model = adapted_of(self._model)
        if model is not None:
            model.drop(slot)

    def forget(self) -> None:
        self._drafting.forget()
        if self.seats is not None:
            self._here(self.seats.forget)

    def close(self) -> None:
        if self.seats is not None:
            with suppress(Exception):  # a broken device has said so before
                self._here(self.seats.end)  # nothing is on its way to memory that goes
        self._rows.clear()

    # ------------------------------------------------------------------------------------- applying diffs

    def _apply(self, plan: StepPlan) -> None:
        if self._ordinary is not None and (plan.new or plan.removed):
            self._ordinary.changed()
        for rid, kept in plan.trimmed:
            row = self._rows[rid]
            row.trim(kept)
            self._drafting.trimmed(row)
        for rid in plan.removed:
            gone = self._rows.pop(rid, None)
            if gone is not None:
                self._drafting.removed(gone)
                self._tables.close(gone.line)
        for new in plan.new:
            row = self._add(new)
            self._drafting.admitted(row)
        columns = PlanColumns.of(plan.rows)
        for i, block_ids in columns.blocks.items():
            self._rows[columns.rids[i]].add_blocks(block_ids)
        if columns.blocks:
            self._drafting.fills.fresh_blocks(
                [block for block_ids in columns.blocks.values() for block in block_ids]
            )

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
            tables=self._tables,
            line=self._tables.open(),
            adapter=new.adapter,
        )
        row.add_blocks(new.block_ids)
        if new.sampling.structured_outputs is not None:
            assert self._grammars is not None, "admitted without a way to follow its grammar"
            row.kind = 0
            output_ids = new.token_ids_np[new.num_prompt :].tolist()
            try:
                row.grammar = self._grammars.cursor(new.sampling, output_ids)
            except Exception as error:  # it was checked, but so much memory need not be there a second time
                row.error = error
        if self._ordinary is not None:
            self._ordinary.enters(row)
        self._rows[new.rid] = row
        return row
