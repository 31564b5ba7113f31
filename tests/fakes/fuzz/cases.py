"""Random engines and random batches for them, each a function of one seed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from draftwise import SamplingParams
from tests.fakes.every_method import SHAPES, TREE
from tests.fakes.fuzz.world import END, MODEL_LEN, NUM_ADAPTERS, VOCAB, World

MAX_PROMPT = 40
TREE_METHODS = frozenset(
    {"draft_model", "eagle", "eagle3", "mtp", "medusa", "early_exit", "hybrid", "suffix", "synthetic"}
)
OWN_DRAFTS = frozenset({"draft_model", "early_exit", "medusa", "eagle", "eagle3", "mtp"})
"""Methods whose drafts follow from the text before them, and nothing else."""
CHAINS_ONLY = {"other forms": frozenset({"draft_model", "eagle3"})}
"""Drafters of a family that draft all tokens in one pass, and so no trees."""
EXACT_RULES = frozenset({"greedy", "coupled"})
"""Rules whose output is a function of the request alone."""
GRAMMARS: list[dict[str, Any]] = [
    {"regex": "[abc]{2,9},?1{0,3}"},
    {"regex": "(a|b )*é,"},
    {"choice": ["abc", "abca1", "é", "bc,bc,bc", "a a a a"]},
    {"json": {"type": "integer", "minimum": 1, "maximum": 11111}},
    {"grammar": 'start: item ("," item)*\nitem: "ab" | "c" | "1" item'},
]


@dataclass(frozen=True)
class Ask:
    """One prompt of a batch. ``arrival``: steps of the engine (or ticks of the event loop) before it comes;
    ``cancel``: how it is given up once ``cancel_after`` output tokens are there; None: never. ``adapter``: its number
    in `World.adapters`."""

    prompt: tuple[int, ...]
    params: SamplingParams
    priority: int = 0
    arrival: int = 0
    cancel: str | None = None
    cancel_after: int = 0
    adapter: int = 0

    @property
    def rule(self) -> str:
        """The rule that decides, as the engine resolves it."""
        params = self.params
        asked = (params.speculation or {}).get("rule")
        if params.is_greedy and asked != "typical":
            return "greedy"
        return str(asked or ("coupled" if params.seed is not None else "rejection"))

    @property
    def method(self) -> str:
        return str((self.params.speculation or {}).get("method", "none"))


@dataclass(frozen=True)
class Case:
    """An engine and what is asked of it: ``batches`` one after the other."""

    seed: int
    kernels: str
    options: dict[str, Any]
    family: str
    drive: str  # "steps" or "async"
    late: bool  # asynchronous steps are run as late as can be
    close_early: bool  # the engine is closed in the middle of the last batch
    batches: list[list[Ask]] = field(default_factory=list)

    @property
    def ahead(self) -> bool:
        return bool(self.options.get("async_scheduling"))


def make_case(seed: int, world: World) -> Case:
    rng = random.Random(seed)
    kernels = "native" if rng.random() < 0.8 else "torch"
    family = rng.choice(["methods", "methods", "other forms", "oracle", "oracle"])
    options = _engine(rng, kernels, family, world)
    drive = "async" if rng.random() < 0.25 else "steps"
    bases = [_tokens(rng, rng.randint(1, MAX_PROMPT)) for _ in range(3)]
    methods = ["none", "ngram", "suffix", *(spec["method"] for spec in options["speculative_config"])]
    batches = []
    for _ in range(rng.randint(1, 3)):
        size = rng.choice([1, 3, 5, 8, 10])
        batches.append([_ask(rng, bases, methods, family, drive, options) for _ in range(size)])
    adapted = random.Random(f"adapters {seed}")
    if adapted.random() < 0.3:
        options |= _adapter_places(adapted)
        few = [0, *adapted.sample(range(1, NUM_ADAPTERS + 1), adapted.choice([1, 2, NUM_ADAPTERS]))]
        batches = [[replace(ask, adapter=adapted.choice(few)) for ask in batch] for batch in batches]
    return Case(
        seed,
        kernels,
        options,
        family,
        drive,
        late=rng.random() < 0.5,
        close_early=drive == "async" and rng.random() < 0.15,
        batches=batches,
    )


# --------------------------------------------------------------------------------------------- the engine


def _engine(rng: random.Random, kernels: str, family: str, world: World) -> dict[str, Any]:
    native = kernels == "native"
    dtype = rng.choice(["float32", "bfloat16"]) if native else "float32"
    block_size = rng.choice([1, 2, 3, 4, 4, 5, 8, 16])
    fewest = -(-(MODEL_LEN - 1) // block_size)
    seqs = rng.choice([1, 2, 3, 4, 6, 8])
    budget = max(seqs, rng.choice([1, 2, 3, 5, 8, 13, 24, 48, 256]))
    chunked = rng.random() < 0.8
    if not chunked:
        budget = max(budget, MAX_PROMPT)
    specs = [dict(spec) for spec in world.families[family]]
    if rng.random() < 0.6 and family != "oracle":
        specs = rng.sample(specs, rng.randint(1, len(specs)))
    for spec in specs:
        if rng.random() < 0.1:
            spec["num_speculative_tokens_per_batch_size"] = [[1, 2, 3], [3, 5, 1], [6, 64, 0]]
        if spec["method"] == "draft_model" and family != "oracle":
            if rng.random() < 0.15:
                spec["max_model_len"] = rng.randint(8, 40)
            if dtype == "bfloat16" and rng.random() < 0.15:
                spec["quantization"] = rng.choice(["int8", "int8_weight_only"])
    options: dict[str, Any] = {
        "device": "cpu",
        "dtype": dtype,
        "kv_cache_dtype": "auto",
        "max_model_len": MODEL_LEN,
        "block_size": block_size,
        "num_kv_blocks": fewest + rng.choice([0, 0, 1, 2, 3, 6, fewest, 4 * fewest]),
        "max_num_seqs": seqs,
        "max_num_batched_tokens": budget,
        "enable_chunked_prefill": chunked,
        "enable_prefix_caching": rng.random() < 0.8,
        "async_scheduling": rng.random() < 0.3,
        "speculation_control": rng.choice(["static", "adaptive"]),
        "seed": rng.randint(0, 99),
        "speculative_config": specs,
    }
    if native and rng.random() < 0.3:
        options["quantization"] = rng.choice(["int8", "int8_weight_only", "int4_g32", "int4_weight_only_g32"])
        options["dtype"] = "bfloat16"
    if native and rng.random() < 0.4:
        options["kv_cache_dtype"] = rng.choice(["float32", "bfloat16", "float16", "int8", "fp8"])
    return options


def _adapter_places(rng: random.Random) -> dict[str, Any]:
    """Mostly fewer than there are adapters, so that requests wait for them."""
    places = rng.choice([1, 1, 2, 3])
    out = {"enable_lora": True, "max_loras": places}
    if rng.random() < 0.3:
        out["max_cpu_loras"] = places + rng.choice([0, 1])
    return out


# ------------------------------------------------------------------------------------------- the requests


def _tokens(rng: random.Random, n: int) -> tuple[int, ...]:
    """Half of the texts repeat themselves, for those who look up."""
    ids = [rng.randrange(VOCAB - 1) for _ in range(n)]
    if rng.random() < 0.5:
        ids = (ids[: max(1, n // 4)] * 6)[:n]
    return tuple(ids)


def _ask(
    rng: random.Random,
    bases: Sequence[tuple[int, ...]],
    methods: Sequence[str],
    family: str,
    drive: str,
    options: dict[str, Any],
) -> Ask:
    prompt = rng.choice(bases)
    if rng.random() < 0.6:  # a beginning that others have, too
        prompt = (*prompt[: rng.randint(0, len(prompt))], *_tokens(rng, rng.randint(1, 8)))[:MAX_PROMPT]
    params: dict[str, Any] = {
        "max_tokens": rng.choice([1, 2, 5, 9, 14, 20, 20]),
        "ignore_eos": rng.random() < 0.5,
    }
    if rng.random() < 0.1:
        params["max_tokens"] = None
    if rng.random() < 0.45:  # nothing but drafts, which are then known in advance
        params["temperature"] = 0.0
        loaded = [m for m in methods if m in OWN_DRAFTS]
        methods = loaded if loaded and rng.random() < 0.7 else methods
    else:
        _sampling(rng, params)
        _limits(rng, params)
    _reports(rng, params)
    params["speculation"] = _speculation(rng, methods, family, params)
    cancel = None
    if rng.random() < 0.15:
        ways = ["abort", "drop", "task", "close", "shut"] if drive == "async" else ["group", "sample"]
        cancel = rng.choice(ways)
    if drive == "async":
        params["output_kind"] = rng.choice(["cumulative", "delta", "final_only"])
    return Ask(
        prompt,
        SamplingParams(**params),
        priority=rng.choice([0, 0, 0, 1, -1]),
        arrival=rng.choice([0, 0, 0, 1, 2, 5, 12]),
        cancel=cancel,
        cancel_after=rng.choice([0, 0, 1, 3, 7]),
    )


def _sampling(rng: random.Random, params: dict[str, Any]) -> None:
    params["temperature"] = rng.choice([0.0, 0.0, 0.0, 0.5, 1.0, 1.0, 1.6])
    if params["temperature"] and rng.random() < 0.7:
        params["seed"] = rng.randint(0, 2**40)
    if rng.random() < 0.2:
        params["n"] = rng.choice([2, 3])
    if rng.random() < 0.2:
        params["top_p"] = rng.choice([0.3, 0.7, 0.95])
    if rng.random() < 0.2:
        params["top_k"] = rng.choice([1, 2, 5, 100])
    if rng.random() < 0.15:
        params["min_p"] = rng.choice([0.05, 0.3])
    if rng.random() < 0.15:
        params["repetition_penalty"] = rng.choice([0.7, 1.3, 2.0])
    if rng.random() < 0.15:
        params["presence_penalty"] = rng.choice([-1.0, 1.5])
    if rng.random() < 0.15:
        params["frequency_penalty"] = rng.choice([-0.5, 0.8])
    if rng.random() < 0.15:
        ids = rng.sample(range(VOCAB), 3)
        params["logit_bias"] = dict(zip(ids, [2.0, -100.0, rng.choice([0.5, 100.0])], strict=True))
    if rng.random() < 0.1:
        params["allowed_token_ids"] = sorted(rng.sample(range(VOCAB), rng.randint(2, VOCAB - 1)))
    if rng.random() < 0.1:
        params["bad_words"] = rng.sample(["ab", "é", "b c", "a", "1,"], 2)
    if rng.random() < 0.1:
        processor = _halves if rng.random() < 0.7 else Raising(rng.randint(3, 40))
        params["logits_processors"] = [processor]


def _limits(rng: random.Random, params: dict[str, Any]) -> None:
    if rng.random() < 0.2:
        params["structured_outputs"] = rng.choice(GRAMMARS)
    if rng.random() < 0.3:
        params["stop"] = rng.sample(["ab", "a1", ", ", "é", "bca", "cab", "aé", "bb", "1"], rng.randint(1, 3))
        params["include_stop_str_in_output"] = rng.random() < 0.5
    elif rng.random() < 0.1:
        params["detokenize"] = False
    if rng.random() < 0.2:
        params["stop_token_ids"] = rng.sample(range(VOCAB), rng.randint(1, 2))
    if rng.random() < 0.2:
        params["min_tokens"] = rng.randint(0, params["max_tokens"] or 9)
    if rng.random() < 0.1:
        params["skip_special_tokens"] = False


def _reports(rng: random.Random, params: dict[str, Any]) -> None:
    if rng.random() < 0.4:
        params["logprobs"] = rng.choice([0, 1, 3, 5, -1])
    if rng.random() < 0.3:
        params["prompt_logprobs"] = rng.choice([0, 2, 4])


def _speculation(
    rng: random.Random, methods: Sequence[str], family: str, params: dict[str, Any]
) -> dict[str, Any]:
    method = rng.choice(methods)
    out: dict[str, Any] = {"method": method}
    if "structured_outputs" in params and rng.random() < 0.2:
        out["method"] = method = "grammar"
    if params["temperature"] and rng.random() < 0.4:
        out["rule"] = rng.choice(["coupled", "rejection", "block", "typical"])
        if out["rule"] == "coupled" and rng.random() < 0.8:
            params["seed"] = rng.randint(0, 2**40)
    if method in ("none", "grammar"):
        return out
    shape = rng.choice(["own", "own", "chain", "static", "dynamic"])
    trees = method in TREE_METHODS and method not in CHAINS_ONLY.get(family, ())
    if shape == "chain" or (shape != "own" and not trees):
        out["num_speculative_tokens"] = rng.choice([0, 1, 2, 3, 5, 15])
        if method == "medusa":
            out["num_speculative_tokens"] = min(out["num_speculative_tokens"], 3)
    elif shape == "static":
        out["speculative_token_tree"] = TREE[: rng.randint(3, len(TREE))]
    elif shape == "dynamic" and method != "synthetic":
        out |= SHAPES["dynamic"]
    return out


def _halves(token_ids: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
    """A processor that looks at the text."""
    logits = logits.clone()
    logits[::2] *= 0.5 if len(token_ids) % 2 else 0.8
    logits[END] -= 0.3
    return logits


@dataclass(frozen=True)
class Raising:
    """A processor that fails once the text is long enough."""

    length: int

    def __call__(self, token_ids: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
        if len(token_ids) > self.length:
            raise ValueError("long enough")
        return logits
