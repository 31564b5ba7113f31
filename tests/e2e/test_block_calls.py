"""Blocks are drafted in one native call, and the drafts are those that torch draws place by place."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from draftwise import LLM, SamplingParams
from draftwise.kernels.cpu.blocks import NativeBlocks
from draftwise.models.heads.recorded import RecordedBlock
from draftwise.propose.heads.block import BlockProposer
from tests.e2e.conftest import random_prompts, token_ids
from tests.fakes.block import BlockShape, random_weights, save_block
from tests.fakes.tiny import VOCAB, TinyModels
from tests.native import native_or_skip

FORMS = {
    "dflash": BlockShape(vocab=VOCAB, windows=(9, None)),
    "jetspec": BlockShape(vocab=VOCAB, causal=True, scale=0.7, softcap=3.0),
    "vanilla": BlockShape("deepspec", vocab=VOCAB, from_root=True, own=True, markov="vanilla"),
    "gated": BlockShape("deepspec", vocab=VOCAB, from_root=True, own=True, markov="gated"),
    "rnn": BlockShape("speculators", vocab=VOCAB, own=True, draft_vocab=47, from_root=True, markov="rnn"),
    "domino": BlockShape("speculators", vocab=VOCAB, own=True, draft_vocab=47, domino=(6, 8, 1)),
    "selector": BlockShape(vocab=VOCAB, selector=(6, 5)),
}
TREE = [[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0], [1, 0, 0], [1, 0, 0, 0]]
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "greedy": ({}, {"temperature": 0.0}),
    "sampled": ({}, {"temperature": 0.9, "top_p": 0.9, "speculation": {"rule": "rejection"}}),
    "coupled": ({}, {"temperature": 0.9, "top_k": 20}),
    "static tree": ({"speculative_token_tree": TREE}, {"temperature": 0.0}),
    "dynamic tree": (
        {"speculative_dynamic_tree": {"top_k": 3, "depth": 4}, "num_speculative_tokens": 12},
        {"temperature": 0.8},
    ),
}


@pytest.fixture(scope="module", params=FORMS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    shape = FORMS[request.param]
    return save_block(tmp_path_factory.mktemp("block") / "drafter", shape, random_weights(shape, seed=7))


class Calls:
    """How often blocks were drafted natively, and in torch."""

    def __init__(self) -> None:
        self.native, self.torch = 0, 0


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[Calls]:
    native_or_skip()
    found = Calls()
    for name in ("chains", "trees", "own_pass"):
        inner = getattr(NativeBlocks, name)

        def native(self: NativeBlocks, *args: Any, _inner: Any = inner) -> Any:
            found.native += 1
            return _inner(self, *args)

        monkeypatch.setattr(NativeBlocks, name, native)
    fill_in = BlockProposer._fill_in

    def in_torch(self: BlockProposer, drafts: Any) -> Any:
        found.torch += 1
        return fill_in(self, drafts)

    monkeypatch.setattr(BlockProposer, "_fill_in", in_torch)
    yield found


def drafted(llm: LLM, prompts: list[Any], params: SamplingParams) -> list[Any]:
    """Everything that was drafted, and what became of it."""
    return [
        [(step.draft_tokens, step.draft_parents, step.token_ids) for step in output.outputs[0].trace or ()]
        for output in llm.generate(prompts, params)
    ]


@pytest.mark.parametrize(
    ("folder", "kind"),
    [
        # each form in every other kind of drafting, in turns; --all: in all
        pytest.param(form, kind, marks=[pytest.mark.slow] if (i + j) % 2 else [])
        for i, form in enumerate(FORMS)
        for j, kind in enumerate(KINDS)
    ],
    indirect=["folder"],
)
def test_one_call_drafts_what_torch_does_place_by_place(
    make_llm: Callable[..., LLM],
    folder: str,
    kind: str,
    calls: Calls,
    monkeypatch: pytest.MonkeyPatch,
    tiny: TinyModels,
) -> None:
    spec, sampling = KINDS[kind]
    prompts = random_prompts(5, seed=21)
    params = [SamplingParams(max_tokens=14, ignore_eos=True, seed=i, **sampling) for i in range(len(prompts))]

    def run() -> list[Any]:
        # two requests in a pass, of five that draft together
        llm = make_llm(
            speculative_config={"model": folder, **(spec or {"num_speculative_tokens": 4})},
            speculation_control="static",
            keep_trace=True,
            max_num_seqs=5,
        )
        found = drafted(llm, prompts, params)  # type: ignore[arg-type]
        assert not llm.stats().drafter_failures
        return found

    once = run()
    assert calls.native > 3 and calls.torch == 0, "nothing stands between the places"
    monkeypatch.setattr(RecordedBlock, "lay_out", lambda self, layout: None)
    before = calls.native
    assert run() == once
    assert calls.torch > 3 and calls.native == before
    assert sum(len(step[0]) for steps in once for step in steps) > 60


def test_requests_that_differ_are_drafted_in_groups(
    make_llm: Callable[..., LLM], folder: str, calls: Calls
) -> None:
    """Chains and trees, greedy and drawn, some with a bias that each draft looks at: those take torch's way alone."""
    llm = make_llm(
        speculative_config={"model": folder, "num_speculative_tokens": 4}, speculation_control="static"
    )
    plain = {"max_tokens": 12, "ignore_eos": True, "temperature": 0.0}
    tree = {"speculative_token_tree": TREE[:7]}
    params = [
        SamplingParams(**plain),
        SamplingParams(**plain, speculation=tree),
        SamplingParams(**plain | {"temperature": 0.8, "seed": 3}),
        SamplingParams(**plain, speculation={"num_speculative_tokens": 2}),
    ]
    prompts = random_prompts(4, seed=5)
    expected = token_ids(make_llm().generate(prompts, [p.replace(speculation=None) for p in params]))
    assert token_ids(llm.generate(prompts, params)) == expected
    assert calls.native > 8 and calls.torch == 0
    biased = SamplingParams(**plain, logit_bias={3: 5.0})
    llm.generate(prompts[:1], biased)
    assert calls.torch > 0


def test_many_requests_take_turns_in_passes(
    make_llm: Callable[..., LLM], folder: str, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sixteen have scratch blocks; of twenty, four are in a second pass of the same call."""
    prompts = random_prompts(20, seed=6)
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    options = {"speculation_control": "static", "keep_trace": True, "max_num_seqs": 20}
    spec = {"model": folder, "num_speculative_tokens": 3}
    found = drafted(make_llm(speculative_config=spec, **options), prompts, params)
    alone = [drafted(make_llm(speculative_config=spec, **options), [p], params)[0] for p in prompts[15:18]]
    assert found[15:18] == alone and calls.torch == 0


def test_parts_that_do_not_fit_are_refused(make_llm: Callable[..., LLM], folder: str, calls: Calls) -> None:
    """The native library checks sizes itself: a wrong width is an error of the drafter, not a read past a table."""
    llm = make_llm(
        speculative_config={"model": folder, "num_speculative_tokens": 3}, speculation_control="static"
    )
    drafting: Any = llm._engine.core.executor._drafting  # type: ignore[union-attr]
    head = drafting._proposers["dflash"]._head
    assert isinstance(head, RecordedBlock)
    if head._parts is None:
        pytest.skip("nothing is corrected")
    prompt = random_prompts(1, seed=3)
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    plain = token_ids(make_llm().generate(prompt, params))
    llm.generate(prompt, params)
    blocks = head._blocks[1]  # type: ignore[index]
    blocks._correction.width += 1  # type: ignore[union-attr]
    assert token_ids(llm.generate(prompt, params)) == plain
    assert llm.stats().drafter_failures
