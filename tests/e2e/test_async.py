"""The asynchronous facade: streaming, cancellation, slow readers, failure."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
import torch

from draftwise import LLM, AsyncLLM, EngineDeadError, RequestError, SamplingParams
from draftwise.engine.outputs import RequestOutput
from draftwise.kv.events import CacheCleared
from tests.e2e.conftest import random_prompts, token_ids
from tests.fakes.tiny import TinyModels

GREEDY = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)


def _dawdle(_: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
    time.sleep(0.002)
    return logits


SLOW = GREEDY.replace(max_tokens=120, logits_processors=[_dawdle])
"""A request that surely runs a while, however fast the engine is."""


@asynccontextmanager
async def engine(tiny: TinyModels, **options: Any) -> AsyncIterator[AsyncLLM]:
    llm = AsyncLLM(
        tiny.target,
        dtype="float32",
        device="cpu",
        skip_tokenizer_init=True,
        block_size=4,
        num_kv_blocks=options.pop("num_kv_blocks", 256),
        speculative_config={"method": "draft_model", "model": tiny.near, "num_speculative_tokens": 3},
        **({"speculation_control": "static"} | options),
    )
    try:
        yield llm
        for _ in range(200):  # cancelled requests leave with the next step
            if llm.stats().num_used_blocks == 0:
                break
            await asyncio.sleep(0.01)
        llm.check_integrity()
        assert llm.stats().num_used_blocks == 0, "blocks leak"
    finally:
        await asyncio.to_thread(llm.close)


async def collect(llm: AsyncLLM, prompt: Any, params: SamplingParams, **more: Any) -> list[RequestOutput]:
    return [output async for output in llm.generate(prompt, params, **more)]


def test_streams_agree_with_the_synchronous_engine(tiny: TinyModels, make_llm: Callable[..., LLM]) -> None:
    prompts = random_prompts(8, seed=1)
    wanted = token_ids(make_llm().generate(prompts, GREEDY))

    async def main() -> None:
        async with engine(tiny, num_kv_blocks=64, max_num_seqs=4) as llm:
            kinds = ["cumulative", "delta", "final_only"]
            streams = await asyncio.gather(
                *(
                    collect(llm, p, GREEDY.replace(output_kind=kinds[i % 3]))  # type: ignore[arg-type]
                    for i, p in enumerate(prompts)
                )
            )
            for i, outputs in enumerate(streams):
                assert [o.finished for o in outputs] == [False] * (len(outputs) - 1) + [True]
                if kinds[i % 3] == "delta":
                    pieces = [o.outputs[0].token_ids for o in outputs]
                    assert tuple(t for piece in pieces for t in piece) == wanted[i]
                    assert all(pieces)  # a slow reader gets fewer, larger ones, down to one
                else:
                    assert outputs[-1].outputs[0].token_ids == wanted[i]
                    lengths = [len(o.outputs[0].token_ids) for o in outputs]
                    assert lengths == sorted(lengths)
                    if kinds[i % 3] == "final_only":
                        assert len(outputs) == 1
                assert outputs[-1].outputs[0].finish_reason == "length"

    asyncio.run(main())


def test_abort_early_exit_and_cancelled_tasks(tiny: TinyModels) -> None:
    prompts = random_prompts(3, seed=2, high=20)

    async def main() -> None:
        async with engine(tiny) as llm:
            # abort() ends the stream with its reason
            outputs = []
            async for output in llm.generate(prompts[0], SLOW, request_id="a"):
                outputs.append(output)
                if len(outputs) == 2:
                    assert llm.abort("a")
            assert outputs[-1].outputs[0].finish_reason == "abort"
            assert len(outputs[-1].outputs[0].token_ids) < 120
            assert not llm.abort("a") and not llm.abort("never")
            # leaving the iteration aborts
            stream = llm.generate(prompts[1], SLOW, request_id="b")
            async for _ in stream:
                break
            await stream.aclose()  # type: ignore[attr-defined]
            # cancelling the task aborts, the others go on
            doomed = asyncio.create_task(collect(llm, prompts[1], SLOW))
            other = asyncio.create_task(collect(llm, prompts[2], GREEDY))
            await asyncio.sleep(0.02)
            doomed.cancel()
            with pytest.raises(asyncio.CancelledError):
                await doomed
            assert (await other)[-1].outputs[0].finish_reason == "length"

    asyncio.run(main())


def test_a_slow_reader_misses_nothing_and_holds_nothing_up(tiny: TinyModels) -> None:
    prompts = random_prompts(2, seed=3)

    async def main() -> None:
        async with engine(tiny) as llm:
            wanted = (await collect(llm, prompts[0], GREEDY))[-1].outputs[0].token_ids
            pieces: list[int] = []
            count = 0
            async for output in llm.generate(prompts[0], GREEDY.replace(output_kind="delta")):
                if count == 0:  # another request comes and goes while nobody reads this one
                    assert (await collect(llm, prompts[1], GREEDY))[-1].finished
                    await asyncio.sleep(0.2)
                pieces.extend(output.outputs[0].token_ids)
                count += 1
            assert tuple(pieces) == wanted
            assert count <= 3  # what came meanwhile was delivered as one piece

    asyncio.run(main())


@pytest.mark.parametrize("kind", ["delta", "cumulative"])
def test_a_reader_that_is_woken_for_nothing_gets_nothing(tiny: TinyModels, kind: Any) -> None:
    """A reader that is woken for one step reads that of the next, too, if it has ended; then it is woken for that."""

    async def main() -> None:
        async with engine(tiny) as llm:
            stream = llm.submit(random_prompts(1, seed=3)[0], SLOW.replace(output_kind=kind))
            lengths = []
            async for output in stream:
                lengths.append(len(output.outputs[0].token_ids))
                stream.event.set()
            assert len(lengths) > 1
            if kind == "delta":
                assert all(lengths)
            else:
                assert lengths == sorted(set(lengths))

    asyncio.run(main())


def test_invalid_requests_and_doubled_ids(tiny: TinyModels) -> None:
    async def main() -> None:
        async with engine(tiny) as llm:
            with pytest.raises(RequestError, match="empty"):
                await collect(llm, {"prompt_token_ids": []}, GREEDY)
            prompt = random_prompts(1)[0]
            stream = llm.generate(prompt, SLOW, request_id="x")
            await anext(stream)  # type: ignore[call-overload]
            with pytest.raises(RequestError, match="in use"):
                await collect(llm, prompt, GREEDY, request_id="x")
            await stream.aclose()  # type: ignore[attr-defined]
            for params in ({"temperature": 0}, "x", [GREEDY]):
                with pytest.raises(RequestError, match=r"^sampling_params is .*; it must be SamplingParams"):
                    await collect(llm, prompt, params)  # type: ignore[arg-type]
            running = asyncio.ensure_future(collect(llm, prompt, GREEDY))
            for priority in ("high", None, 1.5):
                with pytest.raises(RequestError, match=r"^priority is .*; it must be an integer"):
                    await collect(llm, prompt, GREEDY, priority=priority)
            assert (await running)[-1].finished, "nobody else is disturbed"
            llm.check_integrity()

    asyncio.run(main())


def test_names_that_the_engine_gives_are_nobody_elses(tiny: TinyModels) -> None:
    """Users number their requests, too."""

    async def main() -> None:
        async with engine(tiny) as llm:
            prompt = random_prompts(1)[0]
            unnamed = [llm.submit(prompt, SLOW) for _ in range(3)]
            named = [llm.submit(prompt, GREEDY, str(i)) for i in range(8)]
            assert len({stream.request_id for stream in (*unnamed, *named)}) == 11
            for stream in (*unnamed, *named):
                stream.close()

    asyncio.run(main())


@pytest.mark.parametrize("kind", ["delta", "cumulative", "final_only"])
def test_a_stream_that_is_closed_ends_for_whoever_reads_it(tiny: TinyModels, kind: Any) -> None:
    """Closed from another task while its reader waits, and in the reader's own loop, who goes on."""

    async def main() -> None:
        async with engine(tiny) as llm:
            for own in (False, True):
                stream = llm.submit(random_prompts(1)[0], SLOW.replace(output_kind=kind, n=2))

                async def read(stream: Any = stream, own: bool = own) -> RequestOutput:
                    outputs: list[RequestOutput] = []
                    async for output in stream:
                        outputs.append(output)
                        if own:
                            stream.close()
                    return outputs[-1]

                task = asyncio.create_task(read())
                await asyncio.sleep(0.05)
                if not own or kind == "final_only":
                    stream.close()
                output = await asyncio.wait_for(task, 20)
                assert output.finished
                assert {sample.finish_reason for sample in output.outputs} == {"abort"}

    asyncio.run(main())


def test_a_dead_engine_fails_its_readers(tiny: TinyModels) -> None:
    async def main() -> None:
        async with engine(tiny) as llm:

            def explode(*_: object, **__: object) -> None:
                raise RuntimeError("device lost")

            for name in ("forward_logits", "logits_alone"):
                setattr(llm._engine.model, name, explode)
            with pytest.raises(EngineDeadError, match="device lost"):
                await asyncio.wait_for(collect(llm, random_prompts(1)[0], GREEDY), 10)
            assert not llm.is_alive
            await asyncio.to_thread(llm._thread.join, 10)
            assert llm.in_step == 0, "no step runs any more"
            with pytest.raises(EngineDeadError):
                await collect(llm, random_prompts(1)[0], GREEDY)

    asyncio.run(main())


def test_closing_ends_the_streams(tiny: TinyModels) -> None:
    async def main() -> None:
        async with engine(tiny) as llm:
            task = asyncio.create_task(collect(llm, random_prompts(1)[0], SLOW))
            await asyncio.sleep(0.02)
            await asyncio.to_thread(llm.close)
            with pytest.raises(EngineDeadError, match="closed"):
                await asyncio.wait_for(task, 10)

    asyncio.run(main())


def make(tiny: TinyModels) -> AsyncLLM:
    return AsyncLLM(tiny.target, dtype="float32", device="cpu", skip_tokenizer_init=True, num_kv_blocks=64)


def test_without_asyncio_it_says_so(tiny: TinyModels) -> None:
    """Coroutines run without asyncio in trio, too."""
    llm = make(tiny)
    with pytest.raises(RequestError, match="trio is not supported"):
        llm.submit(random_prompts(1)[0], GREEDY)
    for call in (
        llm.generate(random_prompts(1)[0], GREEDY).__anext__(),
        llm.render_chat([{"role": "user", "content": "x"}]),
        llm.__aenter__(),
    ):
        with pytest.raises(RequestError, match="event loop of asyncio"):
            call.__await__().send(None)
    assert not llm.is_alive, "a context that was not entered is not left"


def test_outputs_are_read_in_the_loop_of_their_request(tiny: TinyModels) -> None:
    """In another loop one would wait for ever."""
    llm, loop = make(tiny), asyncio.new_event_loop()

    async def submit() -> Any:
        return llm.submit(random_prompts(1)[0], GREEDY)

    async def read(stream: Any) -> list[RequestOutput]:
        return [output async for output in stream]

    stream = loop.run_until_complete(submit())
    for call in (read(stream), stream.ready()):
        with pytest.raises(RequestError, match="in which the request was submitted"):
            asyncio.run(asyncio.wait_for(call, 20))
    assert loop.run_until_complete(read(stream))[-1].outputs[0].finish_reason == "length"
    loop.close()
    llm.close()


def test_a_closed_loop_ends_its_requests(tiny: TinyModels) -> None:
    llm, loop = make(tiny), asyncio.new_event_loop()
    gate, calls = threading.Event(), 0

    def waits(_: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        gate.wait(20)
        return logits

    async def submit() -> Any:
        return llm.submit(random_prompts(1)[0], GREEDY.replace(max_tokens=120, logits_processors=[waits]))

    loop.run_until_complete(submit())
    loop.close()
    gate.set()
    for _ in range(2000):
        if not llm._streams and not llm.stats().num_used_blocks:
            break
        time.sleep(0.01)
    assert not llm._streams and not llm._by_rid and not llm._readers
    assert llm.stats().finish_reasons == {"abort": 1} and calls < 60
    llm.check_integrity()
    llm.close()


def test_a_loop_that_is_closed_while_a_request_is_prepared_keeps_nothing(tiny: TinyModels) -> None:
    """As programs do that call run_until_complete and close their loop, instead of asyncio.run."""
    llm = make(tiny)

    async def submit(num_samples: int) -> Any:
        return llm.submit(random_prompts(1)[0], GREEDY.replace(n=num_samples), "mine")

    async def read() -> RequestOutput:
        return [output async for output in await submit(1)][-1]

    for _ in range(3):
        loop = asyncio.new_event_loop()
        loop.run_until_complete(submit(100))  # so many are prepared in a thread
        loop.close()
    loop = asyncio.new_event_loop()
    assert loop.run_until_complete(asyncio.wait_for(read(), 20)).finished
    loop.close()
    llm.close()


def test_one_thread_tells_of_the_cache(tiny: TinyModels) -> None:
    """Else what was cached before it was cleared could be told afterwards, and be looked for in vain."""
    told: list[tuple[str, type]] = []

    def listen(events: Sequence[object]) -> None:
        told.extend((threading.current_thread().name, type(event)) for event in events)

    async def main() -> None:
        async with engine(tiny) as llm:
            assert llm.observe_cache(listen)
            prompt = random_prompts(1, low=40, high=48)[0]
            await collect(llm, prompt, GREEDY)
            assert llm.reset_prefix_cache()
            await collect(llm, prompt, GREEDY)

    asyncio.run(main())
    assert {thread for thread, _ in told} == {"draftwise-engine"}
    cleared = [kind for _, kind in told].index(CacheCleared)
    assert 0 < cleared < len(told) - 1


def test_drafters_forget_between_steps(tiny: TinyModels) -> None:
    """Asked for while nothing runs and while a request does: what was learned is gone, and the text is the same."""
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, speculation={"method": "suffix"})

    async def main() -> None:
        async with engine(tiny) as llm:
            prompt = random_prompts(1)[0]

            async def drafted() -> tuple[tuple[int, ...], int]:
                last = (await collect(llm, prompt, params))[-1]
                return last.outputs[0].token_ids, last.metrics.speculation.num_draft_tokens

            first = await drafted()
            again = await drafted()
            assert again[0] == first[0] and again[1] != first[1]  # it remembers its own answer
            llm.reset_drafters()
            assert await drafted() == first
            task = asyncio.create_task(collect(llm, prompt, params))
            await asyncio.sleep(0)
            llm.reset_drafters()
            assert (await asyncio.wait_for(task, 30))[-1].outputs[0].token_ids == first[0]

    asyncio.run(main())
