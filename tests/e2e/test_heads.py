"""EAGLE heads in whole engines: the same text as plain decoding, and, step by step, the very drafts that the head gives
over the whole text at once. A lost or stale feature or K/V row would show as another draft."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from draftwise import LLM, SamplingParams
from tests.e2e.conftest import random_prompts, token_ids
from tests.fakes.heads import HeadShape, ReferenceHead, memorise, random_weights, save_head
from tests.fakes.tiny import VOCAB, TinyModels, save_llama

K = 4
EAGLE = HeadShape("eagle", 32, 32, VOCAB)
EAGLE3 = HeadShape("eagle3", 32, 32, VOCAB, feature_layers=(0, 1, 2), draft_vocab=47, own_embedding=True)
SHAPES = {"eagle": EAGLE, "eagle3": EAGLE3}


class Target:
    """The tiny target in Transformers: hidden states of whole texts."""

    def __init__(self, folder: str) -> None:
        self.model = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.embedding = self.model.get_input_embeddings().weight.detach()
        self.output = self.model.lm_head.weight.detach()

    @torch.inference_mode()
    def states(self, tokens: list[int]) -> list[Tensor]:
        """Entering each layer, leaving the last one, and after the final norm: [n, H] each."""
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
    return make_llm(speculative_config=options.pop("speculative_config", spec), keep_trace=True, **options)


def greedy(count: int, **more: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, **more)


def check_drafts(
    target: Target, head: ReferenceHead, prompt: list[int], output: Any, first: int = 1, least: int = 3
) -> None:
    """Every chain of the output's trace is what the head drafts over the whole text."""
    tokens = [*prompt, *output.token_ids]
    states = target.states(tokens)
    features = head.combine(states)
    end, checked = len(prompt), 0
    for step in output.trace:
        if step.draft_tokens:
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


@pytest.mark.parametrize("method", SHAPES)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_drafts_are_those_over_the_whole_text(
    make_llm: Callable[..., LLM],
    target: Target,
    heads: dict[str, tuple[str, ReferenceHead]],
    method: str,
    options: dict[str, Any],
) -> None:
    folder, reference = heads[method]
    prompts = random_prompts(7, seed=51)
    prompts += [dict(prompts[0]), {"prompt_token_ids": prompts[1]["prompt_token_ids"][:-3]}]
    plain = token_ids(make_llm().generate(prompts, greedy(24)))
    llm = engine(make_llm, folder, method, **options)
    for _ in range(2):  # the second time on cached prefixes
        outputs = llm.generate(prompts, greedy(24))
        assert token_ids(outputs) == plain
        for prompt, output in zip(prompts, outputs, strict=True):
            check_drafts(target, reference, prompt["prompt_token_ids"], output.outputs[0])
    if options.get("num_kv_blocks") == 44:
        assert llm.stats().num_preemptions > 0
