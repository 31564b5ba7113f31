"""Whole engines: the joint distribution of the first tokens is the target's, whatever drafts.

Every output of three tokens over a vocabulary of eight is a cell (512 in all), compared with exact probabilities from
Transformers. The statistic is χ² over the cells of expectation 5 and more, the threshold what χ² exceeds once in 10^8
tests: under the null hypothesis, with the statistic's somewhat heavier tail, it is passed less than once in 10^7
(`world.threshold`). Detectable: the statistic exceeds its mean by trials * d, d = sum((observed - p) ** 2 / p); with
4,500 trials and df near 37 (with few tokens: 17) a bias of d = 0.016 passes the threshold, which is a shift of 13 % of
the probability of every cell. The slow tests are every case with 9,000 trials: df near 47 (22), d = 0.0086, a shift of
9 %. The wrong target of the negative control is off by more: in 200 draws of 4,500 trials its statistic was 1.7 times
the threshold or more.
"""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.fakes.heads import HeadShape, random_weights, save_head
from tests.fakes.tiny import save_llama
from world import threshold as threshold_of

from draftwise import LLM, SamplingParams
from draftwise.adapt.controller import Controller, most_nodes
from draftwise.types import Speculation

VOCAB = 8
LENGTH = 3
TRIALS = 4_500
MANY = 9_000
"""Trials of the slow tests."""
PROMPT = [3, 5, 3, 5, 3]
HEAD = HeadShape("eagle3", 32, 32, VOCAB, draft_vocab=6)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str, str]:
    """Target, draft model, and an EAGLE-3 head that can say six of the eight tokens."""
    root: Path = tmp_path_factory.mktemp("chi")
    settings: dict[str, Any] = {"vocab_size": VOCAB, "eos_token_id": None, "initializer_range": 0.5}
    return (
        save_llama(root / "target", seed=1, **settings),
        save_llama(root / "draft", seed=1, noise=0.1, **settings),
        save_head(root / "head", HEAD, random_weights(HEAD, seed=2, scale=0.1)),
    )


def exact(folder: str, params: SamplingParams) -> np.ndarray:
    """Probability of each of the 512 outputs."""
    import transformers

    model = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    outputs = list(itertools.product(range(VOCAB), repeat=LENGTH))
    ids = torch.tensor([PROMPT + list(o) for o in outputs])
    with torch.no_grad():
        logits = model(ids).logits[:, len(PROMPT) - 1 : -1].double() / params.temperature
    p = logits.softmax(-1)
    if params.top_k:
        kept = p >= p.topk(params.top_k, -1).values[..., -1:]
        p = torch.where(kept, p, 0.0)
        p = p / p.sum(-1, keepdim=True)
    return p.gather(-1, torch.tensor(outputs)[..., None]).squeeze(-1).prod(-1).numpy()


def chi_square(counts: np.ndarray, p: np.ndarray) -> tuple[float, float]:
    """Statistic and threshold."""
    expected = p * counts.sum()
    assert counts[p == 0].sum() == 0, "an impossible output occurred"
    big = expected >= 5
    observed = np.append(counts[big], counts[~big].sum())
    wanted = np.append(expected[big], expected[~big].sum())
    keep = wanted >= 5
    statistic = float(((observed[keep] - wanted[keep]) ** 2 / wanted[keep]).sum())
    return statistic, threshold_of(int(keep.sum()) - 1)


TREE = [[0], [1], [3], [0, 0], [0, 1], [1, 0], [0, 0, 0]]  # drawn by a model: without replacement from q
DYNAMIC = {
    "speculative_dynamic_tree": {"top_k": 3, "depth": 3},
    "num_speculative_tokens": 8,
}  # fixed children

CASES = [
    ("draft_model", {"rule": "rejection"}, {}),
    ("draft_model", {"rule": "block", "speculative_token_tree": TREE}, {"temperature": 0.6, "top_k": 5}),
    ("draft_model", {"rule": "coupled", **DYNAMIC}, {}),
    ("eagle3", {"rule": "coupled"}, {}),
    ("ngram", {"rule": "rejection"}, {}),
    ("synthetic", {"rule": "coupled", "speculative_token_tree": [[0], [1], [0, 0], [0, 1], [1, 0]]}, {}),
]
"""Each method, rule, shape and kind of parameters, with partners that change; other pairs of a method and a shape in
`test_every_method`."""
MORE = [
    ("draft_model", {"rule": "block"}, {}),  # cut: below
    ("draft_model", {"rule": "coupled"}, {}),
    ("eagle3", {"rule": "rejection"}, {"temperature": 0.6, "top_k": 5}),
    ("eagle3", {"rule": "rejection", "speculative_token_tree": TREE}, {}),
    ("eagle3", {"rule": "rejection", **DYNAMIC}, {}),
    ("draft_model", {"rule": "rejection"}, {"temperature": 0.6, "top_k": 5}),
    ("draft_model", {"rule": "rejection", "speculative_token_tree": TREE}, {}),
    ("draft_model", {"rule": "rejection", **DYNAMIC}, {}),
    ("synthetic", {"rule": "rejection", "speculative_token_tree": [[0], [1], [0, 0], [0, 1], [1, 0]]}, {}),
]
"""For the slow tests alone."""


class Whim(Controller):
    """Drafts and verifies any number of nodes, by chance."""

    def __init__(self) -> None:
        self._random = random.Random(7)

    def draft_budget(self, rid: int, speculation: Speculation, batch_size: int) -> int:
        return self._random.randint(0, most_nodes(speculation, batch_size, {}))

    def nodes_to_verify(self, rid: int, num_proposed: int) -> int:
        return self._random.randint(0, num_proposed)


def with_trials(cases: list[Any], more: list[Any]) -> list[Any]:
    """The cases; and, slow, these and more with many trials."""
    return [
        *((*case, TRIALS) for case in cases),
        *(pytest.param(*case, MANY, marks=pytest.mark.slow) for case in (*cases, *more)),
    ]


@pytest.mark.parametrize(("method", "speculation", "more", "trials"), with_trials(CASES, MORE))
def test_outputs_follow_the_target(
    folders: tuple[str, str, str], method: str, speculation: dict[str, Any], more: dict[str, Any], trials: int
) -> None:
    outputs_follow(folders, method, speculation, more, None, trials)


@pytest.mark.parametrize(
    ("method", "speculation", "more", "trials"), with_trials([MORE[0]], [MORE[-1], CASES[0]])
)
def test_outputs_follow_the_target_whatever_is_cut(
    folders: tuple[str, str, str], method: str, speculation: dict[str, Any], more: dict[str, Any], trials: int
) -> None:
    """A controller may draft less and verify a part of what waits, as long as it does not look at the tokens."""
    outputs_follow(folders, method, speculation, more, Whim(), trials)


def outputs_follow(
    folders: tuple[str, str, str],
    method: str,
    speculation: dict[str, Any],
    more: dict[str, Any],
    controller: Controller | None,
    trials: int,
) -> None:
    target, draft, head = folders
    # One more token than is looked at: the drafts of the third are verified as well.
    params = SamplingParams(
        max_tokens=LENGTH + 1,
        speculation={"method": method} | speculation,
        **more,
    )
    with LLM(
        target,
        dtype="float32",
        device="cpu",
        skip_tokenizer_init=True,
        max_num_seqs=256,
        num_kv_blocks=1024,
        seed=12,
        speculative_config=[
            {"method": "draft_model", "model": draft, "num_speculative_tokens": 3},
            {"method": "eagle3", "model": head, "num_speculative_tokens": 3},
            {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1},
            {"method": "synthetic", "num_speculative_tokens": 3},
        ],
        speculation_control="static",
    ) as llm:
        if controller is not None:
            assert llm._engine is not None
            llm._engine.core.scheduler._controller = controller
        counts = np.zeros(VOCAB**LENGTH)
        outputs = llm.generate([{"prompt_token_ids": PROMPT}] * trials, params)
        accepted = 0
        for output in outputs:
            a, b, c = output.outputs[0].token_ids[:LENGTH]
            counts[(a * VOCAB + b) * VOCAB + c] += 1
            accepted += output.metrics.speculation.num_accepted_tokens
        llm.check_integrity()
    p = exact(target, params)
    assert p.sum() == pytest.approx(1)
    assert accepted > 0.01 * trials, "nothing was accepted: the test would show nothing"
    statistic, threshold = chi_square(counts, p)
    assert statistic < threshold
    # Negative control: the same counts are far from a slightly wrong target.
    wrong = p**1.15
    statistic, threshold = chi_square(counts, wrong / wrong.sum())
    assert statistic > threshold
