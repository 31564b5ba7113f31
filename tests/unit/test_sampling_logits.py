"""Processing logits: each parameter against a plain reimplementation, then all of them mixed in one batch."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftwise.errors import RequestError
from draftwise.sampling.logits import LogitsRow, process
from draftwise.sampling.params import SamplingParams
from draftwise.sampling.state import SamplingState

V = 12
NEG = -math.inf


def state_of(
    params: SamplingParams,
    prompt: Sequence[int] = (1, 2),
    output: Sequence[int] = (),
    stop: Sequence[int] = (),
    bad_words: tuple[tuple[int, ...], ...] = (),
    vocab: int = V,
) -> SamplingState:
    return SamplingState(
        params,
        seed=0,
        sample_index=0,
        token_ids_np=np.array([*prompt, *output], dtype=np.int32),
        num_prompt=len(prompt),
        vocab_size=vocab,
        stop_token_ids=frozenset(stop),
        bad_words_ids=bad_words,
    )


def row_of(
    params: SamplingParams,
    path: tuple[int, ...] = (),
    prompt: Sequence[int] = (1, 2),
    output: Sequence[int] = (),
    mask: torch.Tensor | None = None,
    stop: Sequence[int] = (),
    bad_words: tuple[tuple[int, ...], ...] = (),
    vocab: int = V,
) -> LogitsRow:
    state = state_of(params, prompt, output, stop, bad_words, vocab)
    return LogitsRow(state, path, np.array([*prompt, *output], dtype=np.int32), mask)


def reference(logits: list[float], row: LogitsRow) -> list[float]:
    """The documented order, one token at a time, float64."""
    params, state = row.state.params, row.state
    prompt = row.token_ids_np[: state.num_prompt].tolist()
    output = [*row.token_ids_np[state.num_prompt :].tolist(), *row.path]
    out = list(logits)
    for v in range(len(out)):
        if v in prompt or v in output:
            r = params.repetition_penalty
            out[v] = out[v] / r if out[v] > 0 else out[v] * r
        n = output.count(v)
        out[v] -= params.frequency_penalty * n + params.presence_penalty * (n > 0)
        if params.allowed_token_ids is not None and v not in params.allowed_token_ids:
            out[v] = NEG
        if row.mask is not None and not bool(row.mask[v]):
            out[v] = NEG
        if len(output) < params.min_tokens and v in state.stop_ids:
            out[v] = NEG
        out[v] += (params.logit_bias or {}).get(v, 0.0)
    if params.temperature == 0 or params.top_k == 1:
        return out
    out = [x / params.temperature for x in out]
    top = max(out)
    if top == NEG:
        return out
    if params.min_p:
        out = [x if x >= top + math.log(params.min_p) else NEG for x in out]
    if params.top_k > 0:
        floor = sorted(out, reverse=True)[min(params.top_k, len(out)) - 1]
        out = [x if x >= floor else NEG for x in out]
    if params.top_p < 1:
        mass = [math.exp(x - top) for x in out]
        total, before, kept = sum(mass), 0.0, []
        for v in sorted(range(len(out)), key=lambda v: -out[v]):
            if before < params.top_p * total:
                kept.append(out[v])
            before += mass[v]
        out = [x if x >= min(kept) else NEG for x in out]
    return out


def random_params(draw: st.DrawFn) -> SamplingParams:
    pick = lambda *values: draw(st.sampled_from(values))  # noqa: E731
    return SamplingParams(
        temperature=pick(0.0, 0.5, 1.0, 1.7),
        top_p=pick(1.0, 0.9, 0.4, 0.01),
        top_k=pick(0, -1, 1, 3, 100),
        min_p=pick(0.0, 0.05, 0.3, 1.0),
        presence_penalty=pick(0.0, 0.5, -1.0),
        frequency_penalty=pick(0.0, 0.3, -0.2),
        repetition_penalty=pick(1.0, 1.3, 0.7),
        logit_bias=pick(None, {3: 2.5, 5: -1.0}),
        allowed_token_ids=pick(None, (0, 3, 4, 5, 7, 8, 9)),
        min_tokens=pick(0, 3),
    )


@st.composite
def random_row(draw: st.DrawFn) -> LogitsRow:
    ids = st.lists(st.integers(0, V - 1), max_size=4)
    mask = None
    if draw(st.booleans()):
        mask = torch.ones(V, dtype=torch.bool)
        mask[draw(ids)] = False
    stop = draw(st.sampled_from([(), (0, 11)]))
    return row_of(random_params(draw), tuple(draw(ids)), draw(ids) or [0], draw(ids), mask, stop)


@settings(max_examples=150)
@given(st.lists(random_row(), min_size=1, max_size=6), st.integers(0, 2**31))
def test_a_mixed_batch_equals_the_plain_reimplementation(rows: list[LogitsRow], seed: int) -> None:
    logits = torch.randn(len(rows), V, generator=torch.Generator().manual_seed(seed)) * 2
    want = [
        reference(row_logits, row) for row_logits, row in zip(logits.double().tolist(), rows, strict=True)
    ]
    got = process(logits.clone(), rows)
    torch.testing.assert_close(got, torch.tensor(want), rtol=1e-5, atol=1e-5)
    for i, row in enumerate(rows):  # and to the last bit the same alone as in the batch
        assert torch.equal(process(logits[i : i + 1].clone(), [row])[0], got[i])


def test_nothing_asked_nothing_done() -> None:
    logits = torch.randn(3, V)
    rows = [row_of(SamplingParams(temperature=t, top_k=k)) for t, k in ((1.0, 0), (0.0, 5), (1.0, V))]
    assert not any(row.state.needs_processing for row in rows if row.state.params.temperature)
    assert torch.equal(process(logits.clone(), rows), logits)


@pytest.mark.parametrize("vocab", [300, 5000])
@pytest.mark.parametrize("spread", [0.01, 1.0, 6.0])
def test_top_p_whatever_the_head_holds(vocab: int, spread: float) -> None:
    """A flat row needs more than the head of the sorted row; result and neighbours are the same either way."""
    gen = torch.Generator().manual_seed(1)
    rows = [
        row_of(SamplingParams(top_p=p, top_k=k), vocab=vocab)
        for p, k in ((0.3, 0), (0.999, 0), (0.9, 40), (1.0, 290), (0.5, 280))
    ]
    logits = torch.randn(len(rows), vocab, generator=gen) * spread
    got = process(logits.clone(), rows)
    for i, row in enumerate(rows):
        params = row.state.params
        alone = process(logits[i : i + 1].clone(), [row])[0]
        assert torch.equal(alone, got[i])
        order = logits[i].double().sort(descending=True)
        probs = order.values.softmax(-1)
        if params.top_k > 0:
            probs = probs[: params.top_k] / probs[: params.top_k].sum()
        want = int((probs.cumsum(-1) - probs < params.top_p).sum()) if params.top_p < 1 else len(probs)
        kept = set((got[i] > NEG).nonzero().flatten().tolist())
        assert abs(len(kept) - want) <= (
            1 if params.top_p < 1 else 0
        )  # a sum may meet the limit within rounding
        assert kept == set(order.indices[: len(kept)].tolist())


def test_ties_stay_together() -> None:
    logits = torch.tensor([[3.0, 2.0, 2.0, 2.0, 1.0] + [0.0] * 7])
    for params in (SamplingParams(top_k=2), SamplingParams(top_p=0.5)):
        got = process(logits.clone(), [row_of(params)])
        assert (got[0] > NEG).nonzero().flatten().tolist() == [0, 1, 2, 3]


class TestHistory:
    def test_path_counts_as_output(self) -> None:
        """5 was committed once and stands twice in the path: three times; 9 once; the prompt's 2 not at all."""
        params = SamplingParams(frequency_penalty=0.5, presence_penalty=0.25, temperature=0)
        got = process(torch.zeros(1, V), [row_of(params, path=(5, 9, 5), output=(5,))])
        want = torch.zeros(V)
        want[5], want[9] = -1.75, -0.75
        assert torch.equal(got[0], want)

    def test_committing_equals_a_fresh_state(self) -> None:
        params = SamplingParams(
            frequency_penalty=0.5, presence_penalty=0.1, repetition_penalty=1.5, min_tokens=4, temperature=0.7
        )
        state = state_of(params, stop=(7,))
        tokens = [1, 2]
        for step in ((4,), (5, 4), (), (9, 9, 4)):
            state.commit(step)
            tokens.extend(step)
            ids = np.array(tokens, dtype=np.int32)
            fresh = state_of(params, output=tokens[2:], stop=(7,))
            logits = torch.randn(1, V)
            for path in ((), (4, 6)):
                a = process(logits.clone(), [LogitsRow(state, path, ids)])
                b = process(logits.clone(), [LogitsRow(fresh, path, ids)])
                assert torch.equal(a, b)
            assert state.num_tokens == len(tokens) and state.num_output == len(tokens) - 2

    def test_min_tokens_counts_the_path(self) -> None:
        params = SamplingParams(min_tokens=3, temperature=0)
        for path, masked in (((), True), ((4,), True), ((4, 4), False)):
            got = process(torch.zeros(1, V), [row_of(params, path=path, output=(5,), stop=(7, 8))])
            assert (got[0] == NEG).nonzero().flatten().tolist() == ([7, 8] if masked else [])

    def test_bad_words(self) -> None:
        words = ((3,), (4, 5), (6, 7, 8))
        cases: list[tuple[tuple[int, ...], tuple[int, ...], list[int]]] = [
            ((), (), [3]),
            ((4,), (), [3, 5]),
            ((), (4,), [3, 5]),
            ((6,), (7,), [3, 8]),
            ((6, 7), (), [3, 8]),
            ((), (9, 6, 7), [3, 8]),
            ((6, 7), (4,), [3, 5]),
            ((7,), (), [3]),
        ]
        for output, path, excluded in cases:
            got = process(torch.zeros(1, V), [row_of(SamplingParams(), path, output=output, bad_words=words)])
            assert (got[0] == NEG).nonzero().flatten().tolist() == excluded, (output, path)

    def test_bad_words_do_not_begin_in_the_prompt(self) -> None:
        got = process(
            torch.zeros(1, V), [row_of(SamplingParams(), prompt=(1, 6), output=(7,), bad_words=((6, 7, 8),))]
        )
        assert torch.equal(got, torch.zeros(1, V))


class TestProcessors:
    def test_order_and_history(self) -> None:
        """After logit_bias, before temperature; sees prompt, output and path."""
        calls = []

        def spy(token_ids: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
            calls.append((list(token_ids), logits.tolist()))
            return logits * 2

        params = SamplingParams(logits_processors=[spy], logit_bias={3: 1.0}, temperature=0.5)
        got = process(torch.ones(1, V), [row_of(params, path=(9,), output=(4,))])
        want = [1.0] * V
        want[3] = 2.0
        assert calls == [([1, 2, 4, 9], want)]
        assert got[0].tolist() == [x * 4 for x in want]

    def test_in_place_failure_leaves_the_row(self) -> None:
        def bad(token_ids: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
            logits.zero_()
            raise KeyError("gone")

        rows = [row_of(SamplingParams(logits_processors=[bad])), row_of(SamplingParams())]
        logits = torch.randn(2, V)
        errors: dict[int, Exception] = {}
        got = process(logits.clone(), rows, errors)
        assert list(errors) == [0] and isinstance(errors[0], KeyError)
        assert torch.equal(got, logits)
        with pytest.raises(KeyError):
            process(logits.clone(), rows)

    @pytest.mark.parametrize("result", [None, torch.zeros(V - 1), [0.0] * V])
    def test_wrong_result(self, result: object) -> None:
        rows = [row_of(SamplingParams(logits_processors=[lambda ids, logits: result]))]
        with pytest.raises(RequestError, match=r"must return logits of shape \[12\]"):
            process(torch.zeros(1, V), rows)

    @pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.complex64])
    def test_masks_and_ids_are_no_logits(self, dtype: torch.dtype) -> None:
        rows = [row_of(SamplingParams(logits_processors=[lambda ids, logits: logits.to(dtype)]))]
        with pytest.raises(RequestError, match=f"must return float logits, got {str(dtype)[6:]}"):
            process(torch.zeros(1, V), rows)


def test_token_ids_outside_the_vocabulary() -> None:
    for params in ({"logit_bias": {V: 1.0}}, {"allowed_token_ids": [1, V]}, {"stop_token_ids": [V]}):
        with pytest.raises(
            RequestError, match=f"{next(iter(params))} is 12; it must be below the vocabulary size 12"
        ):
            state_of(SamplingParams(**params))
    with pytest.raises(RequestError, match="bad_words"):
        state_of(SamplingParams(), bad_words=((1, V),))


def test_bad_words_against_a_look_at_each() -> None:
    rng = np.random.default_rng(3)
    for _ in range(200):
        words = tuple(
            tuple(rng.integers(0, 3, rng.integers(1, 5)).tolist()) for _ in range(rng.integers(1, 12))
        )
        prompt, output, path = (tuple(rng.integers(0, 3, rng.integers(1, 5)).tolist()) for _ in range(3))
        got = process(
            torch.zeros(1, V), [row_of(SamplingParams(), path, prompt=prompt, output=output, bad_words=words)]
        )[0]
        text = (*output, *path)
        wanted = {
            w[-1] for w in words if len(w) - 1 <= len(text) and text[len(text) - len(w) + 1 :] == w[:-1]
        }
        assert {i for i in range(V) if got[i] == -torch.inf} == wanted


def test_many_bad_words_cost_a_look_up_for_each_length() -> None:
    """Twice as many words are no more work for a position."""
    counts = []
    for size in (1000, 2000):
        words = (*((i % 7, i // 7 % 7, i // 49, V - 1) for i in range(size)), (1, 2))
        state = state_of(SamplingParams(), bad_words=words, vocab=max(V, 100))
        counts.append(len(state.bad_words))
        assert sum(len(endings) for by in state.bad_words.values() for endings in by.values()) == size + 1
    assert counts == [2, 2]
