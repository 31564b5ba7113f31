"""Training text: files of plain text, JSON lines, or chats, as token ids."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftwise.errors import ConfigError

SUFFIXES = (".txt", ".py", ".md", ".jsonl", ".json")


@dataclass(frozen=True, slots=True)
class Document:
    """One text. What the target would be asked for (an answer) counts; what it is given (a prompt) need not."""

    parts: tuple[tuple[str, bool], ...]
    """Pieces of text, each with whether it counts; of a chat: () and `messages`."""
    source: str
    """File and line, for messages."""
    messages: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class Tokens:
    """Token ids, and whether each token counts as one to be predicted."""

    ids: list[int]
    counted: list[bool]


def read_documents(files: Sequence[Path]) -> Iterator[Document]:
    """Yield the documents of all files in order.

    `.jsonl` holds one object per line: `{"text": ..}`, `{"prompt": .., "completion": ..}` or `{"messages": [..]}`
    (also `conversations` with `from` and `value`). `.json` holds a list of such objects. Anything else is
    one document of plain text.

    Raises:
        ConfigError: a file that is missing, empty or not UTF-8, or an object of another form; file and line are named.
    """
    for file in files:
        try:
            text = file.read_text(encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--data {file}: {error.strerror or error}") from error
        except UnicodeDecodeError as error:
            raise ConfigError(f"--data {file}: not UTF-8 text: {error}") from error
        if not text.strip():
            raise ConfigError(f"--data {file}: the file is empty")
        if file.suffix == ".jsonl":
            for number, line in enumerate(text.split("\n"), 1):
                if line.strip():
                    yield _from_object(_parse(line, f"{file}:{number}"), f"{file}:{number}")
        elif file.suffix == ".json":
            whole = _parse(text, str(file))
            for number, item in enumerate(whole if isinstance(whole, list) else [whole], 1):
                yield _from_object(item, f"{file}, item {number}")
        else:
            yield Document(((text, True),), str(file))


def _parse(text: str, source: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"--data {source}: not JSON: {error}") from error


def _from_object(item: Any, source: str) -> Document:
    if not isinstance(item, dict):
        raise ConfigError(f"--data {source}: expected an object, not {type(item).__name__}")
    if isinstance(item.get("text"), str):
        return Document(((item["text"], True),), source)
    if isinstance(item.get("prompt"), str) and isinstance(item.get("completion"), str):
        return Document(((item["prompt"], False), (item["completion"], True)), source)
    messages = item.get("messages")
    if messages is None and isinstance(item.get("conversations"), list):
        roles = {"human": "user", "gpt": "assistant"}
        messages = [
            {"role": roles.get(str(m.get("from")), m.get("from")), "content": m.get("value")}
            for m in item["conversations"]
            if isinstance(m, dict)
        ]
    if isinstance(messages, list) and messages and all(_is_message(m) for m in messages):
        return Document((), source, tuple(messages))
    raise ConfigError(
        f"--data {source}: expected text, prompt and completion, or messages; found {sorted(map(str, item))[:6]}"
    )


def _is_message(message: Any) -> bool:
    return (
        isinstance(message, dict)
        and isinstance(message.get("role"), str)
        and isinstance(message.get("content"), str)
    )


def tokenize(document: Document, tokenizer: Any) -> Tokens:
    """Turn a document into tokens, as the target would see it.

    A chat goes through the tokenizer's chat template, answer by answer: what an assistant's message adds to the
    tokens before it counts. Special tokens are added once, in front, where the tokenizer does so.

    Args:
        tokenizer: a Transformers tokenizer.

    Raises:
        ConfigError: a chat, and the tokenizer has no chat template, or one that rewrites earlier messages.
    """
    if document.messages:
        return _tokenize_chat(document, tokenizer)
    ids: list[int] = []
    counted: list[bool] = []
    for text, counts in document.parts:
        piece = list(tokenizer(text, add_special_tokens=not ids)["input_ids"])
        ids += piece
        counted += [counts] * len(piece)
    return Tokens(ids, counted)


def _tokenize_chat(document: Document, tokenizer: Any) -> Tokens:
    if not getattr(tokenizer, "chat_template", None):
        raise ConfigError(
            f"--data {document.source}: a chat, but the target's tokenizer has no chat template"
        )
    ids: list[int] = []
    counted: list[bool] = []
    before = ""
    messages = [dict(m) for m in document.messages]
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        for end, counts in ((i, False), (i + 1, True)):
            text = tokenizer.apply_chat_template(
                messages[:end], tokenize=False, add_generation_prompt=not counts
            )
            now = list(tokenizer(text, add_special_tokens=False)["input_ids"])
            if now[: len(ids)] != ids and text.startswith(before):
                # A token reaches over the boundary, as where an answer's line end joins the question's last sign. An
                # engine reads the question alone, and so do we.
                now = ids + list(tokenizer(text[len(before) :], add_special_tokens=False)["input_ids"])
            before = text
            if now[: len(ids)] != ids:
                # a template that drops earlier reasoning, say: what came before cannot be continued
                if not counts:
                    counted = [False] * len(now)
                    ids = now
                    continue
                raise ConfigError(
                    f"--data {document.source}: the chat template rewrites earlier text at message {i + 1}"
                )
            counted += [counts] * (len(now) - len(ids))
            ids = now
    return Tokens(ids, counted)
