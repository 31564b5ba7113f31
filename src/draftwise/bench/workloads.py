"""Prompts to measure with. The code comes from files of Python's standard library that no embedded model has seen."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from draftwise.errors import ConfigError

WORKLOADS = {
    "code": "continue held-out source code",
    "edit": "repeat a piece of code with one name changed",
    "copy": "repeat a piece of code as it is",
    "random": "continue random tokens",
}


@dataclass(frozen=True, slots=True)
class Workload:
    """Prompts of one kind, as token ids, all of about the same length."""

    name: str
    prompts: tuple[tuple[int, ...], ...]


def code_prompts(tokenizer: Any, count: int, tokens: int, seed: int = 0) -> tuple[tuple[int, ...], ...]:
    """``count`` beginnings of definitions in held-out files, ``tokens`` tokens each.

    Raises:
        ConfigError: the library of this Python does not hold as many (for example, it has no sources).
    """
    from draftwise.train.demo_data import heldout_prompts

    found = heldout_prompts(tokenizer, count, tokens, seed)
    if len(found) < count:
        raise ConfigError(
            f"{count} prompts of {tokens} tokens asked for, but the held-out files of this Python's standard library "
            f"hold {len(found)}"
        )
    return tuple(tuple(prompt.token_ids) for prompt in found)


def make_workload(name: str, tokenizer: Any, count: int, tokens: int, seed: int = 0) -> Workload:
    """A workload by name: see `WORKLOADS`. ``tokens``: length of a prompt, at least 16.

    Raises:
        ConfigError: unknown name, or not enough source code.
    """
    if name == "code":
        return Workload(name, code_prompts(tokenizer, count, tokens, seed))
    if name in ("copy", "edit"):
        # [piece] [separator] [first tokens of the piece]: the rest of the piece is there to be copied.
        lead = max(4, tokens // 8)
        pieces = code_prompts(tokenizer, count, tokens - lead - 4, seed)
        separator = _encode(tokenizer, "\n\n\n")
        prompts = []
        for piece in pieces:
            again = _renamed(tokenizer, piece) if name == "edit" else piece
            prompts.append((*piece, *separator, *again[:lead]))
        return Workload(name, tuple(prompts))
    if name == "random":
        rng = random.Random(seed)
        size = len(tokenizer)
        return Workload(name, tuple(tuple(rng.randrange(size) for _ in range(tokens)) for _ in range(count)))
    raise ConfigError(f"unknown workload {name!r}; there are {', '.join(WORKLOADS)}")


def _encode(tokenizer: Any, text: str) -> tuple[int, ...]:
    return tuple(tokenizer.encode(text, add_special_tokens=False))


def _renamed(tokenizer: Any, piece: Sequence[int]) -> tuple[int, ...]:
    """The piece with the name it defines changed: "def load(..." -> "def new_load(..."."""
    text = tokenizer.decode(list(piece))
    for keyword in ("def ", "class "):
        if keyword in text:
            return _encode(tokenizer, text.replace(keyword, keyword + "new_", 1))
    return tuple(piece)
