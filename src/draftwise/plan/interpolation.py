"""Files of measured points as NVIDIA Dynamo's profiler writes and its planner reads them, and answers from such points.

``prefill_isl, prefill_ttft`` (milliseconds)``, prefill_thpt_per_gpu`` (tokens/s); ``x_kv_usage, y_context_length,
z_itl`` (milliseconds)``, z_thpt_per_gpu, max_kv_tokens``. They know nothing of drafts.
"""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from draftwise.errors import ConfigError
from draftwise.plan.profile import measured_times
from draftwise.plan.samples import PromptSample, Setting, StepSample
from draftwise.plan.times import Infeasible, Measured, OutOfRange

Floats = npt.NDArray[np.float64]
PREFILL_FIELDS = ("prefill_isl", "prefill_ttft", "prefill_thpt_per_gpu")
DECODE_FIELDS = ("x_kv_usage", "y_context_length", "z_itl", "z_thpt_per_gpu", "max_kv_tokens")
_GRID = 100


@dataclass(frozen=True, slots=True)
class Throughput:
    """``kv_usage``: share of the cache in use; ``itl``: seconds there; ``per_device``: tokens/s."""

    kv_usage: float
    itl: float
    per_device: float


class Interpolation:
    """Points and what lies between them. Beyond them the answer is `OutOfRange`, and not that of the nearest."""

    def __init__(self, fields: dict[str, Floats]) -> None:
        """``fields``: by the names above, each [n] (``max_kv_tokens``: [1]). Raises ConfigError."""
        for name in (*PREFILL_FIELDS, *DECODE_FIELDS):
            if name not in fields:
                raise ConfigError(f"interpolation: there is no {name!r}")
            if not len(fields[name]) or not np.isfinite(fields[name]).all():
                raise ConfigError(f"interpolation: {name!r} is empty, or has values that are not numbers")
        for names in (PREFILL_FIELDS, DECODE_FIELDS[:4]):
            if len({len(fields[name]) for name in names}) != 1:
                raise ConfigError(f"interpolation: {', '.join(names)} differ in length")
        self.fields = fields
        order = np.argsort(fields["prefill_isl"])
        self._isl_np, self._ttft_np = fields["prefill_isl"][order], fields["prefill_ttft"][order] / 1000
        self._grids: tuple[Floats, Floats, Floats, Floats] | None = None

    @property
    def max_kv_tokens(self) -> int:
        return int(self.fields["max_kv_tokens"][0])

    def ttft(self, isl: float) -> float | OutOfRange:
        """Seconds to the first token of a prompt."""
        if not self._isl_np[0] <= isl <= self._isl_np[-1]:
            return OutOfRange(
                f"prompt of {isl:g} tokens; measured {self._isl_np[0]:g} to {self._isl_np[-1]:g}"
            )
        if len(self._isl_np) < 4:
            return float(np.interp(isl, self._isl_np, self._ttft_np))
        from scipy.interpolate import PchipInterpolator

        return float(PchipInterpolator(self._isl_np, self._ttft_np)(isl))

    def _surface(self) -> tuple[Floats, Floats, Floats, Floats]:
        """Axes [100] of cache usage and context, and ITL (seconds) and throughput over them [100, 100] (context,
        usage): cubic between the points, those outside of them as the nearest one."""
        if self._grids is None:
            from scipy.interpolate import griddata

            x_np, y_np = self.fields["x_kv_usage"], self.fields["y_context_length"]
            usage_np = np.linspace(0.0, 1.0, _GRID)
            context_np = np.linspace(0.0, float(y_np.max()), _GRID)
            across, along = np.meshgrid(usage_np, context_np / max(float(y_np.max()), 1.0))
            places = np.stack([x_np, y_np / max(float(y_np.max()), 1.0)], axis=1)
            found = []
            for name, scale in (("z_itl", 1000.0), ("z_thpt_per_gpu", 1.0)):
                values_np = self.fields[name] / scale
                near_np = griddata(places, values_np, (across, along), method="nearest")
                if len(values_np) >= 4 and len(np.unique(x_np)) > 1 and len(np.unique(y_np)) > 1:
                    smooth_np = griddata(places, values_np, (across, along), method="cubic")
                    near_np = np.where(np.isnan(smooth_np), near_np, smooth_np)
                found.append(near_np)
            self._grids = usage_np, context_np, found[0], found[1]
        return self._grids

    def best_throughput(self, itl: float, context: float) -> Throughput | Infeasible | OutOfRange:
        """The fullest cache at which a token takes at most ``itl`` seconds: from a full one down, the first cell.

        Example: 9.8 ms at 33.33 % of the cache and 10.0 at 34.34 %: a limit of 9.9 ms gives 33.33 %.
        """
        usage_np, context_np, itl_np, rate_np = self._surface()
        if not 0 < context <= context_np[-1]:
            return OutOfRange(f"context of {context:g} tokens; measured up to {context_np[-1]:g}")
        row = int(np.abs(context_np - context).argmin())
        for i in range(_GRID - 1, -1, -1):
            if itl_np[row, i] <= itl:
                return Throughput(float(usage_np[i]), float(itl_np[row, i]), float(rate_np[row, i]))
        best = int(itl_np[row].argmin())
        return Infeasible(
            f"no use of the cache gives {1000 * itl:.4g} ms per token at {context:g} tokens of context",
            Throughput(float(usage_np[best]), float(itl_np[row, best]), float(rate_np[row, best])),
        )


def of_profile(setting: Setting, times: Measured, devices: int = 1) -> Interpolation:
    """The plain steps of a profile as such points."""
    isl_np = np.array([n for n, _ in setting.prefill], np.float64)
    ttft_np = np.array([t for _, t in setting.prefill], np.float64)
    plain = [s for s in setting.steps if s.method == "none"]
    requests_np = np.array([s.requests for s in plain], np.float64)
    context_np = np.array([s.context for s in plain], np.float64)
    itl_np = np.array([s.target for s in plain], np.float64)
    return Interpolation(
        {
            "prefill_isl": isl_np,
            "prefill_ttft": 1000 * ttft_np,
            "prefill_thpt_per_gpu": isl_np / ttft_np / devices,
            "x_kv_usage": context_np / setting.kv_tokens,
            "y_context_length": context_np / requests_np,
            "z_itl": 1000 * itl_np,
            "z_thpt_per_gpu": requests_np / itl_np / devices,
            "max_kv_tokens": np.array([float(setting.kv_tokens)]),
        }
    )


def setting_of(found: Interpolation) -> Setting:
    """The points as plain steps and prompts of a profile, the inverse of `of_profile`.

    Example: a cache of 40,000 tokens, used to 0.2, at contexts of 1,000 tokens: 8 requests. If a token takes 10 ms and
    the throughput is 400 tokens/s per GPU, then 8 / 0.010 / 400 = 2 GPUs are one engine.
    """
    fields = found.fields
    setting = Setting("measured", found.max_kv_tokens, block_size=16, kv_bytes=131_072.0)
    for isl, ttft in zip(fields["prefill_isl"], fields["prefill_ttft"], strict=True):
        setting.add_prompt(PromptSample("none", round(float(isl)), (float(ttft) / 1000,)))
    devices = []
    decode = (fields[name] for name in DECODE_FIELDS[:4])
    for usage, length, itl, rate in zip(*decode, strict=True):
        context = round(float(usage) * found.max_kv_tokens)
        if context < 1 or length < 1 or itl <= 0:
            continue  # an empty cache says nothing of a step
        requests = max(round(context / float(length)), 1)
        setting.add_step(
            StepSample(
                "none", 0, requests, round(float(length)), requests, context, float(itl) / 1000, 0.0, steps=1
            )
        )
        if rate > 0:
            devices.append(requests / (float(itl) / 1000) / float(rate))
    if not setting.steps:
        raise ConfigError("interpolation: no point has tokens in the cache and a time")
    setting.devices = max(round(statistics.median(devices)), 1) if devices else 1
    return setting


def times_of(found: Interpolation) -> tuple[Measured, int]:
    """The performance model of the points, which knows plain steps only, and how many devices one engine has."""
    setting = setting_of(found)
    return measured_times(setting), setting.devices


def write_interpolation(found: Interpolation, folder: Path) -> list[Path]:
    """Two files ``raw_data.npz`` where Dynamo looks for them. Raises ConfigError."""
    written = []
    for name, fields in (("prefill", PREFILL_FIELDS), ("decode", DECODE_FIELDS)):
        path = folder / f"selected_{name}_interpolation" / "raw_data.npz"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            arrays: dict[str, Any] = {field: found.fields[field] for field in fields}
            np.savez(path, **arrays)
        except OSError as error:
            raise ConfigError(f"interpolation: {path} cannot be written: {error.strerror}") from None
        written.append(path)
    return written


def read_interpolation(folder: Path) -> Interpolation:
    """Reads a folder as `write_interpolation` makes it, or with ``raw_data.json`` instead. Raises ConfigError."""
    fields: dict[str, Floats] = {}
    for name in ("prefill", "decode"):
        place = folder / f"selected_{name}_interpolation"
        try:
            if (place / "raw_data.npz").is_file():
                with np.load(place / "raw_data.npz", allow_pickle=False) as arrays:
                    fields |= {key: np.atleast_1d(arrays[key]).astype(np.float64) for key in arrays.files}
            else:
                value = json.loads((place / "raw_data.json").read_text(encoding="utf-8"))
                fields |= {key: np.atleast_1d(np.asarray(v, np.float64)) for key, v in value.items()}
        except (OSError, ValueError, AttributeError, TypeError, OverflowError, RecursionError) as error:
            raise ConfigError(f"interpolation: {place} cannot be read: {error}") from None
    return Interpolation(fields)
