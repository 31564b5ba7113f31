"""Recorded or made-up traffic: when requests come, how long they are, and what they share."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from draftwise.errors import ConfigError, shown

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int32]
MOONCAKE_BLOCK = 512
"""Tokens that one of Mooncake's ``hash_ids`` names."""
_MOST_TOKENS = 1 << 24
_MOST_REQUESTS = 100_000_000
"""Made-up requests; more do not fit into the memory of a machine of today, and would take days."""
_DAY = 86_400.0


@dataclass(frozen=True)
class Trace:
    """Requests in the order in which they come.

    ``times_np`` [n]: seconds since the trace began. ``isl_np``, ``osl_np`` [n]: tokens of prompt and output, at
    least 1. ``blocks``: per request the names of its prompt's blocks of `MOONCAKE_BLOCK` tokens, equal names for
    equal text; None: nobody shares anything. ``kinds``: per request a kind of text, see `AcceptanceModel`; None: one
    kind.
    """

    times_np: Floats
    isl_np: Ints
    osl_np: Ints
    blocks: Sequence[Sequence[int]] | None = None
    kinds: Sequence[str] | None = None

    def __post_init__(self) -> None:
        if not len(self.times_np):
            raise ConfigError("trace: it holds no requests")
        if not np.isfinite(self.times_np).all():
            raise ConfigError("trace: a time is not a finite number")

    def __len__(self) -> int:
        return len(self.times_np)

    @property
    def seconds(self) -> float:
        """From the beginning to the last arrival."""
        return float(self.times_np[-1])

    def taken(self, keep_np: npt.NDArray[np.bool_]) -> Trace:
        """The requests for which ``keep_np`` [n] is true."""
        chosen_np = np.flatnonzero(keep_np)
        chosen: list[int] = chosen_np.tolist()
        return Trace(
            self.times_np[chosen_np],
            self.isl_np[chosen_np],
            self.osl_np[chosen_np],
            None if self.blocks is None else [self.blocks[i] for i in chosen],
            None if self.kinds is None else [self.kinds[i] for i in chosen],
        )

    def thinned(self, share: float, seed: int) -> Trace:
        """A random ``share`` of the requests. Raises ConfigError if none is left."""
        if not 0 < share <= 1:
            raise ConfigError(f"sample: expected a share above 0 and up to 1, got {share:g}")
        if share == 1:
            return self
        return self.taken(np.random.default_rng(seed).random(len(self)) < share)

    def first(self, count: int) -> Trace:
        """The first ``count`` requests."""
        return self.taken(np.arange(len(self)) < count)

    def faster(self, factor: float) -> Trace:
        """The same requests, ``factor`` times as many per second. Raises ConfigError."""
        if not (factor > 0 and math.isfinite(factor)):
            raise ConfigError(f"speed of a trace: expected a finite number above 0, got {factor:g}")
        return replace(self, times_np=self.times_np / factor)


def make_trace(times: Iterable[float], isl: Iterable[int], osl: Iterable[int], **more: Any) -> Trace:
    """A trace of plain sequences, sorted. Times from 0 up to a day stay as they are; of others, such as seconds
    since 1970, the first arrival is time 0. Raises ConfigError."""
    times_np = np.fromiter(times, np.float64)
    isl_np, osl_np = np.fromiter(isl, np.int64), np.fromiter(osl, np.int64)
    for name, lengths_np in (("input", isl_np), ("output", osl_np)):
        wrong = np.flatnonzero((lengths_np < 1) | (lengths_np > _MOST_TOKENS))
        if len(wrong):
            raise ConfigError(
                f"trace: request {wrong[0] + 1} has {name} length {lengths_np[wrong[0]]}; expected 1 to {_MOST_TOKENS}"
            )
    if not np.isfinite(times_np).all():
        bad = int(np.flatnonzero(~np.isfinite(times_np))[0])
        raise ConfigError(f"trace: request {bad + 1} comes at {times_np[bad]}: no finite time")
    if len(times_np) and not 0 <= times_np.min() <= _DAY:
        times_np = times_np - times_np.min()
    if len(times_np) and times_np.max() > 1000 * _DAY:
        raise ConfigError(f"trace: it is {times_np.max() / _DAY:.3g} days long; expected at most 1000")
    order = np.argsort(times_np, kind="stable")
    for name in ("blocks", "kinds"):
        if more.get(name) is not None:
            more[name] = [more[name][i] for i in order]
    return Trace(times_np[order], isl_np[order].astype(np.int32), osl_np[order].astype(np.int32), **more)


# ------------------------------------------------------------------------------------------------ files


def read_trace(path: str | Path) -> Trace:
    """Read a trace; its content shows its form.

    - own CSV: a header with ``time`` (seconds), ``isl``, ``osl``, perhaps ``kind``;
    - own JSONL: objects with these names;
    - Mooncake's JSONL: ``timestamp`` (milliseconds), ``input_length``, ``output_length``, ``hash_ids``;
    - Azure's CSV: ``TIMESTAMP`` (a date), ``ContextTokens``, ``GeneratedTokens``.

    Raises:
        ConfigError: no file, another form, no request, or a value that cannot be; the line is named.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"trace: {path} cannot be read: {error}") from None
    lines = text.split("\n")
    first = next((line for line in lines if line.strip()), "")
    if not first:
        raise ConfigError(f"trace: {path} is empty")
    try:
        return _json_lines(lines) if first.lstrip().startswith("{") else _table(lines)
    except csv.Error as error:
        raise ConfigError(f"{path}: trace: {error}") from None
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


Field = tuple[tuple[str, ...], Callable[[Any], float]]


def _date(value: Any) -> float:
    """Seconds of "2023-11-16 18:15:46.6805900": Python reads six digits of a second, Azure writes seven."""
    head, dot, fraction = str(value).strip().partition(".")
    moment = datetime.fromisoformat(head).replace(tzinfo=None)
    return (moment - datetime(2000, 1, 1)).total_seconds() + float(f"0.{fraction or 0}" if dot else 0)


_TIMES: tuple[Field, ...] = (
    (("time", "arrival", "t"), float),
    (("timestamp",), lambda value: float(value) / 1000),
    (("TIMESTAMP",), _date),
)
_ISL = ("isl", "input_length", "ContextTokens", "prompt_tokens")
_OSL = ("osl", "output_length", "GeneratedTokens", "output_tokens")


def _form(names: Sequence[str]) -> tuple[str, Callable[[Any], float], str, str]:
    found = [(name, read) for keys, read in _TIMES for name in keys if name in names]
    isl, osl = [n for n in _ISL if n in names], [n for n in _OSL if n in names]
    if not (found and isl and osl):
        raise ConfigError(
            "trace: expected columns time, isl, osl (or Mooncake's or Azure's names), found "
            + (", ".join(names)[:120] or "none")
        )
    return found[0][0], found[0][1], isl[0], osl[0]


def _table(lines: Sequence[str]) -> Trace:
    reader = csv.DictReader(lines)
    return _rows(reader.fieldnames or (), ((reader.line_num, row) for row in reader))


def _json_lines(lines: Sequence[str]) -> Trace:
    rows: list[tuple[int, Mapping[str, Any]]] = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                row = None
            if not isinstance(row, dict):
                raise ConfigError(f"trace: line {number} is not a JSON object")
            rows.append((number, row))
    return _rows(tuple(rows[0][1]), rows)


def _rows(names: Sequence[str], rows: Iterable[tuple[int, Mapping[str, Any]]]) -> Trace:
    when, read, isl_name, osl_name = _form(names)
    times, isl, osl = [], [], []
    blocks: list[Sequence[int]] = []
    kinds: list[str] = []
    for number, row in rows:
        try:
            times.append(read(row[when]))
            isl.append(_count(row[isl_name]))
            osl.append(_count(row[osl_name]))
            if "hash_ids" in names:
                blocks.append([int(name) for name in row["hash_ids"]])
            if "kind" in names:
                kinds.append(str(row["kind"]))
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise ConfigError(f"trace: line {number}: {type(error).__name__}: {error}") from None
    if not times:
        raise ConfigError("trace: it holds no requests")
    dated = when == "TIMESTAMP"
    start = min(times) if dated else 0.0
    return make_trace([t - start for t in times], isl, osl, blocks=blocks or None, kinds=kinds or None)


def _count(value: Any) -> int:
    number = float(value)
    if not number.is_integer():
        raise ValueError(f"expected a number of tokens, got {shown(value)}")
    return max(int(number), 1) if number >= 0 else int(number)  # empty outputs are in published traces


# --------------------------------------------------------------------------------------------- made up


SHAPES: Mapping[str, Callable[[Floats], Floats]] = {
    "flat": lambda x: np.ones_like(x),
    "day": lambda x: 1 - 0.75 * np.cos(2 * np.pi * x),
    "tenfold": lambda x: np.where(x < 0.4, 0.25, np.where(x < 0.6, 0.25 + 11.25 * (x - 0.4), 2.5)),
    "peak": lambda x: 0.4 + 4.0 * np.exp(-(((x - 0.5) / 0.15) ** 2)) / 1.77,
}
"""Rate over the trace's length (0 to 1), in multiples of the mean: constant; low at night and high at noon; ten
times as high at the end as at the beginning; one peak."""


def poisson_trace(
    rate: float,
    seconds: float,
    isl: int,
    osl: int,
    *,
    seed: int = 0,
    shape: str = "flat",
    spread: float = 0.0,
) -> Trace:
    """Requests at random times, ``rate`` per second on average, whose rate follows a shape of `SHAPES`.

    ``spread``: standard deviation of the logarithm of lengths, whose means are ``isl`` and ``osl``; 0: all the same.

    Raises:
        ConfigError: a number that cannot be, an unknown shape, or so few seconds that nobody comes.
    """
    if not (rate > 0 and seconds > 0 and math.isfinite(rate * seconds)):
        raise ConfigError(f"load: expected a rate and seconds above 0, got {rate:g} and {seconds:g}")
    if not (1 <= isl <= _MOST_TOKENS and 1 <= osl <= _MOST_TOKENS and 0 <= spread <= 3):
        raise ConfigError(
            f"load: expected lengths of at least 1 and a spread of 0 to 3, got {isl}, {osl}, {spread:g}"
        )
    if shape not in SHAPES:
        raise ConfigError(f"load: unknown shape {shape!r} (known: {', '.join(SHAPES)})")
    rng = np.random.default_rng(seed)
    # A Poisson process in the time in which its rate is 1, taken back to the clock's time.
    grid_np = np.linspace(0.0, 1.0, 2049)
    passed_np = np.concatenate(
        ([0.0], np.cumsum(np.maximum(SHAPES[shape]((grid_np[1:] + grid_np[:-1]) / 2), 0.0)))
    )
    passed_np *= rate * seconds / passed_np[-1]
    if passed_np[-1] > _MOST_REQUESTS:
        raise ConfigError(
            f"load: {rate:g} requests/s in {seconds:g} s are more than {_MOST_REQUESTS:,} requests; take a sample"
        )
    count = int(rng.poisson(passed_np[-1]))
    if count == 0:
        raise ConfigError(f"load: no request arrives at {rate:g} requests/s in {seconds:g} s")
    times_np = np.interp(np.sort(rng.random(count)) * passed_np[-1], passed_np, grid_np * seconds)
    lengths = [
        np.clip(np.rint(mean * np.exp(spread * rng.standard_normal(count) - spread**2 / 2)), 1, _MOST_TOKENS)
        for mean in (isl, osl)
    ]
    return Trace(times_np, lengths[0].astype(np.int32), lengths[1].astype(np.int32))
