"""Outputs of a prompt: what is in them, and that nothing is built twice, counted."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from draftwise.engine import group as module
from draftwise.engine.detokenizer import IncrementalDetokenizer
from draftwise.engine.group import RequestGroup, TextPiece
from draftwise.engine.outputs import RequestOutput
from draftwise.engine.stops import StopStrings
from draftwise.sampling.params import SamplingParams
from draftwise.sched.request import Request
from draftwise.types import Speculation, TokenLogprobs

TOP = 4


class Letters:
    """Token i is the i-th letter."""

    decoder = None

    def __init__(self) -> None:
        self.decoded: Counter[int] = Counter()

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        if len(ids) == 1:
            self.decoded[ids[0]] += 1
        return "".join(chr(97 + i) for i in ids)

    def get_added_tokens_decoder(self) -> dict[int, Any]:
        return {}


def entry(token: int) -> TokenLogprobs:
    tops = tuple((token + i) % 26 for i in range(TOP))
    return TokenLogprobs(token, -0.1 * (1 + token % 7), 1, tops, tuple(-0.1 * (1 + i) for i in range(TOP)))


class World:
    """A group whose requests grow by hand, as the scheduler would let them."""

    def __init__(self, *, num_prompt: int = 3, stop: tuple[str, ...] = (), **fields: Any) -> None:
        self.params = SamplingParams(max_tokens=5000, stop=stop, **fields)
        self.tokenizer = Letters()
        stops = StopStrings(stop) if stop else None
        self.detokenizers = [IncrementalDetokenizer(Letters(), stop=stops) for _ in range(self.params.n)]
        self.requests = [
            Request(
                rid=i,
                prompt_np=np.arange(num_prompt, dtype=np.int32) % 26,
                params=self.params,
                speculation=Speculation("none", 0, "greedy"),
                max_total=num_prompt + 5000,
                seed=0,
                arrival_time=0.0,
                sample_index=i,
                sink=detokenizer if stop else None,
            )
            for i, detokenizer in enumerate(self.detokenizers)
        ]
        self.group = RequestGroup("x", None, self.params, self.requests, self.detokenizers, self.tokenizer)

    def grow(self, *tokens: int, sample: int = 0) -> None:
        request = self.requests[sample]
        taken, reason = request.append(tokens)
        request.finish_reason = reason
        if request.logprobs is not None:
            request.logprobs.extend(map(entry, tokens[:taken]))

    def end(self, reason: str = "length") -> None:
        for request in self.requests:
            request.finish_reason = request.finish_reason or reason


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The `Logprob` objects made."""
    made: list[Any] = []
    original = module.Logprob

    def counted(*args: Any) -> Any:
        made.append(original(*args))
        return made[-1]

    monkeypatch.setattr(module, "Logprob", counted)
    return made


@pytest.mark.parametrize("kind", ["delta", "cumulative"])
def test_log_probabilities_of_a_stream_are_built_once(built: list[Any], kind: Any) -> None:
    """Twice as many tokens and pieces are twice as much work: neither the output's nor the prompt's entries are made
    again, and a token's text is asked for once."""
    for length in (100, 200):
        built.clear()
        world = World(num_prompt=50, logprobs=TOP, prompt_logprobs=TOP)
        prompt_logprobs = world.requests[0].prompt_logprobs
        assert prompt_logprobs is not None
        prompt_logprobs.extend(map(entry, [i % 26 for i in range(1, 50)]))
        outputs = []
        for i in range(length):
            world.grow(i % 26)
            outputs.append(world.group.output(kind))
        assert len(built) == (length + 49) * TOP  # the token itself is among its alternatives
        assert set(world.tokenizer.decoded.values()) == {1}
        last = outputs[-1]
        assert last.prompt_logprobs is not None and len(last.prompt_logprobs) == 50
        assert all(output.prompt_logprobs is last.prompt_logprobs for output in outputs)
        wanted = [i % 26 for i in range(length)]
        if kind == "delta":
            pieces = [output.outputs[0] for output in outputs]
            ids = [token for piece in pieces for token in piece.token_ids]
            logprobs = [position for piece in pieces for position in piece.logprobs or ()]
        else:
            ids, logprobs = list(last.outputs[0].token_ids), list(last.outputs[0].logprobs or ())
            first = outputs[0].outputs[0].logprobs
            assert first is not None and first[0] is logprobs[0], "what was built is used again"
        assert ids == wanted and [next(iter(position)) for position in logprobs] == wanted
        assert last.outputs[0].cumulative_logprob == sum(entry(token).logprob for token in wanted)


@pytest.mark.parametrize("kind", ["delta", "cumulative"])
@pytest.mark.parametrize("length", [100, 200])
def test_tokens_and_text_of_a_stream_are_read_once(
    kind: Any, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = 0
    output_ids = Request.output_ids

    def counted(self: Request, start: int = 0, end: int | None = None) -> list[int]:
        nonlocal read
        ids = output_ids(self, start, end)
        read += len(ids)
        return ids

    monkeypatch.setattr(Request, "output_ids", counted)
    world = World()
    for i in range(length):
        world.grow(i % 26)
        world.group.output(kind)
    assert read == 2 * length  # once for the ids, once for the text


def test_reading_takes_nothing_that_grows(built: list[Any]) -> None:
    """What is done under the engine's lock: no object per token, no text."""
    world = World(logprobs=TOP)
    for i in range(100):
        world.grow(i % 26)
    reading = world.group.read("cumulative")
    assert not built and not world.tokenizer.decoded and world.detokenizers[0].num_tokens == 0
    assert world.group.num_to_build(reading) == 100 * (1 + TOP)
    world.grow(5, 6)  # comes too late for this reading
    output = world.group.build(reading)
    assert isinstance(output, RequestOutput)
    completion = output.outputs[0]
    assert len(completion.token_ids) == len(completion.logprobs or ()) == len(completion.text) == 100
    assert world.group.num_to_build(world.group.read("cumulative")) == 2 * (1 + TOP)


def test_stop_strings_and_text_pieces_of_a_delta_stream() -> None:
    world = World(stop=("de",), output_kind="delta")
    world.grow(0, 1)
    first = world.group.build(world.group.read("delta", text_only=True))
    assert isinstance(first, RequestOutput) and first.outputs[0].text == "ab"
    world.grow(2, 3)
    assert world.group.build(world.group.read("delta", text_only=True)) == TextPiece("c", 2)
    world.grow(3, 4, 5)
    last = world.group.build(world.group.read("delta", text_only=True))
    assert isinstance(last, RequestOutput) and last.finished
    completion = last.outputs[0]
    assert (completion.text, completion.token_ids, completion.stop_reason) == ("d", (3, 4), "de")


def test_every_sample_has_its_own_pieces() -> None:
    world = World(n=3, logprobs=TOP, output_kind="delta")
    texts = ["", "", ""]
    for i in range(9):
        world.grow(i, i + 1, sample=i % 3)
        if i % 2:
            output = world.group.output("delta")
            texts = [text + sample.text for text, sample in zip(texts, output.outputs, strict=True)]
    world.end()
    output = world.group.output("delta")
    texts = [text + sample.text for text, sample in zip(texts, output.outputs, strict=True)]
    assert output.finished and texts == ["abdegh", "bcefhi", "cdfgij"]
    assert [len(sample.logprobs or ()) for sample in output.outputs] == [0, 0, 2]
