"""MTP layers in whole engines: the same text as plain decoding and, step by step, the very drafts that the layers give
over the whole text at once; from folders of their own and from the target's checkpoint."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from draftwise import LLM, RequestOutput, SamplingParams
from draftwise.errors import ConfigError, ModelLoadError
from tests.e2e.conftest import PlainText, random_prompts, token_ids
from tests.fakes.mtp import MtpShape, ReferenceMtp, add_to_target, random_layers, save_mtp
from tests.fakes.tiny import VOCAB, TinyModels

K = 4
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
SHAPES = {
    "DeepSeek": MtpShape("deepseek"),
    "Qwen3-Next": MtpShape("qwen", qk_norm=True),
    "MiMo": MtpShape("mimo", qkv_bias=True),
    "3 layers": MtpShape("deepseek", layers=3),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "roomy": {},
    "preemption": {"num_kv_blocks": 40, "max_num_seqs": 8},
    "chunks": {"max_num_batched_tokens": 19, "max_num_seqs": 5},
}
TREES: dict[str, dict[str, Any]] = {
    "static": {"speculative_token_tree": [[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0]]},
    "dynamic": {"speculative_dynamic_tree": {"top_k": 3, "depth": 4}, "num_speculative_tokens": 8},
}


def engine(make_llm: Callable[..., LLM], head: str | None, **options: Any) -> LLM:
    """An engine that drafts in every step, whether it pays or not."""
    spec = {"method": "mtp", "model": head, "num_speculative_tokens": K}
    return make_llm(speculative_config=spec, speculation_control="static", keep_trace=True, **options)


class Remembering(ReferenceMtp):
    """What it drafts behind a text is the same in every test."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._known: dict[tuple[tuple[int, ...], int], list[int]] = {}

    def draft(self, tokens: Sequence[int], hidden: Tensor, count: int) -> list[int]:
        key = tuple(tokens), count
        if key not in self._known:
            self._known[key] = super().draft(tokens, hidden, count)
        return self._known[key]


class Target:
    """A target in Transformers."""

    def __init__(self, folder: str) -> None:
        self.model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.embedding = self.model.get_input_embeddings().weight.detach()
        self.output = self.model.lm_head.weight.detach()
        self._known: dict[tuple[int, ...], Tensor] = {}

    @torch.inference_mode()
    def hidden(self, tokens: Sequence[int]) -> Tensor:
        """[n, H] after the final norm. Of each text once."""
        key = tuple(tokens)
        if key not in self._known:
            self._known[key] = self.model.model(torch.tensor([list(tokens)])).last_hidden_state[0]
        return self._known[key]


@pytest.fixture(scope="module")
def target(tiny: TinyModels) -> Target:
    return Target(tiny.target)


@pytest.fixture(scope="module")
def references(target: Target) -> dict[str, Remembering]:
    """Of `SHAPES`, with the same layers for all tests."""
    return {
        name: Remembering(shape, random_layers(shape, seed=5), target.embedding, target.output)
        for name, shape in SHAPES.items()
    }


def check_drafts(outputs: Sequence[RequestOutput], target: Target, reference: ReferenceMtp) -> int:
    """Every draft of every step is the reference's; how many steps there were."""
    steps = 0
    for output in outputs:
        ids = [*output.prompt_token_ids, *output.outputs[0].token_ids]
        hidden = target.hidden(ids)
        known = len(output.prompt_token_ids)
        for step in output.outputs[0].trace or ():
            count = len(step.draft_tokens)
            if count:
                wanted = reference.draft(ids[:known], hidden[: known - 1], count)
                assert list(step.draft_tokens) == wanted
                steps += 1
            known += len(step.token_ids)
    return steps


@pytest.mark.parametrize(
    ("options", "name"),
    [
        # each kind in one place or two, in turns, and the one with most state in all; --all: all in all
        pytest.param(options, name, marks=[pytest.mark.slow] if (i + j) % 2 and name != "3 layers" else [])
        for i, options in enumerate(OPTIONS)
        for j, name in enumerate(SHAPES)
    ],
)
def test_drafts_are_the_layers_own(
    make_llm: Callable[..., LLM],
    plain_text: PlainText,
    target: Target,
    references: dict[str, Remembering],
    tmp_path: Path,
    name: str,
    options: str,
) -> None:
    prompts = random_prompts(5, seed=51, low=12)
    prompts += [dict(p) for p in prompts[:2]]  # prefix hits
    plain = plain_text(prompts, GREEDY)
    reference = references[name]
    llm = engine(make_llm, save_mtp(tmp_path, reference.shape, reference.w), **OPTIONS[options])
    for _ in range(2):  # the second time on cached prefixes
        outputs = llm.generate(prompts, GREEDY)
        assert token_ids(outputs) == plain
        assert check_drafts(outputs, target, reference) > 50
        llm.check_integrity()
    if options == "preemption":
        assert llm.stats().num_preemptions > 0


@pytest.mark.parametrize("layers", [1, 3])
def test_numbers_of_drafts_that_change(
    make_llm: Callable[..., LLM], tiny: TinyModels, tmp_path: Path, layers: int
) -> None:
    """Two drafts, one, none, then four: layers behind the first one catch up on what they did not see."""
    target, shape = Target(tiny.target), MtpShape("deepseek", layers=layers)
    weights = random_layers(shape, seed=5)
    reference = ReferenceMtp(shape, weights, target.embedding, target.output)
    table = [[1, 1, K], [2, 2, 0], [3, 3, 1], [4, 64, 2]]
    spec = {
        "method": "mtp",
        "model": save_mtp(tmp_path, shape, weights),
        "num_speculative_tokens": K,
        "num_speculative_tokens_per_batch_size": table,
    }
    llm = make_llm(speculative_config=spec, speculation_control="static", keep_trace=True)
    lengths = [80, 70, 22, 10]
    outputs = llm.generate(random_prompts(4, seed=56), [GREEDY.replace(max_tokens=n) for n in lengths])
    assert check_drafts(outputs, target, reference) > 30
    drafted = {len(step.draft_tokens) for o in outputs for step in o.outputs[0].trace or ()}
    assert drafted >= {0, 1, 2, K}


@pytest.mark.parametrize("block_size", [1, 2])
def test_a_prefix_hit_shorter_than_the_layers(
    make_llm: Callable[..., LLM], tiny: TinyModels, tmp_path: Path, block_size: int
) -> None:
    """The third layer's first row is the one of token 3: a hit of one or two tokens gives it nothing to start from."""
    target, shape = Target(tiny.target), SHAPES["3 layers"]
    weights = random_layers(shape, seed=5)
    reference = ReferenceMtp(shape, weights, target.embedding, target.output)
    llm = engine(make_llm, save_mtp(tmp_path, shape, weights), block_size=block_size)
    llm.generate({"prompt_token_ids": [5, 6, 7, 8, 9]}, GREEDY)
    hits = set()
    for ids in ([5, 10], [5, 6, 10], [5, 10, 11], [5, 6, 10, 11, 12]):
        output = llm.generate({"prompt_token_ids": ids}, GREEDY)[0]
        hits.add(output.num_cached_tokens)
        assert check_drafts([output], target, reference) > 3
    assert hits == ({1, 2, 3} if block_size == 1 else {0, 2})


@pytest.mark.parametrize("form", ["deepseek", "qwen", "mimo"])
def test_layers_in_the_targets_own_checkpoint(
    make_llm: Callable[..., LLM], tiny: TinyModels, tmp_path: Path, form: str
) -> None:
    """No model is named: the target's folder has the layers, and the target itself passes over them."""
    shape = MtpShape(form, inner=48)  # sizes are those of the target's config.json
    weights = random_layers(shape, seed=6)
    folder = add_to_target(tmp_path, tiny.target, shape, weights)
    target = Target(tiny.target)
    reference = ReferenceMtp(shape, weights, target.embedding, target.output)
    prompts = random_prompts(3, seed=52)
    plain = token_ids(make_llm().generate(prompts, GREEDY))
    assert token_ids(make_llm(model=folder).generate(prompts, GREEDY)) == plain
    outputs = engine(make_llm, None, model=folder).generate(prompts, GREEDY)
    assert token_ids(outputs) == plain
    assert check_drafts(outputs, target, reference) > 30


def test_mimo(make_llm: Callable[..., LLM], tmp_path: Path) -> None:
    """The family as it is published: Qwen2's layers under MiMo's name, biases on q, k and v."""
    torch.manual_seed(8)
    config = transformers.Qwen2Config(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=192,
        tie_word_embeddings=False,
        initializer_range=0.2,
        eos_token_id=2,
    )
    base = str(tmp_path / "base")
    transformers.Qwen2ForCausalLM(config).save_pretrained(base)
    shape = MtpShape("mimo", qkv_bias=True)
    weights = random_layers(shape, seed=7)
    architecture = {"architectures": ["MiMoForCausalLM"], "model_type": "mimo"}
    folder = add_to_target(tmp_path / "mimo", base, shape, weights, **architecture)
    target = Target(base)
    reference = ReferenceMtp(shape, weights, target.embedding, target.output)
    outputs = engine(make_llm, None, model=folder).generate(random_prompts(3, seed=53), GREEDY)
    assert check_drafts(outputs, target, reference) > 30


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("name", ["DeepSeek", "3 layers"])
@pytest.mark.parametrize("seeded", [False, True], ids=["greedy", "coupled"])
def test_trees_change_nothing(
    make_llm: Callable[..., LLM], tiny: TinyModels, tmp_path: Path, name: str, tree: str, seeded: bool
) -> None:
    prompts = random_prompts(6, seed=54)
    params = GREEDY.replace(temperature=0.9, seed=3) if seeded else GREEDY
    plain = token_ids(make_llm().generate(prompts, params))
    shape = SHAPES[name]
    llm = engine(make_llm, save_mtp(tmp_path, shape, random_layers(shape)), max_num_batched_tokens=64)
    asked = params.replace(speculation={"method": "mtp", **TREES[tree]})
    outputs = llm.generate(prompts, asked)
    assert token_ids(outputs) == plain
    shapes = {step.draft_parents for o in outputs for step in o.outputs[0].trace or ()}
    assert any(parents != tuple(range(-1, len(parents) - 1)) for parents in shapes)


@pytest.mark.parametrize(
    ("options", "layers"),
    [
        ("roomy", 1),
        pytest.param("roomy", 2, marks=pytest.mark.slow),
        ("roomy", 3),
        pytest.param("chunks", 1, marks=pytest.mark.slow),
        ("chunks", 2),
        ("chunks", 3),
    ],
)
def test_nodes_of_a_tree_are_the_best_of_their_depths_layers(
    make_llm: Callable[..., LLM], tiny: TinyModels, tmp_path: Path, layers: int, options: str
) -> None:
    """Level l is read by layer min(l, layers - 1), which has to know the whole path and all that came before it."""
    target, shape = Target(tiny.target), MtpShape("mimo", layers=layers)
    weights = random_layers(shape, seed=5)
    reference = ReferenceMtp(shape, weights, target.embedding, target.output)
    llm = engine(make_llm, save_mtp(tmp_path, shape, weights), **OPTIONS[options])
    tree = [[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0], [1, 0, 0], [0, 0, 0, 0]]
    asked = {"method": "mtp", "speculative_token_tree": tree}
    prompts = [{"prompt_token_ids": [5, 6]}, *random_prompts(5, seed=57, low=5)]
    steps = 0
    for output in llm.generate(prompts, GREEDY.replace(max_tokens=10, speculation=asked)):
        ids = [*output.prompt_token_ids, *output.outputs[0].token_ids]
        hidden = target.hidden(ids)
        known = len(output.prompt_token_ids)
        for step in output.outputs[0].trace or ():
            if step.draft_tokens and known > layers:  # of fewer tokens the first layer alone drafts trees
                _check_tree(
                    reference, ids[:known], hidden[: known - 1], step.draft_tokens, step.draft_parents
                )
                steps += 1
            known += len(step.token_ids)
    assert steps > 25


def _check_tree(
    reference: ReferenceMtp, known: list[int], hidden: Tensor, tokens: Sequence[int], parents: Sequence[int]
) -> None:
    paths: list[tuple[int, ...]] = []
    children: dict[tuple[int, ...], list[int]] = {}
    for token, parent in zip(tokens, parents, strict=True):
        path = () if parent < 0 else paths[parent]
        children.setdefault(path, []).append(token)
        paths.append((*path, token))
    for path, found in children.items():
        best = reference.next_logits(known, hidden, path).topk(len(found)).indices
        assert best.tolist() == found, path


def test_default_number_of_drafts_and_errors(
    make_llm: Callable[..., LLM], tiny: TinyModels, tmp_path: Path
) -> None:
    shape = SHAPES["DeepSeek"]
    folder = save_mtp(tmp_path / "mtp", shape, random_layers(shape))
    llm = make_llm(speculative_config={"model": folder})
    assert llm.config.speculative[0].method == "mtp"
    assert llm.config.speculative[0].num_speculative_tokens == 3
    with pytest.raises(ModelLoadError, match="the target's own checkpoint has no MTP layers"):
        make_llm(speculative_config={"method": "mtp"})
    with pytest.raises(ConfigError, match="prompt_lookup_max"):
        make_llm(speculative_config={"method": "mtp", "prompt_lookup_max": 3})


def test_a_speculators_folder_is_served_by_name(
    make_llm: Callable[..., LLM], tiny: TinyModels, tmp_path: Path
) -> None:
    """The head's folder as the model: its verifier is the target, and it drafts as many tokens as it says."""
    shape = MtpShape("speculators", qk_norm=True)
    weights = random_layers(shape, seed=9)
    folder = Path(save_mtp(tmp_path / "head", shape, weights))
    config = json.loads((folder / "config.json").read_text())
    config["speculators_config"]["verifier"] = {"name_or_path": tiny.target, "architectures": []}
    (folder / "config.json").write_text(json.dumps(config))
    target = Target(tiny.target)
    llm = make_llm(model=str(folder), speculation_control="static", keep_trace=True)
    (spec,) = llm.config.speculative
    assert (spec.method, spec.num_speculative_tokens, llm.config.model) == ("mtp", 2, tiny.target)
    outputs = llm.generate(random_prompts(2, seed=55), GREEDY)
    reference = ReferenceMtp(shape, weights, target.embedding, target.output)
    assert check_drafts(outputs, target, reference) > 20
    # a drafter of the user's own choice stands, and so does the old spelling of K
    llm = make_llm(model=str(folder), speculative_config={"method": "ngram"})
    assert [s.method for s in llm.config.speculative] == ["ngram"]
    llm = make_llm(model=str(folder), num_speculative_tokens=1)
    assert [(s.method, s.num_speculative_tokens) for s in llm.config.speculative] == [("mtp", 1)]
    config["speculators_config"] = {}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="names no verifier"):
        make_llm(model=str(folder))
