"""One tiny target and a drafter of every method for it, for tests that go through all of them.

The vocabulary has eight tokens, so that even random heads are right now and then, and trees are accepted along many
paths.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from tests.fakes.block import BlockShape, save_block
from tests.fakes.block import random_weights as random_block
from tests.fakes.heads import HeadShape, random_weights, save_head
from tests.fakes.medusa import random_heads, save_medusa
from tests.fakes.mtp import MtpShape, random_layers, save_mtp
from tests.fakes.tiny import save_llama

VOCAB = 8
TREE = [[0], [1], [3], [0, 0], [0, 1], [1, 0], [0, 0, 0], [1, 0, 0]]
"""Skips a rank: what is drawn without replacement has to be drawn in between."""
SHAPES: dict[str, dict[str, Any]] = {
    "chain": {"num_speculative_tokens": 3},
    "static": {"speculative_token_tree": TREE},
    "dynamic": {"speculative_dynamic_tree": {"top_k": 3, "depth": 3}, "num_speculative_tokens": 8},
}
K = 3


Family = list[dict[str, Any]]
"""Entries of ``speculative_config`` that are loaded side by side: one of each method."""


def make_target(root: Path, **settings: Any) -> str:
    """Three layers: enough for EAGLE-3's features and for self-speculation. ``settings``: of its config, other than
    those here."""
    return save_llama(root / "target", seed=1, **(_SETTINGS | settings))


_SETTINGS: dict[str, Any] = {
    "vocab_size": VOCAB,
    "eos_token_id": None,
    "initializer_range": 0.35,
    "num_hidden_layers": 3,
}


def make_families(root: Path, vocab: int = VOCAB, **settings: Any) -> dict[str, Family]:
    """Two sets of drafters for `make_target` with these ``settings``: the methods, and the other forms that some of
    them have."""
    draft = save_llama(root / "draft", seed=1, noise=0.05, **(_SETTINGS | {"vocab_size": vocab} | settings))
    eagle = HeadShape("eagle", 32, 32, vocab)
    eagle3 = HeadShape("eagle3", 32, 32, vocab, feature_layers=(0, 1, 2), draft_vocab=vocab - 2)
    masked = HeadShape("eagle3", 32, 32, vocab, feature_layers=(0, 1, 2), mask_token=vocab - 1)
    one, three = MtpShape("deepseek", vocab=vocab), MtpShape("mimo", vocab=vocab, layers=3)

    blocks = {"vocab": vocab, "target_layers": (0, 2), "num_target_layers": 3, "mask": vocab - 1}
    dflash = BlockShape(**blocks, windows=(None, 8), own=True, draft_vocab=vocab - 2)
    dspark = BlockShape("deepspec", **blocks, from_root=True, markov="rnn", own=True)

    def block(name: str, shape: BlockShape) -> str:
        return save_block(root / name, shape, random_block(shape, seed=4, scale=0.15))

    def head(name: str, shape: HeadShape) -> str:
        return save_head(root / name, shape, random_weights(shape, seed=2, scale=0.15))

    def layers(name: str, shape: MtpShape) -> str:
        return save_mtp(root / name, shape, random_layers(shape, seed=3, scale=0.15), 3)

    inner = {"method": "draft_model", "model": draft, "num_speculative_tokens": K}
    methods: Family = [
        inner,
        {"method": "eagle", "model": head("eagle", eagle), "num_speculative_tokens": K},
        {"method": "eagle3", "model": head("eagle3", eagle3), "num_speculative_tokens": K},
        {"method": "mtp", "model": layers("mtp", one), "num_speculative_tokens": K},
        {"method": "dflash", "model": block("dflash", dflash), "num_speculative_tokens": K},
        {"method": "medusa", "model": save_medusa(root / "medusa", random_heads(32, vocab), 3)},
        {"method": "early_exit", "draft_num_layers": 2, "num_speculative_tokens": K},
        {"method": "hybrid", "hybrid_drafter": inner, "hybrid_min_match": 3, "num_speculative_tokens": 6},
        {"method": "ngram", "prompt_lookup_min": 1, "num_speculative_tokens": K},
        {"method": "suffix", "num_speculative_tokens": 6, "suffix_decoding_min_token_prob": 0.05},
        {"method": "synthetic", "num_speculative_tokens": K},
    ]
    parallel = root / "pard"
    shutil.copytree(draft, parallel)
    config = json.loads((parallel / "config.json").read_text())
    (parallel / "config.json").write_text(json.dumps(config | {"pard_token": vocab - 1}))
    forms: Family = [
        {
            "method": "draft_model",
            "model": str(parallel),
            "parallel_drafting": True,
            "num_speculative_tokens": K,
        },
        {
            "method": "eagle3",
            "model": head("masked", masked),
            "parallel_drafting": True,
            "num_speculative_tokens": K,
        },
        {"method": "mtp", "model": layers("mtp3", three), "num_speculative_tokens": K},
        {"method": "dflash", "model": block("dspark", dspark), "num_speculative_tokens": K},
    ]
    return {"methods": methods, "other forms": forms}


_TREES = ["chain", "static", "dynamic"]
CASES: list[tuple[str, str, str]] = [
    *(
        ("methods", method, shape)
        for method in (
            "draft_model", "eagle", "eagle3", "mtp", "medusa", "dflash", "early_exit", "hybrid", "suffix",
        )
        for shape in _TREES
    ),
    ("methods", "ngram", "chain"),
    ("methods", "synthetic", "chain"),
    ("methods", "synthetic", "static"),
    ("other forms", "draft_model", "chain"),  # PARD
    ("other forms", "eagle3", "chain"),  # P-EAGLE
    *(("other forms", "mtp", shape) for shape in _TREES),  # three layers that take turns
    *(("other forms", "dflash", shape) for shape in _TREES),  # DSpark
]  # fmt: skip
"""(family, method, shape) of all that can be drafted."""


def case_id(case: tuple[str, str, str]) -> str:
    family, method, shape = case
    names = {"draft_model": "pard", "eagle3": "p-eagle", "mtp": "mtp-3-layers", "dflash": "dspark"}
    return f"{names[method] if family == 'other forms' else method}-{shape}"
