"""Runs a case: builds its engine, feeds it requests as they come, gives some up in every way there is, and looks at the
books after every step."""

from __future__ import annotations

import asyncio
import logging
import os
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from draftwise import AsyncLLM, EngineDeadError, RequestOutput
from draftwise.config import resolve_engine_config
from draftwise.engine.adapters import at_once
from draftwise.engine.async_llm import RequestStream
from draftwise.engine.builder import Engine, build_engine
from draftwise.engine.group import RequestGroup
from draftwise.engine.inspection import engine_stats
from draftwise.engine.outputs import EngineStats
from draftwise.runner.executor import Executor
from draftwise.runner.local import LocalExecutor
from draftwise.runner.threaded import ThreadedExecutor
from draftwise.types import StepPlan, StepResult
from tests.fakes.fake_executor import LateExecutor
from tests.fakes.fuzz.cases import MAX_PROMPT, Ask, Case
from tests.fakes.fuzz.world import World

MOST_STEPS = 4000
"""More than any batch here can take: who needs them waits for ever."""


@dataclass(frozen=True)
class Answer:
    """What became of an ask. ``seed``: with which its requests drew. ``output``: None where nobody read it to its end;
    ``pieces``: token ids and text of the outputs that were read, put together; None if they were not streamed."""

    ask: Ask
    seed: int
    output: RequestOutput | None
    pieces: tuple[list[tuple[int, ...]], list[str]] | None = None
    dead: bool = False  # the engine was closed under it


@dataclass(frozen=True)
class Run:
    answers: list[Answer]
    stats: EngineStats
    same_bits: bool


@contextmanager
def kernels(name: str) -> Iterator[None]:
    """Engines that are built inside run on these kernels."""
    before = os.environ.get("DRAFTWISE_KERNELS")
    os.environ["DRAFTWISE_KERNELS"] = name
    try:
        yield
    finally:
        if before is None:
            del os.environ["DRAFTWISE_KERNELS"]
        else:
            os.environ["DRAFTWISE_KERNELS"] = before


def run_case(case: Case, world: World) -> Run:
    """Raises AssertionError if the engine's books disagree on the way, or something is left at the end."""
    with kernels(case.kernels), _complaints() as complaints:
        run = _run_async(case, world) if case.drive == "async" else _run_steps(case, world)
    assert not complaints, f"the engine complains: {complaints[0]}"
    return run


_USUAL = (
    "longer requests are refused",
    "quantised weights meet rows as they are",
    "compilation_config has no effect",
)
"""What the log says of settings that a case may have."""


@contextmanager
def _complaints() -> Iterator[list[str]]:
    """Warnings of the engine's log: a drafter that fails costs no token, but none of these may fail."""
    found: list[str] = []
    formatter = logging.Formatter()

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if not any(usual in record.msg for usual in _USUAL):
                found.append(formatter.format(record))

    logger, handler = logging.getLogger("draftwise"), Handler(logging.WARNING)
    propagates, logger.propagate = logger.propagate, False
    logger.addHandler(handler)
    try:
        yield found
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagates


# -------------------------------------------------------------------------------------------- step by step


class Clock:
    """Time that goes on by chance, the same chance for the same seed."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._now = 0.0

    def __call__(self) -> float:
        self._now += self._rng.uniform(0.0001, 0.003)
        return self._now


class Watched(Executor):
    """Checks every plan on its way to the device."""

    def __init__(self, inner: Executor, case: Case) -> None:
        self.inner = inner
        self._rows = case.options["max_num_batched_tokens"]
        self._seqs = case.options["max_num_seqs"]

    def _check(self, plan: StepPlan) -> None:
        rows = sum(row.num_new + row.num_draft for row in plan.rows)
        assert rows <= self._rows, f"{rows} rows in a step of {self._rows}"
        assert len(plan.rows) <= self._seqs, f"{len(plan.rows)} requests in a step of {self._seqs}"
        assert len({row.rid for row in plan.rows}) == len(plan.rows), "a request has two rows"

    def execute(self, plan: StepPlan) -> StepResult:
        self._check(plan)
        return self.inner.execute(plan)

    def submit(self, plan: StepPlan) -> Any:
        self._check(plan)
        return self.inner.submit(plan)

    def check_adapter(self, adapter: Any) -> None:
        self.inner.check_adapter(adapter)

    def load_adapter(self, slot: int, adapter: Any) -> None:
        self.inner.load_adapter(slot, adapter)

    def drop_adapter(self, slot: int) -> None:
        self.inner.drop_adapter(slot)

    def forget(self) -> None:
        self.inner.forget()

    def close(self) -> None:
        self.inner.close()


def _run_steps(case: Case, world: World) -> Run:
    config = resolve_engine_config(model=world.target, **case.options)
    engine = build_engine(config, Clock(case.seed), keep_trace=True)
    core = engine.core
    local = core.executor.inner if isinstance(core.executor, ThreadedExecutor) else core.executor
    assert isinstance(local, LocalExecutor)
    device = LateExecutor(local) if case.ahead and case.late else core.executor
    core.executor = Watched(device, case)
    try:
        answers: list[Answer] = []
        for number, batch in enumerate(case.batches):
            asks = follow_up(batch, answers, random.Random(f"{case.seed}/{number}"))
            answers += _batch(engine, local, asks, case, world)
        core.step()  # the executor learns of the last ones
        while core.has_work:
            core.step()
        assert not local._rows, "the executor keeps requests that have ended"
        stats = engine_stats(engine)
        _nothing_left(stats)
        return Run(answers, stats, engine.guarantees.same_bits)
    finally:
        core.close()


def _batch(
    engine: Engine, local: LocalExecutor, asks: Sequence[Ask], case: Case, world: World
) -> list[Answer]:
    core = engine.core
    groups: list[RequestGroup | None] = [None] * len(asks)
    given_up: set[int] = set()
    step = 0
    while core.has_work or None in groups:
        for i, ask in enumerate(asks):
            group = groups[i]
            if group is None and (ask.arrival <= step or not core.has_work):
                prompt = {"prompt_token_ids": list(ask.prompt)}
                lease = engine.adapters.lease(world.adapters[ask.adapter], at_once)
                groups[i] = group = engine.processor.group(
                    prompt, ask.params, f"{case.seed}-{i}", ask.priority, lease=lease
                )
                for request in group.requests:
                    core.add(request)
            if (
                group is not None
                and ask.cancel
                and i not in given_up
                and group.num_output >= ask.cancel_after
            ):
                given_up.add(i)
                for request in group.requests[: 1 if ask.cancel == "sample" else None]:
                    core.cancel(request.rid)
        core.step()
        core.check_integrity()
        if not case.ahead:
            tables_agree(engine, local)
        step += 1
        assert step < MOST_STEPS, "requests do not come to an end"
    made = [group for group in groups if group is not None]
    return [
        Answer(ask, group.requests[0].seed, group.output()) for ask, group in zip(asks, made, strict=True)
    ]


def tables_agree(engine: Engine, local: LocalExecutor) -> None:
    """Between two steps scheduler and executor think the same of whoever runs."""
    scheduler = engine.core.scheduler
    for request in scheduler._running:
        row = local._rows.get(request.rid)
        if row is None:
            continue  # admitted again, and planned with the next step
        table = scheduler.kv.block_ids(request.rid)
        assert tuple(row.blocks_np.tolist()) == table, f"request {request.rid}: two block tables"
        assert row.num_computed == request.num_computed, f"request {request.rid}: computed by two counts"
        known = row.tokens_np[: row.num_tokens].tolist()
        assert known == request.known_np.tolist(), f"request {request.rid}: two texts"


def _nothing_left(stats: EngineStats) -> None:
    assert stats.num_used_blocks == 0, "blocks leak"
    assert stats.num_running == stats.num_waiting == 0


def follow_up(batch: Sequence[Ask], before: Sequence[Answer], rng: random.Random) -> list[Ask]:
    """Some requests of a batch go on where an earlier one ended, as conversations do."""
    told = [a for a in before if a.ask.cancel is None and a.ask.rule in ("greedy", "coupled")]
    out = []
    for ask in batch:
        if told and rng.random() < 0.4:
            output = rng.choice(told).output
            if output is not None and output.finished:
                text = (*output.prompt_token_ids, *rng.choice(output.outputs).token_ids)
                ask = replace(ask, prompt=(*text[: MAX_PROMPT - 2], *ask.prompt[:2]))
        out.append(ask)
    return out


# ----------------------------------------------------------------------------------------- with a loop


def _run_async(case: Case, world: World) -> Run:
    return asyncio.run(_async(case, world))


async def _async(case: Case, world: World) -> Run:
    failures: list[BaseException] = []
    llm = AsyncLLM(world.target, keep_trace=True, **case.options)

    def look(_: object) -> None:
        try:
            llm.check_integrity()
        except AssertionError as error:
            failures.append(error)

    llm.observe(look)
    answers: list[Answer] = []
    try:
        for number, batch in enumerate(case.batches):
            asks = follow_up(batch, answers, random.Random(f"{case.seed}/{number}"))
            tasks = [
                asyncio.create_task(_one(llm, ask, f"{number}-{i}", world)) for i, ask in enumerate(asks)
            ]
            if case.close_early and batch is case.batches[-1]:
                await asyncio.sleep(0.004)
                await asyncio.to_thread(llm.close)
            answers += await asyncio.wait_for(asyncio.gather(*tasks), 120)
        llm.check_integrity()
        if failures:
            raise failures[0]
        stats = llm.stats()
        if not case.close_early:
            _nothing_left(stats)
        return Run(answers, stats, llm.guarantees.same_bits)
    finally:
        await asyncio.to_thread(llm.close)


async def _one(llm: AsyncLLM, ask: Ask, name: str, world: World) -> Answer:
    """Read one request's outputs, or as many as its way of ending lets it."""
    await asyncio.sleep(ask.arrival * 0.0007)
    prompt = {"prompt_token_ids": list(ask.prompt)}
    try:
        adapter = world.adapters[ask.adapter]
        stream = llm.submit(prompt, ask.params, name, priority=ask.priority, lora_request=adapter)
        await stream.ready()
    except EngineDeadError:
        return Answer(ask, 0, None, dead=True)
    reader = _Reader(llm, ask, stream)
    task = asyncio.create_task(reader.read())
    reader.give_up = task.cancel
    if ask.cancel == "task" and not ask.cancel_after:
        task.cancel()
    try:
        await task
    except asyncio.CancelledError:
        pass
    except EngineDeadError:
        reader.dead = True
    finally:
        stream.close()
    with llm._engine.core.lock:
        output = reader.last if ask.params.output_kind != "delta" else stream.group.output()
    return Answer(ask, stream.group.requests[0].seed, output, reader.pieces(), reader.dead)


class _Reader:
    def __init__(self, llm: AsyncLLM, ask: Ask, stream: RequestStream) -> None:
        self.give_up: Callable[[], object] = lambda: None
        self.last: RequestOutput | None = None
        self.dead = False
        self._llm = llm
        self._ask = ask
        self._stream = stream
        self._ids: list[tuple[int, ...]] = [()] * ask.params.n
        self._texts = [""] * ask.params.n

    def pieces(self) -> tuple[list[tuple[int, ...]], list[str]] | None:
        return (self._ids, self._texts) if self._ask.params.output_kind == "delta" else None

    async def read(self) -> None:
        ask = self._ask
        async for output in self._stream:
            self.last = output
            if ask.params.output_kind == "delta":
                for i, sample in enumerate(output.outputs):
                    self._ids[i] += sample.token_ids
                    self._texts[i] += sample.text
                read = sum(map(len, self._ids))
            else:
                read = sum(len(sample.token_ids) for sample in output.outputs)
            if ask.cancel is None or output.finished or read < ask.cancel_after:
                continue
            if ask.cancel == "abort":
                self._llm.abort(self._stream.request_id)
            elif ask.cancel == "task":
                self.give_up()
                await asyncio.sleep(0)
            elif ask.cancel == "shut":  # and read on: the last output says so
                self._stream.close()
            else:
                if ask.cancel == "close":
                    self._stream.close()
                break
