"""The file that `draftwise profile` writes: what was measured of one model on one machine. Times and acceptance
apart."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from draftwise.adapt.performance import PerformanceModel
from draftwise.errors import ConfigError
from draftwise.plan.acceptance import ANY_KIND, AcceptanceCounts, AcceptanceModel, Chances
from draftwise.plan.samples import REST_PARTS, PromptSample, RestSample, Setting, StepSample
from draftwise.plan.times import Measured

FORMAT, VERSION = "draftwise-profile", 3
_MOST = 1 << 48
"""Counts and sizes beyond this value are those of a damaged file."""
_FEW_STEPS = 48
"""Steps below which nothing is said of a length of its own."""


@dataclass(slots=True)
class Profile:
    """``machine``, ``model``: what it was measured of. ``accepted``: kind of text -> method -> name of a length ->
    counts (`length_name`). ``left``: points that there was no time for."""

    machine: Mapping[str, Any]
    model: str
    settings: dict[str, Setting] = field(default_factory=dict)
    accepted: dict[str, dict[str, dict[str, AcceptanceCounts]]] = field(default_factory=dict)
    left: int = 0
    seconds: float = 0.0

    # --------------------------------------------------------------------------------------- what it says

    def setting(self, weights: str | None = None) -> Setting:
        """By format of weights; None: the only or first one. Raises ConfigError."""
        if not self.settings:
            raise ConfigError("profile: nothing was measured yet")
        if weights is None:
            return next(iter(self.settings.values()))
        if weights not in self.settings:
            raise ConfigError(f"profile: {weights!r} was not measured (there are {', '.join(self.settings)})")
        return self.settings[weights]

    def times(self, weights: str | None = None) -> Measured:
        """The performance model that was measured. Raises ConfigError if there is too little."""
        setting = self.setting(weights)
        return measured_times(setting)

    @property
    def tells(self) -> bool:
        """Whether enough was measured for `times`, of every format of weights that was begun."""
        found = self.settings.values()
        return bool(found) and all(s.prefill and any(x.method == "none" for x in s.steps) for s in found)

    def acceptance(self) -> AcceptanceModel:
        """What is proposed and accepted; where nothing was, no method is known."""
        rates: dict[str, dict[str, Sequence[float]]] = {ANY_KIND: {}}
        offers: dict[str, dict[str, Sequence[float]]] = {ANY_KIND: {}}
        contexts: dict[str, dict[str, Sequence[Chances]]] = {ANY_KIND: {}}

        def keep(kind: str, method: str, parts: Sequence[AcceptanceCounts]) -> None:
            whole = _merged(parts)
            chances = whole.chances()
            if chances is None or not whole.tried:  # a method that never proposed anything is not known
                return
            rates.setdefault(kind, {})[method] = chances.rates
            offers.setdefault(kind, {})[method] = chances.offers
            found = [c for part in parts if (c := part.chances()) is not None and part.steps >= _FEW_STEPS]
            if len(found) > 1:
                contexts.setdefault(kind, {})[method] = found

        lengths: dict[str, dict[str, AcceptanceCounts]] = {}
        for kind, methods in self.accepted.items():
            for method, parts in methods.items():
                keep(kind, method, list(parts.values()))
                for name, counts in parts.items():
                    lengths.setdefault(method, {}).setdefault(name, AcceptanceCounts()).merge(counts)
        for method, parts in lengths.items():
            keep(ANY_KIND, method, list(parts.values()))
        return AcceptanceModel(rates, offers, contexts)

    # --------------------------------------------------------------------------------------------- files

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "format": FORMAT,
            "version": VERSION,
            "machine": dict(self.machine),
            "model": self.model,
            "seconds": self.seconds,
            "left": self.left,
            "settings": {name: asdict(setting) for name, setting in self.settings.items()},
            "accepted": {
                kind: {m: {name: asdict(c) for name, c in parts.items()} for m, parts in methods.items()}
                for kind, methods in self.accepted.items()
            },
        }

    def save(self, path: Path) -> None:
        """Write it whole or not at all. Raises ConfigError."""
        part = path.with_name(path.name + ".part")
        try:
            part.write_text(json.dumps(self.as_dict(), indent=1) + "\n", encoding="utf-8")
            os.replace(part, path)
        except OSError as error:
            raise ConfigError(f"profile: {path} cannot be written: {error.strerror}") from None

    @classmethod
    def load(cls, path: Path) -> Profile:
        """Read one. Raises ConfigError: no file, no profile, another version, or numbers that are none."""
        try:
            value = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise ConfigError(f"profile: {path} cannot be read: {error}") from None
        if not isinstance(value, dict) or value.get("format") != FORMAT:
            raise ConfigError(f"profile: {path} is not a profile (draftwise profile writes them)")
        if value.get("version") != VERSION:
            raise ConfigError(
                f"profile: {path} has version {value.get('version')!r}, expected {VERSION}; measure it anew"
            )
        try:
            settings = {name: _setting(raw) for name, raw in value["settings"].items()}
            return cls(
                machine=dict(value["machine"]),
                model=str(value["model"]),
                settings=settings,
                accepted={
                    str(kind): {
                        str(m): {str(name): _counts(raw) for name, raw in parts.items()}
                        for m, parts in methods.items()
                    }
                    for kind, methods in value["accepted"].items()
                },
                left=_count(value["left"]),
                seconds=_seconds(value["seconds"]),
            )
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise ConfigError(f"profile: {path} is damaged: {type(error).__name__}: {error}") from None

    def check_of(self, model: str | None, machine: Mapping[str, Any] | None = None) -> None:
        """Raise ConfigError if it was measured of another model, or on another machine (each if given)."""
        if model is not None and model != self.model:
            raise ConfigError(f"profile: it was measured with model {self.model!r}, not with {model!r}")
        if machine is not None and dict(machine) != dict(self.machine):
            other = ", ".join(
                f"{name} {self.machine.get(name)!r}"
                for name in machine
                if machine[name] != self.machine.get(name)
            )
            raise ConfigError(f"profile: it was measured on another machine ({other})")


def measured_times(setting: Setting) -> Measured:
    """The performance model of these samples. Raises ConfigError if there are too few."""
    if not setting.prefill or not any(s.method == "none" for s in setting.steps):
        raise ConfigError(
            f"profile: of {setting.weights!r} prompts or plain steps are missing; continue measuring"
        )
    model = PerformanceModel()
    for sample in setting.steps:
        for rows, seconds in sample.by_rows():
            model.teach_target(sample.requests, rows, sample.context, seconds)
        if sample.draft > 0:
            model.teach_draft(sample.method, sample.requests, sample.drafts, sample.draft)
    return Measured(
        model,
        sorted(setting.prefill),
        kv_tokens=setting.kv_tokens,
        most_requests=max(s.requests for s in setting.steps),
        most_rows=max(max(s.rows, *s.widths, 0) for s in setting.steps),
        max_context=max(
            max(s.context // s.requests for s in setting.steps), max(n for n, _ in setting.prefill)
        ),
        most_drafts=max((s.drafts for s in setting.steps), default=0),
        methods=sorted({s.method for s in setting.steps if s.method != "none"}),
        readings={s.method: setting.readings(s.method) for s in setting.steps if s.method != "none"},
        behind=setting.behind,
        step_factors=setting.step_factors(),
        prompt_factors=setting.prompt_factors(),
        rests=setting.rest_factors,
        pause=setting.rest.pause if setting.rest is not None else 0.0,
    )


def length_name(tokens: int) -> str:
    """The lengths that are counted together: up to the next power of two. Example: 100 is "128"."""
    return str(1 << max(tokens - 1, 15).bit_length())


def _merged(parts: Sequence[AcceptanceCounts]) -> AcceptanceCounts:
    whole = AcceptanceCounts()
    for part in parts:
        whole.merge(part)
    return whole


def _counts(raw: Mapping[str, Any]) -> AcceptanceCounts:
    sizes, tried, accepted = ([_count(n) for n in raw[name]] for name in ("sizes", "tried", "accepted"))
    if len(tried) != len(accepted) or any(a > b for a, b in zip(accepted, tried, strict=True)):
        raise ValueError("more drafts accepted than tried")
    if len(sizes) not in (0, len(tried) + 1) or any(n > sum(sizes) for n in tried):
        raise ValueError("more drafts tried than steps")
    return AcceptanceCounts(sizes, tried, accepted, _count(raw["tokens"]))


def _count(value: Any) -> int:
    number = int(value)
    if not 0 <= number <= _MOST:
        raise ValueError(f"{number} is not a count")
    return number


def _size(value: Any) -> int:
    number = int(value)
    if not 1 <= number <= _MOST:
        raise ValueError(f"{number} is not a size")
    return number


def _seconds(value: Any) -> float:
    number = float(value)
    if not (math.isfinite(number) and number >= 0):
        raise ValueError(f"{number} is not a time")
    return number


def _times(values: Any) -> tuple[float, ...]:
    return tuple(map(_seconds, values))


def _setting(raw: Mapping[str, Any]) -> Setting:
    steps = [
        StepSample(
            str(s["method"]),
            _count(s["drafts"]),
            max(_count(s["requests"]), 1),
            _count(s["length"]),
            _count(s["rows"]),
            _count(s["context"]),
            _seconds(s["target"]),
            _seconds(s["draft"]),
            _count(s["steps"]),
            _count(s["rounds"]),
            _times(s["targets"]),
            _times(s["draftings"]),
            tuple(map(_count, s["widths"])),
        )
        for s in raw["steps"]
    ]
    if any(s.widths and len(s.widths) != len(s.targets) for s in steps):
        raise ValueError("steps without their rows")
    prompts = [
        PromptSample(
            str(p["method"]),
            _count(p["tokens"]),
            _times(p["seconds"]),
            tuple(map(_difference, p["readings"])),
            tuple(map(_difference, p["behind"])),
            _count(p["rounds"]),
        )
        for p in raw["prompts"]
    ]
    if not all(p.seconds for p in prompts):
        raise ValueError("a prompt without a time")
    return Setting(
        str(raw["weights"]),
        _size(raw["kv_tokens"]),
        _size(raw["block_size"]),
        _seconds(raw["kv_bytes"]),
        max(_count(raw["devices"]), 1),
        prompts,
        steps,
        _rest(raw.get("rest")),
    )


def _rest(raw: Mapping[str, Any] | None) -> RestSample | None:
    """None: it was not measured, as in files that were written before it was."""
    if raw is None:
        return None
    factors = tuple(map(_times, raw["factors"]))
    if len(factors) != len(REST_PARTS):
        raise ValueError(f"{len(factors)} parts after a pause, expected {len(REST_PARTS)}")
    return RestSample(_seconds(raw["pause"]), factors, _count(raw["rounds"]))


def _difference(value: Any) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{number} is not a time")
    return number
