"""The models of the engine fuzzer: one tiny target with a tokenizer, drafters of every method for it, and the target
itself as a drafter that is always right."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftwise import LoRARequest
from tests.fakes.every_method import Family, K, make_families, make_target
from tests.fakes.lora import save_adapter

TOKENS = ["a", "b", "c", "Ġ", "Ã", "©", ",", "1", "ab", "bc", "Ġa", "<|end|>"]
"""Token ids to texts in the alphabet of byte-level tokenizers: "é" takes two tokens, "ab" can be written in two
ways."""
VOCAB = len(TOKENS)
END = VOCAB - 1
NUM_ADAPTERS = 4
MODEL_LEN = 72
"""Prompt and output of one request, in every engine."""


@dataclass(frozen=True)
class World:
    """``families``: entries of ``speculative_config`` that can be loaded side by side, by the name of the set;
    ``adapters``: by number, of different ranks; 0: none."""

    target: str
    families: dict[str, Family]
    adapters: tuple[LoRARequest | None, ...]


def make_world(root: Path) -> World:
    settings: dict[str, Any] = {"vocab_size": VOCAB, "eos_token_id": END, "bos_token_id": None}
    target = make_target(root, **settings)
    _save_tokenizer(Path(target))
    families = make_families(root, VOCAB, **{**settings, "vocab_size": VOCAB})
    families["oracle"] = [
        {"method": "draft_model", "model": target, "num_speculative_tokens": K},
        {"method": "synthetic", "num_speculative_tokens": K},
    ]
    adapters = (
        LoRARequest(f"adapter{i}", i, save_adapter(root / f"adapter{i}", Path(target), i, rank=i, size=0.3))
        for i in range(1, NUM_ADAPTERS + 1)
    )
    return World(target, families, (None, *adapters))


def _save_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {text: i for i, text in enumerate(TOKENS[:END])}
    merges = [("a", "b"), ("b", "c"), ("Ġ", "a")]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=TOKENS[END])
    assert len(fast) == VOCAB
    fast.save_pretrained(folder)
