"""Rotary position embeddings (Su et al. 2021, arXiv:2104.09864) and their stretched variants.

``config.json`` spells them in two ways, both read here: ``rope_theta`` beside ``rope_scaling`` (older), and
``rope_parameters`` (newer, holds everything; it wins when both are there).

**Dynamic NTK** raises the base once a sequence is longer than the model was trained for, and Transformers re-computes
it from the length of whatever batch it is given: the same tokens then get other numbers when they are chunked or
batched otherwise. Here it is a function of one fixed length, the model length asked for: within
``max_position_embeddings`` it equals the default, and a longer one uses, for all positions, the base that Transformers
uses for a sequence of exactly that length.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from draftwise.errors import ConfigError, ModelLoadError

SUPPORTED = ("default", "linear", "dynamic", "llama3", "yarn")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """One kind of rotation. Fields that a kind does not use keep their defaults."""

    kind: str
    theta: float
    head_dim: int
    factor: float = 1.0
    original_max_len: int = 0  # llama3, yarn, dynamic: the length trained for before stretching
    target_len: int = 0  # dynamic: the fixed length the base is computed for
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn: whole dimensions as borders of the ramp
    attention_factor: float = 1.0  # yarn: on cosines and sines

    def inv_freq(self) -> torch.Tensor:
        """Angle per position of each pair of dimensions: float32 [D / 2]."""
        theta = self.theta
        if self.kind == "dynamic" and self.target_len > self.original_max_len:
            stretch = self.factor * self.target_len / self.original_max_len - (self.factor - 1)
            theta *= stretch ** (self.head_dim / (self.head_dim - 2))
        exponents = torch.arange(0, self.head_dim, 2, dtype=torch.float32) / self.head_dim
        inv_freq = 1.0 / (theta**exponents)
        if self.kind == "linear":
            return inv_freq / self.factor
        if self.kind == "llama3":
            return self._llama3(inv_freq)
        if self.kind == "yarn":
            return self._yarn(inv_freq)
        return inv_freq

    def _llama3(self, inv_freq: torch.Tensor) -> torch.Tensor:
        """Long waves are stretched by ``factor``, short ones kept, with a blend between (as Llama 3.1 does)."""
        turns = self.original_max_len * inv_freq / (2 * math.pi)  # of each pair over the trained length
        blend = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        blend = blend.clamp(0.0, 1.0)
        return (1 - blend) * inv_freq / self.factor + blend * inv_freq

    def _yarn(self, inv_freq: torch.Tensor) -> torch.Tensor:
        """A ramp over the dimensions from kept to stretched (Peng et al. 2023, arXiv:2309.00071, section 3.2)."""

        def dimension(turns: float) -> float:
            return (
                self.head_dim
                * math.log(self.original_max_len / (turns * 2 * math.pi))
                / (2 * math.log(self.theta))
            )

        low, high = dimension(self.beta_fast), dimension(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, self.head_dim - 1)
        width = high - low if high != low else 0.001
        ramp = ((torch.arange(self.head_dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
        return inv_freq / self.factor * ramp + inv_freq * (1 - ramp)


def parse_rope(
    raw: Mapping[str, Any], head_dim: int, max_positions: int, max_model_len: int | None
) -> tuple[RopeConfig, int]:
    """Read the rotation of a ``config.json`` and settle how many positions the model may reach.

    Args:
        max_positions: ``max_position_embeddings``.
        max_model_len: length the caller asks for; None: ``max_positions``. More than ``max_positions`` is granted to
            linear and dynamic scaling, up to ``factor`` times as many.

    Raises:
        ConfigError: ``max_model_len`` is out of reach.
        ModelLoadError: an unsupported kind (named), a missing or invalid parameter.
    """
    params = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if not isinstance(params, Mapping):
        raise ModelLoadError(f"config.json: rope parameters must be an object, not {params!r}")
    if "mrope_section" in params:
        raise ModelLoadError("multimodal rotary embeddings (M-RoPE) are not supported")
    if any(isinstance(value, Mapping) for value in params.values()):
        raise ModelLoadError("rope parameters that differ by layer type are not supported")
    kind = params.get("rope_type", params.get("type", "default"))
    if kind == "mrope":
        raise ModelLoadError("multimodal rotary embeddings (M-RoPE) are not supported")
    if kind not in SUPPORTED:
        raise ModelLoadError(f"rope type {kind!r} is not supported (supported: {', '.join(SUPPORTED)})")
    partial = params.get("partial_rotary_factor", raw.get("partial_rotary_factor"))
    if partial not in (None, 1, 1.0):
        raise ModelLoadError(f"partial rotary embeddings (partial_rotary_factor {partial}) are not supported")
    if head_dim % 2:
        raise ModelLoadError(f"rotary embeddings need an even head_dim, not {head_dim}")
    theta = _number(params, "rope_theta", _number(raw, "rope_theta", 10000.0))
    factor = _number(params, "factor", 1.0 if kind == "default" else None)
    reach = int(max_positions * factor) if kind in ("linear", "dynamic") else max_positions
    length = max_positions if max_model_len is None else max_model_len
    if not 0 < length <= reach:
        raise ConfigError(
            f"max_model_len: {length} is out of range: this model reaches 1 to {reach} positions"
        )
    if kind == "dynamic":
        rope = RopeConfig(
            kind,
            theta,
            head_dim,
            factor,
            original_max_len=max_positions,
            target_len=max(length, max_positions),
        )
    elif kind == "llama3":
        rope = RopeConfig(
            kind,
            theta,
            head_dim,
            factor,
            original_max_len=_original_length(raw, params, max_positions),
            low_freq_factor=_number(params, "low_freq_factor", None),
            high_freq_factor=_number(params, "high_freq_factor", None),
        )
        if rope.high_freq_factor <= rope.low_freq_factor:
            raise ModelLoadError("rope: high_freq_factor must be greater than low_freq_factor")
    elif kind == "yarn":
        rope = RopeConfig(
            kind,
            theta,
            head_dim,
            factor,
            original_max_len=_original_length(raw, params, max_positions),
            beta_fast=_number(params, "beta_fast", 32.0),
            beta_slow=_number(params, "beta_slow", 1.0),
            truncate=bool(params.get("truncate", True)),
            attention_factor=_yarn_attention_factor(params, factor),
        )
    else:
        rope = RopeConfig(kind, theta, head_dim, factor)
    return rope, length


def _yarn_attention_factor(params: Mapping[str, Any], factor: float) -> float:
    """YaRN's temperature on the scores as a factor on cosines and sines (equation 22; DeepSeek adds mscale)."""
    if params.get("attention_factor") is not None:
        return _number(params, "attention_factor", None)

    def scale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if params.get("mscale") and params.get("mscale_all_dim"):
        return scale(float(params["mscale"])) / scale(float(params["mscale_all_dim"]))
    return scale(1.0)


def _original_length(raw: Mapping[str, Any], params: Mapping[str, Any], default: int) -> int:
    for source in (raw, params):
        value = source.get("original_max_position_embeddings")
        if value is not None:
            return int(_number(source, "original_max_position_embeddings", None))
    return default


def _number(source: Mapping[str, Any], name: str, default: float | None) -> float:
    value = source.get(name)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value <= 0:
        raise ModelLoadError(f"config.json: rope parameter {name!r} must be a positive number, not {value!r}")
    return float(value)
