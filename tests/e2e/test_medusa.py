"""Whole engines that draft with Medusa heads."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from draftwise import LLM, SamplingParams
from draftwise.errors import ConfigError, ModelLoadError, RequestError
from tests.e2e.conftest import PlainText, random_prompts, token_ids
from tests.fakes.medusa import expected_logits, random_heads, save_medusa, vllm_names
from tests.fakes.tiny import VOCAB, TinyModels

HIDDEN = 32
HEADS = 3
TREE = [[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0], [0, 0, 1], [1, 0, 0]]
SHAPES: dict[str, dict[str, Any]] = {
    "chain": {},
    "static": {"speculative_token_tree": TREE},
    "dynamic": {"speculative_dynamic_tree": {"top_k": 4, "depth": 3}, "num_speculative_tokens": 9},
}
GREEDY = SamplingParams(temperature=0, max_tokens=28, ignore_eos=True)


def engine(make_llm: Callable[..., LLM], **options: Any) -> LLM:
    """An engine that drafts in every step, whether it pays or not."""
    return make_llm(speculation_control="static", **options)


@pytest.fixture(scope="module")
def tensors() -> dict[str, torch.Tensor]:
    return random_heads(HIDDEN, VOCAB, heads=HEADS, seed=5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tensors: dict[str, torch.Tensor]) -> str:
    return save_medusa(tmp_path_factory.mktemp("heads"), tensors, HEADS)


@pytest.fixture(scope="module")
def fitted_folder(tmp_path_factory: pytest.TempPathFactory, tiny: TinyModels) -> str:
    """Heads that know what the target says to the prompts of seed 41."""
    with LLM(
        tiny.target,
        dtype="float32",
        device="cpu",
        skip_tokenizer_init=True,
        num_kv_blocks=64,
        speculation_control="static",
    ) as llm:
        outputs = llm.generate(random_prompts(8, seed=41), GREEDY)
    texts = [[*o.prompt_token_ids, *o.outputs[0].token_ids] for o in outputs]
    return save_medusa(tmp_path_factory.mktemp("fitted"), fitted(tiny.target, texts), HEADS)


PLACES: dict[str, dict[str, Any]] = {
    "batch 8": {},
    "batch 1": {"max_num_seqs": 1},
    "preemption": {"num_kv_blocks": 40, "max_num_seqs": 8},
    "chunks": {"max_num_batched_tokens": 19, "max_num_seqs": 5},
}


@pytest.mark.parametrize(
    ("options", "seeded", "shape"),
    [
        pytest.param(
            options,
            seeded,
            shape,
            id=f"{place}-{'coupled' if seeded else 'greedy'}-{shape}",
            # each shape in each place under one of both rules, in turns; --all: under both
            marks=[pytest.mark.slow] if (i + j + k) % 2 else [],
        )
        for i, (place, options) in enumerate(PLACES.items())
        for j, seeded in enumerate((False, True))
        for k, shape in enumerate(SHAPES)
    ],
)
def test_output_equals_plain_decoding(
    make_llm: Callable[..., LLM],
    plain_text: PlainText,
    fitted_folder: str,
    shape: str,
    seeded: bool,
    options: dict[str, Any],
) -> None:
    prompts = random_prompts(8, seed=41)
    prompts += [dict(p) for p in prompts[:3]]  # prefix hits
    params = [
        SamplingParams(
            temperature=0.9 if seeded else 0.0,
            top_p=0.95,
            presence_penalty=0.5 if i % 3 == 0 else 0.0,
            max_tokens=28,
            ignore_eos=True,
            seed=i if seeded else None,
        )
        for i in range(len(prompts))
    ]
    plain = plain_text(prompts, params)
    llm = engine(make_llm, speculative_config={"model": fitted_folder}, **options)
    asked = {"method": "medusa", **SHAPES[shape]}
    for _ in range(2):  # the second time on cached prefixes
        outputs = llm.generate(prompts, [p.replace(speculation=asked) for p in params])
        assert token_ids(outputs) == plain
        llm.check_integrity()
    assert sum(o.metrics.speculation.num_accepted_tokens for o in outputs) > 0
    if "num_kv_blocks" in options:
        assert llm.stats().num_preemptions > 0


@functools.cache
def reference(target: str) -> Any:
    """The target in Transformers; loaded once."""
    import transformers

    return transformers.LlamaForCausalLM.from_pretrained(target, dtype=torch.float32)


def reference_hidden(target: str, ids: Sequence[int]) -> torch.Tensor:
    """[n, H] hidden states after the final norm."""
    with torch.no_grad():
        hidden: torch.Tensor = reference(target).model(torch.tensor([list(ids)])).last_hidden_state[0]
    return hidden


@pytest.mark.parametrize(
    "options",
    [{}, {"num_kv_blocks": 40, "max_num_seqs": 8}, {"max_num_batched_tokens": 19, "max_num_seqs": 5}],
    ids=["roomy", "preemption", "chunks"],
)
def test_drafts_are_the_heads_best_guesses(
    make_llm: Callable[..., LLM],
    tiny: TinyModels,
    folder: str,
    tensors: dict[str, torch.Tensor],
    options: dict[str, Any],
) -> None:
    """Every draft of every step, against the paper's formula on Transformers' hidden states: nothing that the engine
    does with chunks, prefix hits, preemption or batches may leave the heads with another token's state."""
    prompts = random_prompts(6, seed=43, low=20)
    prompts += [dict(p) for p in prompts[:3]]
    llm = engine(make_llm, speculative_config={"model": folder}, keep_trace=True, **options)
    steps = 0
    for output in llm.generate(prompts, GREEDY):
        ids = [*output.prompt_token_ids, *output.outputs[0].token_ids]
        hidden = reference_hidden(tiny.target, ids)
        known = len(output.prompt_token_ids)
        for step in output.outputs[0].trace or ():
            if step.draft_tokens:
                newest = hidden[known - 2 : known - 1]  # of the last token that the target has read
                best = [int(expected_logits(tensors, newest, i).argmax()) for i in range(HEADS)]
                assert list(step.draft_tokens) == best[: len(step.draft_tokens)]
                steps += 1
            known += len(step.token_ids)
    assert steps > 50


def test_static_tree_has_the_ranks_asked_for(
    make_llm: Callable[..., LLM], tiny: TinyModels, folder: str, tensors: dict[str, torch.Tensor]
) -> None:
    tree = [[0], [2], [0, 1], [2, 0], [2, 0, 0]]
    llm = engine(
        make_llm, speculative_config={"model": folder, "speculative_token_tree": tree}, keep_trace=True
    )
    (output,) = llm.generate(random_prompts(1, seed=44), GREEDY.replace(max_tokens=9))
    ids = [*output.prompt_token_ids, *output.outputs[0].token_ids]
    trace = output.outputs[0].trace
    assert trace is not None
    step = next(s for s in trace if s.draft_tokens)
    known = len(output.prompt_token_ids) + len(trace[0].token_ids)
    newest = reference_hidden(tiny.target, ids)[known - 2 : known - 1]
    ranked = [expected_logits(tensors, newest, i)[0].argsort(descending=True).tolist() for i in range(3)]
    wanted = (ranked[0][0], ranked[0][2], ranked[1][1], ranked[1][0], ranked[2][0])
    assert step.draft_tokens == wanted
    assert step.draft_parents == (-1, -1, 0, 1, 3)


def test_heads_that_know_the_text_are_believed(
    make_llm: Callable[..., LLM], tiny: TinyModels, tmp_path: Path
) -> None:
    """Heads fitted to what the target says: most drafts are accepted, in every shape."""
    prompts = random_prompts(4, seed=45)
    plain = make_llm().generate(prompts, GREEDY)
    texts = [[*o.prompt_token_ids, *o.outputs[0].token_ids] for o in plain]
    tensors = fitted(tiny.target, texts)
    llm = engine(make_llm, speculative_config={"model": save_medusa(tmp_path, tensors, HEADS)})
    for shape in SHAPES.values():
        outputs = llm.generate(prompts, GREEDY.replace(speculation={"method": "medusa", **shape}))
        assert token_ids(outputs) == token_ids(plain)
        counts = [o.metrics.speculation for o in outputs]
        steps = sum(c.num_drafts for c in counts)
        assert 1 + sum(c.num_accepted_tokens for c in counts) / steps > 3.2


def fitted(target: str, texts: Sequence[Sequence[int]]) -> dict[str, torch.Tensor]:
    """Heads trained to tell the tokens two, three and four behind each position of some texts."""
    hidden = [reference_hidden(target, ids) for ids in texts]
    tensors = {
        name: torch.nn.Parameter(value) for name, value in random_heads(HIDDEN, VOCAB, heads=HEADS).items()
    }
    optimizer = torch.optim.Adam(tensors.values(), lr=0.02)
    x = torch.cat([states[: -1 - HEADS] for states in hidden])
    labels = [
        torch.cat([torch.tensor(ids[2 + i : len(ids) - HEADS + 1 + i]) for ids in texts])
        for i in range(HEADS)
    ]
    for _ in range(300):
        optimizer.zero_grad()
        loss = sum(
            torch.nn.functional.cross_entropy(expected_logits(tensors, x, i), labels[i]) for i in range(HEADS)
        )
        assert isinstance(loss, torch.Tensor)
        loss.backward()
        optimizer.step()
    return {name: value.detach() for name, value in tensors.items()}


def test_draft_vocabulary(make_llm: Callable[..., LLM], tmp_path: Path) -> None:
    """Heads that speak a third of the tokens: never another one is drafted, and the output is the same."""
    ids = torch.arange(0, VOCAB, 3)
    whole = random_heads(HIDDEN, VOCAB, heads=HEADS, bias=False)
    few = {name: value[ids] if name.endswith(".1.weight") else value for name, value in whole.items()}
    named = vllm_names(few) | {"token_map": ids}
    from tests.fakes.medusa import save_heads

    path = save_heads(
        tmp_path,
        named,
        {"model_type": "medusa", "num_heads": HEADS, "num_hidden_layers": 1},
        "model.safetensors",
    )
    prompts = random_prompts(4, seed=46)
    plain = make_llm()
    llm = engine(make_llm, speculative_config={"model": path}, keep_trace=True)
    for params in (GREEDY, GREEDY.replace(temperature=0.8, seed=3)):
        wanted = token_ids(plain.generate(prompts, params))
        for shape in SHAPES.values():
            outputs = llm.generate(prompts, params.replace(speculation={"method": "medusa", **shape}))
            assert token_ids(outputs) == wanted
            drafts = {t for o in outputs for s in o.outputs[0].trace or () for t in s.draft_tokens}
            assert drafts and all(token % 3 == 0 for token in drafts)
    sampled = llm.generate(prompts, SamplingParams(temperature=0.8, max_tokens=20, ignore_eos=True))
    assert sum(o.metrics.speculation.num_draft_tokens for o in sampled) > 0


def test_structured_outputs(tmp_path: Path) -> None:
    """Drafts obey the grammar, forced tokens come first, and the text is that of plain decoding."""
    heads = save_medusa(tmp_path, random_heads(256, 4096, heads=HEADS, seed=3), HEADS)
    schema = {"type": "object", "properties": {"level": {"type": "integer"}}, "required": ["level"]}
    structure = {"json": {**schema, "additionalProperties": False}, "disable_any_whitespace": True}
    with LLM(
        speculative_config={"model": heads},
        speculation_control="static",
        num_kv_blocks=128,
        max_model_len=256,
        keep_trace=True,
    ) as llm:
        for changes in ({"temperature": 0}, {"temperature": 1.0, "seed": 7}, {"temperature": 1.0}):
            params = SamplingParams(max_tokens=48, structured_outputs=structure, **changes)
            outputs = {}
            for name, asked in (("plain", {"method": "none"}), *SHAPES.items()):
                asked = {"method": "medusa", **asked}
                (output,) = llm.generate(["CONFIG = "], params.replace(speculation=asked))
                assert isinstance(json.loads(output.outputs[0].text)["level"], int)
                outputs[name] = output
            texts = {output.outputs[0].token_ids for output in outputs.values()}
            assert len(texts) == 1 or changes == {"temperature": 1.0}
            for name in SHAPES:
                assert outputs[name].metrics.speculation.num_accepted_tokens > 0  # forced ones at least


def test_medusa_choices(
    make_llm: Callable[..., LLM], tmp_path: Path, tensors: dict[str, torch.Tensor]
) -> None:
    choices = [[0], [0, 0], [1], [0, 1]]  # as Medusa lists them, in any order
    path = save_medusa(tmp_path, tensors, HEADS, choices)
    llm = engine(make_llm, speculative_config={"model": path}, keep_trace=True)
    (output,) = llm.generate(random_prompts(1), GREEDY)
    shapes = {step.draft_parents for step in output.outputs[0].trace or ()}
    assert (-1, -1, 0, 0) in shapes
    asked = engine(
        make_llm,
        speculative_config={"model": path, "method": "medusa", "medusa_choices": [[1], [0], [1, 0]]},
        keep_trace=True,
    )
    (output,) = asked.generate(random_prompts(1), GREEDY)
    assert (-1, -1, 1) in {step.draft_parents for step in output.outputs[0].trace or ()}


def test_what_does_not_fit(
    make_llm: Callable[..., LLM], tiny: TinyModels, folder: str, tmp_path: Path
) -> None:
    def refused(error: type[Exception], words: str, **spec: Any) -> None:
        with pytest.raises(error, match=words):
            engine(make_llm, speculative_config={"model": folder, **spec})

    refused(ConfigError, "num_speculative_tokens: reaches 4 .* 3 Medusa heads", num_speculative_tokens=4)
    refused(
        ConfigError,
        "speculative_token_tree: reaches 4",
        speculative_token_tree=[[0], [0, 0], [0] * 3, [0] * 4],
    )
    refused(ConfigError, "medusa_choices", medusa_choices=[[0], [0, -1]])
    refused(ConfigError, "medusa_choices: is the same", medusa_choices=[[0]], speculative_token_tree=[[0]])
    with pytest.raises(ConfigError, match="medusa_choices: only for method 'medusa'"):
        engine(make_llm, speculative_config={"method": "ngram", "medusa_choices": [[0]]})
    with pytest.raises(ModelLoadError, match="hidden size 48, this one has 32"):
        other = save_medusa(tmp_path / "other", random_heads(48, VOCAB), HEADS)
        engine(make_llm, speculative_config={"model": other})
    with pytest.raises(ConfigError, match="needs a model"):
        engine(make_llm, speculative_config={"method": "medusa"})
    llm = engine(make_llm, speculative_config={"model": folder})
    with pytest.raises(RequestError, match="63"):
        llm.generate(
            random_prompts(1),
            GREEDY.replace(speculation={"speculative_token_tree": [[i] for i in range(64)]}),
        )
