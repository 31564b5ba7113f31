"""Prompts from a JSONL file of the user's own: the forms of Spec-Bench, MT-Bench, GSM8K, HumanEval and others."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from draftwise.bench.workloads import Workload
from draftwise.encoding import encode_text
from draftwise.errors import ConfigError

_QUESTIONS = ("question", "instruction", "input", "text")
"""Fields of a line that may hold a question; the first present one counts."""
_MOST = 100_000  # lines


def read_prompt_file(
    path: Path, tokenizer: Any, room: int, per_category: int | None = None, seed: int = 0
) -> tuple[list[Workload], int]:
    """(a workload for each category, in the order in which they come; how many prompts have ``room`` tokens or more).

    A line is an object. ``turns`` (Spec-Bench, MT-Bench: the first turn), ``question`` (GSM8K), ``instruction``,
    ``messages`` or ``conversations`` are questions: they go through the tokenizer's chat template where there is one.
    ``prompt`` (HumanEval) is continued as it stands. ``category`` names the kind of a line; without one it is the
    file's name. ``per_category``: at most so many prompts of each, drawn by ``seed``.

    Raises ConfigError that names the line.
    """
    found: dict[str, list[tuple[int, ...]]] = {}
    left_out = 0
    try:
        lines = path.read_text(encoding="utf-8").removesuffix("\n").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--prompts {path}: {error}") from None
    if len(lines) > _MOST:
        raise ConfigError(f"--prompts {path}: {len(lines)} lines; at most {_MOST}")
    entries: dict[str, list[tuple[int, Mapping[str, Any]]]] = {}
    for number, line in enumerate(lines, 1):
        if line.strip():
            entry = _entry(path, number, line)
            entries.setdefault(_category(entry, path), []).append((number, entry))
    if not entries:
        raise ConfigError(f"--prompts {path}: there is no prompt in it")
    for category, all_of_it in entries.items():
        chosen = all_of_it
        if per_category is not None and per_category < len(all_of_it):
            chosen = sorted(random.Random(seed).sample(all_of_it, per_category), key=lambda pair: pair[0])
        for number, entry in chosen:
            ids = _ids(path, number, entry, tokenizer)
            if len(ids) < room:
                found.setdefault(category, []).append(ids)
            else:
                left_out += 1
    if not found:
        raise ConfigError(f"--prompts {path}: no prompt is shorter than {room} tokens")
    return [Workload(name, tuple(prompts)) for name, prompts in found.items()], left_out


def _entry(path: Path, number: int, line: str) -> Mapping[str, Any]:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        entry = None
    if not isinstance(entry, dict):
        raise ConfigError(f"--prompts {path}: line {number} is not a JSON object (the file must be JSONL)")
    return entry


def _category(entry: Mapping[str, Any], path: Path) -> str:
    category = entry.get("category")
    return category if isinstance(category, str) and category else path.stem


def _ids(path: Path, number: int, entry: Mapping[str, Any], tokenizer: Any) -> tuple[int, ...]:
    prompt, where = entry.get("prompt"), f"--prompts {path}: line {number}"
    messages = _messages(entry)
    if messages is None and not (isinstance(prompt, str) and prompt):
        names = ", ".join(("turns", *_QUESTIONS, "messages", "conversations", "prompt"))
        raise ConfigError(f"{where} has no prompt; expected one of {names}")
    if messages is None:
        return tuple(encode_text(tokenizer, str(prompt), where))
    if getattr(tokenizer, "chat_template", None):
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        return tuple(encode_text(tokenizer, text, where, False))
    return tuple(encode_text(tokenizer, messages[-1]["content"], where))


def _messages(entry: Mapping[str, Any]) -> list[dict[str, str]] | None:
    """The question as chat messages, up to the first that the model has to answer; None: there is none."""
    turns = entry.get("turns")
    if isinstance(turns, list) and turns and isinstance(turns[0], str):
        return [{"role": "user", "content": turns[0]}]
    given = entry.get("messages", entry.get("conversations"))
    if isinstance(given, list):
        return _first_question(given)
    text = next(
        (entry[name] for name in _QUESTIONS if isinstance(entry.get(name), str) and entry[name]), None
    )
    return None if text is None or "prompt" in entry else [{"role": "user", "content": text}]


def _first_question(given: list[Any]) -> list[dict[str, str]] | None:
    """Example: system, user, assistant, user gives system, user. ShareGPT's names are ``from`` and ``value``."""
    out: list[dict[str, str]] = []
    for message in given:
        if not isinstance(message, Mapping):
            return None
        role, content = message.get("role", message.get("from")), message.get("content", message.get("value"))
        role = "user" if role == "human" else role
        if role not in ("system", "user") or not isinstance(content, str) or not content:
            break
        out.append({"role": role, "content": content})
    return out if any(message["role"] == "user" for message in out) else None
