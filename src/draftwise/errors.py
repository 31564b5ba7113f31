"""The exceptions users see. Everything the package raises on purpose derives from `DraftwiseError`."""

from __future__ import annotations

import copyreg
import difflib
import reprlib
from collections.abc import Iterable
from typing import Any


class DraftwiseError(Exception):
    """Base of all exceptions raised on purpose by Draftwise."""


class ConfigError(DraftwiseError, ValueError):
    """An engine or speculation setting is unknown, out of range or contradicts another one."""


class ModelLoadError(DraftwiseError, ValueError):
    """A checkpoint cannot be loaded: not a model, unsupported, truncated, or tensors do not fit."""


class RequestError(DraftwiseError, ValueError):
    """One request is invalid or can never be served; other requests are not affected."""


class LimitError(RequestError):
    """A request asks for more than `RequestLimits` allows. ``limit``: the option that would have to be raised;
    ``field``: the field of the request that is too large ("structured_outputs" of "structured_outputs: choice")."""

    def __init__(self, field: str, given: str, limit: str, allowed: float, more: str = "") -> None:
        """Example: ``LimitError("stop", "65 strings", "max_stop_strings", 64)`` says "stop: 65 strings; at most 64
        (max_stop_strings)"."""
        super().__init__(f"{field}: {given}; at most {allowed:.15g} ({limit}){more}")
        self.field = field.partition(":")[0]
        self.limit = limit

    def __reduce__(self) -> tuple[Any, ...]:
        """Made anew from its message: an exception that cannot be unpickled breaks a whole pool of processes."""
        return copyreg.__newobj__, (type(self), *self.args), self.__dict__  # type: ignore[attr-defined]


class ContextLengthError(RequestError):
    """A prompt is too long for the model, or a request for the whole K/V cache."""


class ParametersError(RequestError):
    """A request fails by its own parameters, perhaps while it runs: they exclude every token, or its grammar cannot be
    followed."""


class EngineDeadError(DraftwiseError):
    """The engine stopped after an internal failure, or was closed; no further request is accepted."""


class ReplicaLostError(EngineDeadError):
    """The replica that served a request is gone, others are not: the same request may be sent again."""


def suggest(name: str, valid: Iterable[str], least: float = 0.6) -> str:
    """Return ``"; did you mean 'x'?"`` for the closest valid name, or an empty string if none is near
    (``least``: how alike the two must be, from 0 to 1).

    >>> suggest("num_speculative_token", ["method", "num_speculative_tokens"])
    "; did you mean 'num_speculative_tokens'?"
    """
    if len(name) > 100:  # no misspelling, and the search takes long
        return ""
    close = difflib.get_close_matches(name, list(valid), n=1, cutoff=least)
    return f"; did you mean {close[0]!r}?" if close else ""


def install(extra: str) -> str:
    """How the packages of an extra are installed, as a hint behind an error. The package is not published: a name of an
    index would be nobody's, or somebody else's.

    >>> install("serve")
    "run pip install '.[serve]' in the folder of Draftwise's sources"
    """
    return f"run pip install '.[{extra}]' in the folder of Draftwise's sources"


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxlong = _SHORT.maxother = 80
_SHORT.maxlist = _SHORT.maxtuple = _SHORT.maxdict = 8


def shown(value: object) -> str:
    """``repr`` of what a user gave, for a message: short, however large it is.

    >>> shown("x" * 1000)[:50], shown([1] * 1000), shown(10**5000)
    ("'xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx...xxxxxxxxxx", '[1, 1, 1, 1, 1, 1, 1, 1, ...]', 'an integer of 16610 bits')
    """
    if isinstance(value, int) and value.bit_length() > 256:
        return f"an integer of {value.bit_length()} bits"
    try:
        text = _SHORT.repr(value)
    except ValueError:  # an integer in it has more digits than Python prints
        return f"a {type(value).__name__}"
    return text if len(text) <= 200 else text[:197] + "..."
