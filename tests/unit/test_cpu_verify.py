"""Native verification against the rules in torch: the same decisions on random steps; the same bits alone and in any
batch, on any number of threads."""

from __future__ import annotations

import ctypes
import math
from typing import Any

import numpy as np
import pytest
import torch
from tests.native import forced_isa, native_or_skip

from draftwise.errors import RequestError
from draftwise.kernels.cpu.library import Isa
from draftwise.kernels.cpu.pool import ThreadPool
from draftwise.names import SHARED
from draftwise.sampling.masks import pack
from draftwise.sampling.noise import NoiseKey, gumbel, row_key
from draftwise.sampling.params import SamplingParams
from draftwise.sampling.state import SamplingState
from draftwise.types import EMPTY_PROPOSAL, DrawKind, Proposal, Verification, chain
from draftwise.verify.base import VerifyColumns, VerifyRequest
from draftwise.verify.batch import verify_batch
from draftwise.verify.native import NativeRules

RULES = ("greedy", "coupled", "rejection", "block")
TREE = (-1, -1, 0, 1, 0, 2, -1, 4)
PARAMS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.6},
    {"temperature": 0.8, "top_k": 5},
    {"top_p": 0.9},
    {"temperature": 1.3, "top_k": 40, "top_p": 0.7},
    {"min_p": 0.05, "top_p": 0.999},
    {"temperature": 2.0, "top_p": 0.97},
)


def rules(threads: int = 1) -> NativeRules:
    library = native_or_skip()
    return NativeRules(library, ThreadPool(library, threads))


def make_proposal(
    kind: str, logits: torch.Tensor, draw: DrawKind, temperature: float, rng: np.random.Generator
) -> Proposal:
    """Drafts near what the rows ``logits`` [1 + nodes, V] want; ``draw`` other than "fixed": q near their softmax, and
    siblings that are distinct."""
    if kind == "none":
        return EMPTY_PROPOSAL
    parents = TREE if kind == "tree" else tuple(range(-1, 3))
    q = (logits / temperature + 0.5 * torch.from_numpy(rng.standard_normal(logits.shape)).float()).softmax(-1)
    tokens: list[int] = []
    taken: dict[int, set[int]] = {}
    for parent in parents:
        weights = q[parent + 1].double().numpy().copy()
        weights[list(taken.setdefault(parent, set()))] = 0.0
        token = int(rng.choice(len(weights), p=weights / weights.sum()))
        if draw != "independent":
            taken[parent].add(token)
        tokens.append(token)
    if draw == "fixed":
        return Proposal(tuple(tokens), parents, "test")
    return Proposal(tuple(tokens), parents, "test", draw, q, tuple(parent + 1 for parent in parents))


def make_step(
    vocab: int, seed: int, count: int = 48, only: str | None = None
) -> tuple[torch.Tensor, list[VerifyRequest]]:
    """Requests of every rule and kind of proposal, and their logits."""
    rng = np.random.default_rng(seed)
    requests: list[VerifyRequest] = []
    rows: list[torch.Tensor] = []
    first = 0
    for r in range(count):
        rule = only or RULES[r % 4]
        values = PARAMS[int(rng.integers(len(PARAMS)))]
        params = SamplingParams(**{**values, **({"temperature": 0.0} if rule == "greedy" else {})})
        known = np.arange(3 + r % 5, dtype=np.int32) % vocab
        state = SamplingState(
            params,
            seed=int(rng.integers(2**63)) * 2 + r % 2,
            sample_index=r % 3,
            token_ids_np=known,
            num_prompt=2,
            vocab_size=vocab,
        )
        kind = ("none", "chain", "tree")[int(rng.integers(3))]
        nodes = {"none": 0, "chain": 4, "tree": len(TREE)}[kind]
        own = torch.from_numpy(rng.standard_normal((1 + nodes, vocab)) * 3).float()
        draws: tuple[DrawKind, ...] = ("fixed", "independent", "without_replacement")
        draw = draws[int(rng.integers(3))] if rule in ("rejection", "block") else "fixed"
        if kind == "chain" and draw == "without_replacement":
            draw = "independent"
        proposal = make_proposal(kind, own, draw, state.temperature, rng)
        requests.append(VerifyRequest(state, proposal, first, rule, known))
        rows.append(own)
        first += 1 + nodes
    return torch.cat(rows), requests


@pytest.mark.parametrize("isa", list(Isa), ids=lambda isa: isa.name.lower())
@pytest.mark.parametrize("vocab", [7, 64, 1000, 4099])
def test_decides_like_torch(vocab: int, isa: Isa) -> None:
    with forced_isa(isa):
        kept = 0
        for seed in range(3):
            logits, requests = make_step(vocab, seed)
            expected = verify_batch(logits.clone(), requests)
            got = verify_batch(logits.clone(), requests, kernels=rules())
            for request, one, other in zip(requests, got, expected, strict=True):
                assert one == other, (request.rule, request.state.params, request.proposal.draw)
            kept += sum(len(v.path) for v in got if isinstance(v, Verification))
        assert kept > 40  # or the proposals were all but useless


@pytest.mark.parametrize("short", ["states", "proposals", "first_rows", "rules"])
def test_columns_of_unequal_length_never_reach_the_kernel(short: str) -> None:
    logits, requests = make_step(7, seed=1, count=4)
    columns = VerifyColumns(
        [request.state for request in requests],
        [request.proposal for request in requests],
        [request.first_row for request in requests],
        [request.rule for request in requests],
    )
    cut = columns._replace(**{short: getattr(columns, short)[:-1]})
    with pytest.raises(ValueError, match="columns of the same length"):
        rules().deciding(cut)(logits)


def test_no_requests() -> None:
    assert rules(2).verify(torch.empty(0, 7), [], []) == []


@pytest.mark.parametrize("threads", [2, 3])
def test_same_alone_and_on_threads(threads: int) -> None:
    logits, requests = make_step(4096, 11, count=96)  # more than one thread's worth
    together = verify_batch(logits.clone(), requests, kernels=rules())
    assert verify_batch(logits.clone(), requests, kernels=rules(threads)) == together
    assert verify_batch(logits.clone(), requests[::-1], kernels=rules(threads)) == together[::-1]
    for request, expected in zip(requests, together, strict=True):
        assert verify_batch(logits.clone(), [request], kernels=rules()) == [expected]


def test_rules_that_it_lacks_and_processing_share_the_batch() -> None:
    """Typical acceptance, penalties, biases, masks, custom processors and logprobs beside plain requests."""
    logits, plain = make_step(100, 5, count=16)
    known = np.arange(4, dtype=np.int32)

    def push(token_ids: object, row: torch.Tensor) -> torch.Tensor:
        return row + torch.arange(100) / 30

    def fail(token_ids: object, row: torch.Tensor) -> torch.Tensor:
        raise ValueError("no")

    rng = np.random.default_rng(3)
    requests = list(plain)
    rows = [logits]
    first = logits.shape[0]
    settings: tuple[dict[str, Any], ...] = (
        {"frequency_penalty": 0.5, "temperature": 0.7},
        {"repetition_penalty": 1.3, "top_p": 0.8},
        {"logit_bias": {3: 5.0, 9: -100.0}, "logprobs": 2},
        {"allowed_token_ids": [1, 2, 50]},
        {"logits_processors": (push,), "top_k": 9},
        {"logits_processors": (fail,)},
        {"logprobs": 3, "temperature": 0.0},
        {"seed": 4, "logprobs": 0},
    )
    for i, values in enumerate(settings):
        for rule in ("coupled", "rejection", "typical"):
            state = SamplingState(
                SamplingParams(**values),
                seed=i,
                sample_index=0,
                token_ids_np=known,
                num_prompt=2,
                vocab_size=100,
            )
            own = torch.from_numpy(rng.standard_normal((5, 100))).float() * 4
            proposal = make_proposal("chain", own, "fixed", 1.0, rng)
            masks = pack(rng.random((5, 100)) < 0.7) if i % 3 == 1 else None
            requests.append(VerifyRequest(state, proposal, first, rule, known, masks=masks))
            rows.append(own)
            first += 5
    order = rng.permutation(len(requests)).tolist()
    requests = [requests[i] for i in order]
    logits = torch.cat(rows)
    expected = verify_batch(logits.clone(), requests)
    got = verify_batch(logits.clone(), requests, kernels=rules())
    for one, other in zip(got, expected, strict=True):
        if isinstance(other, Exception):
            assert type(one) is type(other) and str(one) == str(other)
        else:
            assert one == other
    assert any(isinstance(one, ValueError) for one in got)
    # who shares the batch changes nothing
    for request, expected_one in zip(requests, got, strict=True):
        [alone] = verify_batch(logits.clone(), [request], kernels=rules())
        assert alone == expected_one or isinstance(alone, Exception)


@pytest.mark.parametrize("rule", ["greedy", "coupled", "rejection", "block"])
@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_logits_without_a_distribution(rule: str, value: float) -> None:
    state = SamplingState(
        SamplingParams(temperature=0 if rule == "greedy" else 1),
        seed=1,
        sample_index=0,
        token_ids_np=np.arange(3, dtype=np.int32),
        num_prompt=2,
        vocab_size=70,
    )
    known = np.arange(3, dtype=np.int32)
    for proposal in (EMPTY_PROPOSAL, chain((3, 4), "t"), Proposal((3, 4), (-1, -1), "t")):
        request = VerifyRequest(state, proposal, 0, rule, known)
        [got] = verify_batch(torch.full((1 + len(proposal), 70), value), [request], kernels=rules())
        assert isinstance(got, RequestError) and "finite" in str(got)
        for place in (
            (0, 37, 69) if math.isnan(value) else ()
        ):  # one of all is enough: it could be the largest
            logits = torch.randn(1 + len(proposal), 70)
            logits[:, place] = value
            [got] = verify_batch(logits, [request], kernels=rules())
            assert isinstance(got, RequestError) and "finite" in str(got)


def test_rows_that_are_not_reached_may_hold_anything() -> None:
    logits = torch.zeros(4, 80)
    logits[0, 5] = 50.0
    logits[[2, 3]] = float("nan")
    logits[1, 9] = 50.0
    for rule in ("coupled", "rejection"):
        state = SamplingState(
            SamplingParams(),
            seed=1,
            sample_index=0,
            token_ids_np=np.arange(3, dtype=np.int32),
            num_prompt=2,
            vocab_size=80,
        )
        request = VerifyRequest(state, chain((5, 6, 7), "t"), 0, rule, np.arange(3, dtype=np.int32))
        assert verify_batch(logits.clone(), [request], kernels=rules()) == [Verification((0,), (5, 9))]


def test_top_p_and_top_k_where_everything_ties() -> None:
    """What ties with the last one kept stays; the draw is then the one over all."""
    logits = torch.zeros(1, 333)
    cases: tuple[dict[str, Any], ...] = ({"top_k": 3}, {"top_p": 0.2}, {"top_k": 10, "top_p": 0.5})
    for values in cases:
        for seed in range(20):
            state = SamplingState(
                SamplingParams(**values),
                seed=seed,
                sample_index=0,
                token_ids_np=np.arange(3, dtype=np.int32),
                num_prompt=2,
                vocab_size=333,
            )
            request = VerifyRequest(state, EMPTY_PROPOSAL, 0, "rejection", np.arange(3, dtype=np.int32))
            assert verify_batch(logits.clone(), [request]) == verify_batch(
                logits.clone(), [request], kernels=rules()
            )


@pytest.mark.parametrize("isa", list(Isa), ids=lambda isa: isa.name.lower())
def test_noise_is_that_of_the_module(isa: Isa) -> None:
    """Up to the last bits of two logarithms, also for a vocabulary of other ids; large values are resolved."""
    library = native_or_skip()
    fill = library.function(
        "dw_gumbel", None, [ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]
    )
    keys = [NoiseKey(seed, seed % 3, SHARED, 17 * seed) for seed in range(40)]
    words = np.array([row_key(*key) for key in keys], np.uint64)
    ids = torch.arange(4001).flip(0) * 3 + 1
    with forced_isa(isa):
        for token_ids in (None, ids):
            expected = gumbel(keys, 4001, token_ids=token_ids)
            got = torch.empty_like(expected)
            at = None if token_ids is None else token_ids.data_ptr()
            fill(words.ctypes.data, len(keys), at, got.data_ptr(), 4001)
            torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)
            assert float(got.max()) > 11.0 and float(got.min()) < -2.3
