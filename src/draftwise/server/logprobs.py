"""Log-probabilities in the two forms of OpenAI's interface."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from draftwise.engine.outputs import Logprob, LogprobsDict

FLOOR = -9999.0
"""Stands for -infinity, which JSON cannot say."""


def _value(entry: Logprob) -> float:
    return max(entry.logprob, FLOOR)


def _text(token: int, entry: Logprob, as_ids: bool) -> str:
    if as_ids:
        return f"token_id:{token}"
    return entry.decoded_token if entry.decoded_token is not None else f"token_id:{token}"


def _top(token: int, position: LogprobsDict, count: int) -> list[tuple[int, Logprob]]:
    """The ``count`` most likely tokens by rank and, if it is none of them, ``token`` behind them; with a ``count`` of
    0 nothing."""
    if not count:
        return []
    ranked = [(t, e) for t, e in position.items() if e.rank is not None and e.rank <= count]
    ranked.sort(key=lambda item: item[1].rank or 0)
    return ranked if any(t == token for t, _ in ranked) else [*ranked, (token, position[token])]


def chat_logprobs(
    token_ids: Sequence[int],
    positions: Sequence[LogprobsDict],
    count: int,
    *,
    bytes_of: Callable[[int], bytes],
    as_ids: bool = False,
) -> dict[str, Any]:
    """``{"content": [{token, logprob, bytes, top_logprobs}]}``. ``as_ids``: tokens are written "token_id:ID".

    ``bytes_of``: the bytes of a token whose text does not say them. Clients join the bytes of several tokens that are
    one character."""

    def one(token: int, entry: Logprob) -> dict[str, Any]:
        text = _text(token, entry, as_ids)
        data = bytes_of(token) if "\ufffd" in text else text.encode()
        return {"token": text, "logprob": _value(entry), "bytes": list(data)}

    content = []
    for token, position in zip(token_ids, positions, strict=True):
        tops = [one(t, e) for t, e in _top(token, position, count)]
        content.append({**one(token, position[token]), "top_logprobs": tops})
    return {"content": content, "refusal": None}


class CompletionLogprobs:
    """``{tokens, token_logprobs, top_logprobs, text_offset}`` of one choice, possibly in several pieces."""

    def __init__(self, count: int, *, as_ids: bool = False) -> None:
        self._count = count
        self._as_ids = as_ids
        self._offset = 0

    def piece(self, tokens: Iterable[tuple[int, LogprobsDict | None, str]]) -> dict[str, list[Any]]:
        """The next tokens: (id, log-probabilities or None for a prompt's first token, text)."""
        out: dict[str, list[Any]] = {
            "tokens": [],
            "token_logprobs": [],
            "top_logprobs": [],
            "text_offset": [],
        }
        for token, position, text in tokens:
            if self._as_ids:
                text = f"token_id:{token}"
            out["tokens"].append(text)
            out["text_offset"].append(self._offset)
            self._offset += len(text)
            if position is None:
                out["token_logprobs"].append(None)
                out["top_logprobs"].append(None)
                continue
            out["token_logprobs"].append(_value(position[token]))
            top: dict[str, float] = {}
            for t, e in _top(token, position, self._count):
                top.setdefault(
                    _text(t, e, self._as_ids), _value(e)
                )  # of tokens with the same text the likelier one
            out["top_logprobs"].append(top or {text: _value(position[token])})
        return out

    def generated(self, token_ids: Sequence[int], positions: Sequence[LogprobsDict]) -> dict[str, list[Any]]:
        """Output tokens."""
        return self.piece((t, p, _text(t, p[t], False)) for t, p in zip(token_ids, positions, strict=True))


def prompt_logprobs(positions: Sequence[LogprobsDict | None]) -> list[dict[str, Any] | None]:
    """vLLM's form: per prompt token {token id: {logprob, rank, decoded_token}}."""
    return [
        None
        if position is None
        else {
            str(token): {"logprob": _value(e), "rank": e.rank, "decoded_token": e.decoded_token}
            for token, e in position.items()
        }
        for position in positions
    ]
