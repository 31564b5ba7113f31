"""Acceptance from a flag or a file."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from draftwise.errors import ConfigError
from draftwise.plan.acceptance import ANY_KIND, AcceptanceModel, conditional
from draftwise.plan.profile import FORMAT, Profile


def read_acceptance(text: str, methods: Sequence[str] = ("model",)) -> AcceptanceModel:
    """From a flag: ``0.85,0.3,0`` (of every method there is), or a file: what ``draftwise bench accept --json``
    printed, or an object method -> rates, or kind -> method -> rates.

    Raises:
        ConfigError: neither, or rates that are none.
    """
    try:
        rates = tuple(float(part) for part in text.split(","))
    except ValueError:
        return _of_file(Path(text))
    return AcceptanceModel({ANY_KIND: dict.fromkeys(methods, rates)})


def _of_file(path: Path) -> AcceptanceModel:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"acceptance: {str(path)!r} is neither rates (0.85,0.3,0) nor a readable JSON file: {error}"
        ) from None
    if isinstance(value, dict) and value.get("benchmark") == "accept":
        return _of_bench(value, path)
    if isinstance(value, dict) and value.get("format") == FORMAT:
        return Profile.load(path).acceptance()
    if not isinstance(value, dict) or not value:
        raise ConfigError(f"acceptance: {path}: expected an object of rates per method")
    flat = all(isinstance(rates, list) for rates in value.values())
    kinds = {ANY_KIND: value} if flat else value
    try:
        rates = {
            str(k): {str(m): tuple(map(float, r)) for m, r in methods.items()} for k, methods in kinds.items()
        }
    except (TypeError, ValueError, AttributeError, OverflowError):
        raise ConfigError(f"acceptance: {path}: expected lists of chances per method") from None
    if ANY_KIND not in rates:
        rates[ANY_KIND] = next(iter(rates.values()))
    return AcceptanceModel(rates)


def _of_bench(value: Mapping[str, Any], path: Path) -> AcceptanceModel:
    """Workloads are kinds; any kind is all of them together, each draft with the same weight."""
    kinds: dict[str, dict[str, tuple[float, ...]]] = {}
    offers: dict[str, dict[str, tuple[float, ...]]] = {}
    sums: dict[str, tuple[float, float, list[float]]] = {}
    try:
        for row in value["results"]:
            survival, drafts = [float(x) for x in row["acceptance_per_position"]], float(row["num_drafts"])
            if not survival or drafts <= 0:
                continue
            length, found = row.get("mean_acceptance_length"), 1.0
            if length and length > 1:
                # Steps in which nothing was found to draft are in the one and not in the other.
                found = min(max((float(row["tokens_per_step"]) - 1) / (length - 1), 1e-6), 1.0)
            kinds.setdefault(row["workload"], {})[row["method"]] = conditional(survival)
            if found < 1:
                offers.setdefault(row["workload"], {})[row["method"]] = (found,)
            count, steps, total = sums.setdefault(row["method"], (0.0, 0.0, []))
            total += [0.0] * (len(survival) - len(total))
            for j, share in enumerate(survival):
                total[j] += drafts * share
            sums[row["method"]] = count + drafts, steps + drafts / found, total
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise ConfigError(f"acceptance: {path} is not the output of bench accept --json: {error!r}") from None
    if not sums:
        raise ConfigError(f"acceptance: in {path} nothing was drafted")
    kinds[ANY_KIND] = {m: conditional([t / count for t in total]) for m, (count, _, total) in sums.items()}
    offers[ANY_KIND] = {m: (count / steps,) for m, (count, steps, _) in sums.items() if count < steps}
    return AcceptanceModel(kinds, offers)
