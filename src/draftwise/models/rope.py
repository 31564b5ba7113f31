"""Rotary position embeddings (Su et al. 2021, arXiv:2104.09864) and their stretched variants.

``config.json`` spells them in two ways, both read here: ``rope_theta`` beside ``rope_scaling`` (older), and
``rope_parameters`` (newer, holds everything; it is read when both are there, which must say the same).

**Dynamic NTK** raises the base once a sequence is longer than the model was trained for, and Transformers re-computes
it from the length of whatever batch it is given: the same tokens then get other numbers when they are chunked or
batched otherwise. Here it is a function of one fixed length, the model length asked for: within
``max_position_embeddings`` it equals the default, and a longer one uses, for all positions, the base that Transformers
uses for a sequence of exactly that length.

**LongRoPE** (Ding et al. 2024, arXiv:2402.13753) has two sets of factors, and Transformers takes the long one as soon
as anything in the batch is longer than what the model was trained for. Here, too, the model length decides, once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from draftwise.errors import ConfigError, ModelLoadError

SUPPORTED = ("default", "linear", "dynamic", "llama3", "longrope", "yarn")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """One kind of rotation. Fields that a kind does not use keep their defaults."""

    kind: str
    theta: float
    head_dim: int  # dimensions that are rotated
    factor: float = 1.0
    original_max_len: int = 0  # llama3, yarn, dynamic: the length trained for before stretching
    target_len: int = 0  # dynamic: the fixed length the base is computed for
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn: whole dimensions as borders of the ramp
    attention_factor: float = 1.0  # yarn, longrope: on cosines and sines
    factors: tuple[float, ...] = ()  # longrope: of each pair of dimensions
    interleaved: bool = False  # pairs are neighbours, and not as far apart as half of what is rotated

    def order(self, head_dim: int) -> tuple[int, ...] | None:
        """Kernels rotate dimension i with i + D / 2. Which dimension of a head of the checkpoint has to stand where for
        that, [D]; None: they stand right. Scores do not change when queries and keys are put in another order alike.

        Example: D = 8, of which 4 are rotated: 0 with 2, 1 with 3; the others are rotated by nothing: (0, 1, 4, 5, 2,
        3, 6, 7). Interleaved, 0 with 1, 2 with 3: (0, 2, 4, 5, 1, 3, 6, 7).
        """
        half, rest = self.head_dim // 2, (head_dim - self.head_dim) // 2
        if rest == 0 and not self.interleaved:
            return None
        rotated = list(range(self.head_dim))
        first, second = rotated[:half], rotated[half:]
        if self.interleaved:
            first, second = rotated[0::2], rotated[1::2]
        left = list(range(self.head_dim, head_dim))
        return (*first, *left[:rest], *second, *left[rest:])

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
        if self.kind == "longrope":
            return inv_freq / torch.tensor(self.factors)
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


def over_text(params: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters of a rotation as they are for text alone. A token of text has three positions that are alike, so that
    M-RoPE is the plain rotation."""
    plain = {name: value for name, value in params.items() if not name.startswith("mrope_")}
    return {
        name: "default" if name in ("rope_type", "type") and value == "mrope" else value
        for name, value in plain.items()
    }


def parse_rope(
    raw: Mapping[str, Any],
    head_dim: int,
    max_positions: int,
    max_model_len: int | None,
    *,
    partial: bool = False,
    interleaved: bool = False,
    theta: float = 10000.0,
) -> tuple[RopeConfig, int]:
    """Read the rotation of a ``config.json`` and settle how many positions the model may reach.

    Args:
        max_positions: ``max_position_embeddings``.
        max_model_len: length the caller asks for; None: ``max_positions``. More than ``max_positions`` is granted to
            linear and dynamic scaling, up to ``factor`` times as many, and to yarn, up to ``factor`` times what the
            model was trained for.
        partial: the family may rotate some dimensions of a head only (``partial_rotary_factor``).
        interleaved: the family rotates neighbours.
        theta: the base where the config has none.

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
    head_dim = _rotated(raw, params, head_dim, partial)
    theta = _number(params, "rope_theta", _number(raw, "rope_theta", theta))
    original = _original_length(raw, params, max_positions)
    stretched = max_positions / original if kind == "longrope" else None
    factor = _number(params, "factor", 1.0 if kind == "default" else stretched)
    reach = int(max_positions * factor) if kind in ("linear", "dynamic") else max_positions
    if kind == "yarn":
        reach = max(reach, int(original * factor))
    length = max_positions if max_model_len is None else max_model_len
    if not 0 < length <= reach:
        raise ConfigError(
            f"max_model_len: {length} is out of range: this model reaches 1 to {reach} positions"
        )
    if kind == "longrope":
        rope = RopeConfig(
            kind,
            theta,
            head_dim,
            factor,
            original_max_len=original,
            attention_factor=_longrope_attention_factor(params, factor, original),
            factors=_factors(params, "long_factor" if length > original else "short_factor", head_dim // 2),
        )
    elif kind == "dynamic":
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
            original_max_len=original,
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
            original_max_len=original,
            beta_fast=_number(params, "beta_fast", 32.0),
            beta_slow=_number(params, "beta_slow", 1.0),
            truncate=bool(params.get("truncate", True)),
            attention_factor=_yarn_attention_factor(params, factor),
        )
    else:
        rope = RopeConfig(kind, theta, head_dim, factor)
    return replace(rope, interleaved=interleaved), length


def _rotated(raw: Mapping[str, Any], params: Mapping[str, Any], head_dim: int, allowed: bool) -> int:
    """How many dimensions of a head are rotated."""
    partial = params.get("partial_rotary_factor", raw.get("partial_rotary_factor"))
    if partial in (None, 1, 1.0):
        rotated = head_dim
    elif not allowed:
        raise ModelLoadError(f"partial rotary embeddings (partial_rotary_factor {partial}) are not supported")
    else:
        share = _number({"partial_rotary_factor": partial}, "partial_rotary_factor", None)
        rotated = int(head_dim * share)
        if not 0 < rotated <= head_dim:
            raise ModelLoadError(f"config.json: partial_rotary_factor {partial} of a head of {head_dim}")
    if head_dim % 2 or rotated % 2:
        raise ModelLoadError(
            f"rotary embeddings need an even head_dim, not {head_dim if head_dim % 2 else rotated}"
        )
    return rotated


def _factors(params: Mapping[str, Any], name: str, count: int) -> tuple[float, ...]:
    values = params.get(name)
    numbers = isinstance(values, list) and all(
        isinstance(x, (int, float)) and not isinstance(x, bool) and x > 0 for x in values
    )
    if not numbers or len(values or ()) != count:
        raise ModelLoadError(
            f"config.json: rope parameter {name!r} must be a list of {count} positive numbers"
        )
    assert isinstance(values, list)
    return tuple(float(x) for x in values)


def _longrope_attention_factor(params: Mapping[str, Any], factor: float, original: int) -> float:
    """As the authors' code has it; Transformers lets the config override it."""
    if params.get("attention_factor") is not None:
        return _number(params, "attention_factor", None)
    return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))


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
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise ModelLoadError(f"config.json: rope parameter {name!r} must be a positive number, not {value!r}")
    return float(value)
