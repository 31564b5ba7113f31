"""Functions of one request that run in a thread of the engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from draftwise.errors import RequestError
from draftwise.sampling.params import SamplingParams


class _Contained:
    """A logits processor whose `SystemExit` is an error of its request. In the engine's thread it would end no program,
    but the engine, and with it everybody's requests."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        self._fn = fn
        self.__name__ = getattr(fn, "__name__", repr(fn))

    def __call__(self, token_ids: Any, logits: Any) -> Any:
        try:
            return self._fn(token_ids, logits)
        except Exception:
            raise
        except BaseException as error:
            raise RequestError(
                f"logits processor {self.__name__!r} raised {type(error).__name__}: {error}"
            ) from error


def contained(params: SamplingParams) -> SamplingParams:
    """The parameters, with processors that can only fail their own request."""
    if not params.logits_processors:
        return params
    return params.replace(logits_processors=tuple(map(_Contained, params.logits_processors)))
