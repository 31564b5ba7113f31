"""EAGLE heads in whole engines: the same text as plain decoding, and, step by step, the very drafts that the head gives
over the whole text at once. A lost or stale feature or K/V row would show as another draft."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from draftwise import LLM, SamplingParams
from draftwise.adapt.controller import StaticController
from draftwise.config.embedded import embedded_path
from draftwise.models.loader import load_config
from draftwise.types import Speculation
from tests.e2e.conftest import PlainText, random_prompts, token_ids
from tests.fakes.heads import HeadShape, ReferenceHead, random_weights, save_head
from tests.fakes.tiny import VOCAB, TinyModels

K = 4
EAGLE = HeadShape("eagle", 32, 32, VOCAB)
EAGLE3 = HeadShape("eagle3", 32, 32, VOCAB, feature_layers=(0, 1, 2), draft_vocab=47, own_embedding=True)
TREE = [[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0], [1, 0, 0], [0, 0, 0, 0]]
SHAPES = {"eagle": EAGLE, "eagle3": EAGLE3}


class Target:
    """The tiny target in Transformers: hidden states of whole texts."""

    def __init__(self, folder: str) -> None:
        self.model = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.embedding = self.model.get_input_embeddings().weight.detach()
        self.output = self.model.lm_head.weight.detach()
        self._known: dict[tuple[int, ...], list[Tensor]] = {}

    def states(self, tokens: list[int]) -> list[Tensor]:
        """Entering each layer, leaving the last one, and after the final norm: [n, H] each. Of each text once."""
        key = tuple(tokens)
        if key not in self._known:
            self._known[key] = self._states(tokens)
        return self._known[key]

    @torch.inference_mode()
    def _states(self, tokens: list[int]) -> list[Tensor]:
        last: list[Tensor] = []
        hook = self.model.model.norm.register_forward_pre_hook(lambda _, inputs: last.append(inputs[0]))
        out = self.model.model(torch.tensor([tokens]), output_hidden_states=True).hidden_states
        hook.remove()
        return [state[0].clone() for state in (*out[:-1], last[0], out[-1])]


@pytest.fixture(scope="module")
def target(tiny: TinyModels) -> Target:
    return Target(tiny.target)


@pytest.fixture(scope="module")
def heads(target: Target, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, ReferenceHead]]:
    """Method -> (folder, reference) of random heads."""
    found = {}
    for name, shape in SHAPES.items():
        weights = random_weights(shape, seed=5)
        folder = save_head(tmp_path_factory.mktemp("heads") / name, shape, weights)
        found[name] = (folder, ReferenceHead(shape, weights, target.embedding, target.output))
    return found


def engine(make_llm: Callable[..., LLM], folder: str, method: str, **options: Any) -> LLM:
    spec = {"method": method, "model": folder, "num_speculative_tokens": K}
    spec = options.pop("speculative_config", spec)
    return make_llm(speculative_config=spec, speculation_control="static", keep_trace=True, **options)


def greedy(count: int, **more: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, **more)


def check_drafts(
    target: Target, head: ReferenceHead, prompt: list[int], output: Any, first: int = 1, least: int = 3
) -> None:
    """Chains of the output's trace are what the head drafts over the whole text: every one of the first steps, where
    chunks, hits and gaps show, then every third."""
    tokens = [*prompt, *output.token_ids]
    states = target.states(tokens)
    features = head.combine(states)
    end, checked = len(prompt), 0
    for step in output.trace:
        if step.draft_tokens and (checked < 3 or end % 3 == 0):
            # these were drafted when `end` tokens were known
            count = len(step.draft_tokens)
            wanted = head.draft(tokens[:end], features[: end - 1], count, first)
            assert list(step.draft_tokens) == wanted, f"behind {end} tokens"
            checked += 1
        end += len(step.token_ids)
    assert checked >= least, "nothing was compared"


OPTIONS: dict[str, dict[str, Any]] = {
    "batch 8": {},
    "batch 1": {"max_num_seqs": 1},
    "preemption": {"num_kv_blocks": 44, "max_num_seqs": 8},
    "chunks": {"max_num_batched_tokens": 19, "max_num_seqs": 5},
    "no prefix cache": {"enable_prefix_caching": False},
    "other block size": {"block_size": 16, "num_kv_blocks": 128},
}


@pytest.mark.parametrize(
    ("options", "method"),
    [
        pytest.param(
            options,
            method,
            id=f"{name}-{method}",
            # each place with one method, in turns; --all: with both
            marks=[pytest.mark.slow] if (i + j) % 2 else [],
        )
        for i, (name, options) in enumerate(OPTIONS.items())
        for j, method in enumerate(SHAPES)
    ],
)
def test_drafts_are_those_over_the_whole_text(
    make_llm: Callable[..., LLM],
    plain_text: PlainText,
    target: Target,
    heads: dict[str, tuple[str, ReferenceHead]],
    method: str,
    options: dict[str, Any],
) -> None:
    folder, reference = heads[method]
    prompts = random_prompts(7, seed=51)
    prompts += [dict(prompts[0]), {"prompt_token_ids": prompts[1]["prompt_token_ids"][:-3]}]
    plain = plain_text(prompts, greedy(24))
    llm = engine(make_llm, folder, method, **options)
    for _ in range(2):  # the second time on cached prefixes
        outputs = llm.generate(prompts, greedy(24))
        assert token_ids(outputs) == plain
        for prompt, output in zip(prompts, outputs, strict=True):
            check_drafts(target, reference, prompt["prompt_token_ids"], output.outputs[0])
    if options.get("num_kv_blocks") == 44:
        assert llm.stats().num_preemptions > 0


def test_the_next_turn_goes_on_where_the_last_one_ended(
    make_llm: Callable[..., LLM], target: Target, heads: dict[str, tuple[str, ReferenceHead]]
) -> None:
    """The blocks of a finished request are filled up to its last token, which no draft followed."""
    folder, reference = heads["eagle3"]
    llm = engine(make_llm, folder, "eagle3")
    prompt = random_prompts(1, seed=52, low=20)[0]["prompt_token_ids"]
    for turn in range(3):
        # the last token that the target reads, the last but one of the answer, ends a block of 4
        count = 9 + -len(prompt) % 4
        output = llm.generate([{"prompt_token_ids": prompt}], greedy(count))[0]
        if turn:
            assert output.num_cached_tokens == len(prompt) - 3, "a hit over the last answer, too"
        check_drafts(target, reference, prompt, output.outputs[0], least=1)
        prompt = [*prompt, *output.outputs[0].token_ids, 7, 8]


def test_a_prefix_is_shared_while_it_is_computed(
    make_llm: Callable[..., LLM], target: Target, heads: dict[str, tuple[str, ReferenceHead]]
) -> None:
    """The second request is admitted in the midst of the first one's prompt."""
    folder, reference = heads["eagle3"]
    llm = engine(make_llm, folder, "eagle3", max_num_batched_tokens=10)
    prompt = random_prompts(1, seed=59, low=55, high=58)[0]["prompt_token_ids"]
    prompts = [prompt, [*prompt[:-2], 9, 8, 7]]
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], greedy(14))
    assert outputs[1].num_cached_tokens >= 40
    for ids, output in zip(prompts, outputs, strict=True):
        check_drafts(target, reference, ids, output.outputs[0])


def test_a_prefix_of_another_method_leaves_a_gap(
    make_llm: Callable[..., LLM], target: Target, heads: dict[str, tuple[str, ReferenceHead]]
) -> None:
    """Hidden states of the hit are gone: the head begins behind it, and others do not take its blocks for filled."""
    folder, reference = heads["eagle3"]
    llm = engine(make_llm, folder, "eagle3")
    prompt = random_prompts(1, seed=53, low=30)[0]["prompt_token_ids"]
    llm.generate([{"prompt_token_ids": prompt}], greedy(1, speculation={"method": "none"}))[0]
    for more in ([3, 4, 5], [6, 7, 8]):
        longer = [*prompt, *more]
        output = llm.generate([{"prompt_token_ids": longer}], greedy(14))[0]
        cached = output.num_cached_tokens
        assert cached >= len(prompt) - 3
        check_drafts(target, reference, longer, output.outputs[0], first=cached + 1)
    # part of the prefix filled, part not: only a hit that is filled to its end can be continued
    half = prompt[: len(prompt) // 2]
    llm.reset_prefix_cache()
    llm.generate([{"prompt_token_ids": half}], greedy(1))[0]
    llm.generate([{"prompt_token_ids": prompt}], greedy(1, speculation={"method": "none"}))[0]
    output = llm.generate([{"prompt_token_ids": prompt}], greedy(14))[0]
    check_drafts(target, reference, prompt, output.outputs[0], first=output.num_cached_tokens + 1)


class Resting(StaticController):
    """Heads are told nothing in some steps of every 40, and nobody drafts in these."""

    def __init__(self, steps: range) -> None:
        super().__init__()
        self._steps = steps
        self._step = 0
        self.resting: set[int] = set()

    def begin(self, batch_size: int) -> None:
        self._step += 1
        self.resting = set(range(1000)) if self._step % 40 in self._steps else set()

    def draft_budget(self, rid: int, speculation: Speculation, batch_size: int) -> int:
        return 0 if rid in self.resting else super().draft_budget(rid, speculation, batch_size)


def test_a_prompt_that_is_filled_in_is_time_in_the_heads_passes(
    heads: dict[str, tuple[str, ReferenceHead]], make_llm: Callable[..., LLM]
) -> None:
    """One token of output: the head reads the prompt's rows, for whoever shares them later, and drafts nothing."""
    name = next(iter(heads))
    llm = engine(make_llm, heads[name][0], name.split()[0])
    llm.generate([{"prompt_token_ids": list(range(1, 60))}], greedy(1))
    stats = llm.stats()
    assert stats.speculation.num_drafts == 0
    assert stats.draft_forward_time > 0


def test_chains_are_time_in_the_heads_passes(
    heads: dict[str, tuple[str, ReferenceHead]], make_llm: Callable[..., LLM]
) -> None:
    """A short prompt and blocks that do not fill up: nothing but drafts."""
    name = next(iter(heads))
    llm = engine(make_llm, heads[name][0], name.split()[0], block_size=64, num_kv_blocks=16)
    llm.generate([{"prompt_token_ids": [1, 2, 3]}], greedy(10))
    stats = llm.stats()
    assert stats.speculation.num_drafts > 0
    assert stats.draft_forward_time > 0


@pytest.mark.parametrize(
    ("steps", "method"),
    [
        pytest.param(steps, method, id=f"{name}-{method}", marks=[pytest.mark.slow] if (i + j) % 2 else [])
        for i, (name, steps) in enumerate(
            {"later": range(4, 12), "prompt": range(12), "one": range(6, 7)}.items()
        )
        for j, method in enumerate(SHAPES)
    ],
)
def test_what_a_head_was_not_told_of_leaves_a_gap(
    make_llm: Callable[..., LLM],
    target: Target,
    heads: dict[str, tuple[str, ReferenceHead]],
    method: str,
    steps: range,
) -> None:
    folder, reference = heads[method]
    llm = engine(make_llm, folder, method)
    assert llm._engine is not None
    scheduler = llm._engine.core.scheduler
    prompts = random_prompts(3, seed=57, low=20)
    plain = token_ids(make_llm().generate(prompts, greedy(30)))
    for _ in range(2):  # the second time on cached prefixes
        scheduler._controller = Resting(steps)
        outputs = llm.generate(prompts, greedy(30))
        assert token_ids(outputs) == plain
        for prompt, output in zip(prompts, outputs, strict=True):
            ids, trace = prompt["prompt_token_ids"], output.outputs[0].trace
            # The first draft behind the rest was made right after the one token that was told of: row `end` - 1.
            # What follows the prompt's step is the first entry.
            drafted = [i for i, step in enumerate(trace) if step.draft_tokens]
            first_back = next(i for i in drafted if i > steps.stop - 1)
            end = len(ids) + sum(len(step.token_ids) for step in trace[:first_back])
            tokens = [*ids, *output.outputs[0].token_ids]
            features = reference.combine(target.states(tokens))
            first = end - 1
            for step in trace[first_back:]:
                if step.draft_tokens:
                    wanted = reference.draft(tokens[:end], features[: end - 1], len(step.draft_tokens), first)
                    assert list(step.draft_tokens) == wanted, f"behind {end} tokens"
                end += len(step.token_ids)
    # What was filled before a rest may be reused, what was not told of is not taken for filled.
    scheduler._controller = StaticController()
    longer = [*prompts[0]["prompt_token_ids"], *plain[0]]
    output = llm.generate([{"prompt_token_ids": longer}], greedy(14))[0]
    hit = output.num_cached_tokens
    assert hit > len(longer) - 6
    check_drafts(target, reference, longer, output.outputs[0], first=hit + 1)


@pytest.mark.parametrize("method", SHAPES)
def test_steps_without_drafting(
    make_llm: Callable[..., LLM],
    target: Target,
    heads: dict[str, tuple[str, ReferenceHead]],
    method: str,
) -> None:
    """Features of undrafted steps wait: with more than two requests there is no drafting, later there is again."""
    folder, reference = heads[method]
    spec = {
        "method": method,
        "model": folder,
        "num_speculative_tokens": K,
        "num_speculative_tokens_per_batch_size": [[1, 1, K], [2, 2, 2], [3, 64, 0]],
    }
    llm = engine(make_llm, folder, method, speculative_config=spec)
    prompts = random_prompts(4, seed=54, high=30)
    lengths = [70, 60, 12, 50]
    plain = token_ids(make_llm().generate(prompts, [greedy(n) for n in lengths]))
    outputs = llm.generate(prompts, [greedy(n) for n in lengths])
    assert token_ids(outputs) == plain
    for prompt, output in zip(prompts[:2], outputs, strict=False):
        trace = output.outputs[0].trace
        undrafted = [not step.draft_tokens for step in trace]
        assert sum(undrafted[:40]) > 32, "more than may wait"
        check_drafts(target, reference, prompt["prompt_token_ids"], output.outputs[0], least=2)


@pytest.mark.parametrize(
    ("sequences", "shape", "method"),
    [
        # each shape with both methods, alone or among others; --all: both
        pytest.param(sequences, shape, method, marks=[pytest.mark.slow] if (i + j + k) % 2 else [])
        for i, sequences in enumerate((1, 8))
        for j, shape in enumerate(("chain", "static", "dynamic"))
        for k, method in enumerate(SHAPES)
    ],
)
def test_seeded_text_equals_plain_decoding(
    make_llm: Callable[..., LLM],
    heads: dict[str, tuple[str, ReferenceHead]],
    method: str,
    shape: str,
    sequences: int,
) -> None:
    folder, _ = heads[method]
    prompts = random_prompts(6, seed=55)
    params = [
        SamplingParams(temperature=0.8 * (i % 3 > 0), top_p=0.9, max_tokens=20, ignore_eos=True, seed=i)
        for i in range(6)
    ]
    plain = token_ids(make_llm().generate(prompts, params))
    llm = engine(make_llm, folder, method, max_num_seqs=sequences, num_kv_blocks=60)
    more: dict[str, dict[str, Any]] = {
        "chain": {},
        "static": {"speculative_token_tree": TREE},
        "dynamic": {"speculative_dynamic_tree": {"top_k": 3, "depth": 4}, "num_speculative_tokens": 9},
    }
    wanted = [p.replace(speculation={"method": method, **more[shape]}) for p in params]
    for _ in range(2):
        assert token_ids(llm.generate(prompts, wanted)) == plain
    llm.check_integrity()


@pytest.mark.parametrize("method", SHAPES)
@pytest.mark.parametrize("rule", ["standard", "block"])
def test_sampled_drafts_come_from_the_heads_distribution(
    make_llm: Callable[..., LLM],
    heads: dict[str, tuple[str, ReferenceHead]],
    method: str,
    rule: str,
) -> None:
    """Runs to the end under rules that look at q; drafts are tokens that the head can say."""
    folder, reference = heads[method]
    spec = {
        "method": method,
        "model": folder,
        "num_speculative_tokens": K,
        "rejection_sample_method": rule,
    }
    llm = engine(make_llm, folder, method, speculative_config=spec)
    params = SamplingParams(temperature=1.0, max_tokens=24, ignore_eos=True, seed=3)
    outputs = llm.generate(random_prompts(6, seed=56), params)
    drafted = {t for o in outputs for step in o.outputs[0].trace for t in step.draft_tokens}
    assert len(drafted) > 20 and drafted <= set(reference.target_ids.tolist())


@pytest.mark.parametrize("method", SHAPES)
def test_nodes_of_a_tree_are_the_heads_best(
    make_llm: Callable[..., LLM],
    target: Target,
    heads: dict[str, tuple[str, ReferenceHead]],
    method: str,
) -> None:
    folder, reference = heads[method]
    llm = engine(make_llm, folder, method)
    prompt = random_prompts(1, seed=57, low=10)[0]["prompt_token_ids"]
    params = greedy(10, speculation={"method": method, "speculative_token_tree": TREE})
    output = llm.generate([{"prompt_token_ids": prompt}], params)[0].outputs[0]
    tokens = [*prompt, *output.token_ids]
    features = reference.combine(target.states(tokens))
    end = len(prompt)
    for step in output.trace:
        paths: dict[tuple[int, ...], list[int]] = {}
        node_paths: list[tuple[int, ...]] = []
        for token, parent in zip(step.draft_tokens, step.draft_parents, strict=True):
            path = () if parent < 0 else node_paths[parent]
            paths.setdefault(path, []).append(token)
            node_paths.append((*path, token))
        for path, children in paths.items():
            logits = reference.next_logits(tokens[:end], features[: end - 1], list(path))
            best = logits.topk(len(children)).indices
            assert reference.target_ids[best].tolist() == children, (end, path)
        end += len(step.token_ids)


def test_methods_side_by_side(
    make_llm: Callable[..., LLM], target: Target, heads: dict[str, tuple[str, ReferenceHead]]
) -> None:
    specs = [
        {"method": name, "model": folder, "num_speculative_tokens": K} for name, (folder, _) in heads.items()
    ]
    llm = make_llm(
        speculative_config=[*specs, {"method": "ngram", "num_speculative_tokens": 3}], keep_trace=True
    )
    prompts = random_prompts(8, seed=58, low=10)
    methods = ["eagle", "eagle3", "ngram", "none"] * 2
    plain = token_ids(make_llm().generate(prompts, greedy(16)))
    outputs = llm.generate(prompts, [greedy(16, speculation={"method": m}) for m in methods])
    assert token_ids(outputs) == plain
    for prompt, output, method in zip(prompts, outputs, methods, strict=True):
        if method in heads:
            check_drafts(target, heads[method][1], prompt["prompt_token_ids"], output.outputs[0])


@pytest.fixture(scope="module")
def structured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """The embedded target with a random head of half its vocabulary."""
    path = str(embedded_path("target"))
    config = load_config(path)
    shape = HeadShape(
        "eagle3",
        config.hidden_size,
        config.hidden_size,
        config.vocab_size,
        draft_vocab=config.vocab_size // 2,
        positions=512,
    )
    weights = random_weights(shape, seed=6, scale=0.05)
    folder = save_head(tmp_path_factory.mktemp("structured") / "head", shape, weights)
    spec = {"method": "eagle3", "model": folder, "num_speculative_tokens": 4}
    with LLM(
        path,
        num_kv_blocks=256,
        max_model_len=512,
        speculative_config=spec,
        keep_trace=True,
        speculation_control="static",
    ) as llm:
        yield llm


@pytest.mark.parametrize("shape", ["chain", "static", "dynamic"])
def test_structured_outputs(structured: LLM, shape: str) -> None:
    """Drafts are drawn under the grammar, forced tokens are fed first; the text is that of plain decoding."""
    more: dict[str, dict[str, Any]] = {
        "chain": {},
        "static": {"speculative_token_tree": TREE},
        "dynamic": {"speculative_dynamic_tree": {"top_k": 3, "depth": 4}, "num_speculative_tokens": 9},
    }
    schema = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 6},
            "level": {"type": "integer", "maximum": 99},
        },
        "required": ["name", "level"],
        "additionalProperties": False,
    }
    base = SamplingParams(
        max_tokens=60, structured_outputs={"json": schema, "disable_any_whitespace": True}, seed=4
    )
    for temperature in (0.0, 0.8):
        params = base.replace(temperature=temperature)
        plain, drafted = (
            structured.generate(["CONFIG = ", "x = json.loads('"], params.replace(speculation=speculation))
            for speculation in ({"method": "none"}, {"method": "eagle3", **more[shape]})
        )
        assert [o.outputs[0].text for o in drafted] == [o.outputs[0].text for o in plain]
        steps = [step for o in drafted for step in o.outputs[0].trace]
        assert any(step.method == "eagle3" and step.accepted_nodes for step in steps), (
            "forced tokens at least"
        )
