"""Fields of a ``config.json`` that change what a model computes, and that its family does not look at, are refused.

Which fields a family follows needs no list: they are those that its `DecoderModel.parse` reads. What follows are fields
by which published models differ from the plain decoder, with the values that change nothing. A checkpoint that names a
family and says one of them otherwise is another model under that name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from draftwise.errors import ModelLoadError
from draftwise.models.config import RawConfig

_ONE = (1,)
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    # factors: Granite, MiniCPM, Cohere, Falcon-H1
    "embedding_multiplier": _ONE, "residual_multiplier": _ONE, "attention_multiplier": (), "logits_scaling": _ONE,
    "logit_scale": _ONE, "scale_emb": _ONE, "scale_depth": (), "dim_model_base": (), "lm_head_multiplier": _ONE,
    "key_multiplier": _ONE, "query_pre_attn_scalar": (),
    # caps and limits: Gemma 2, OLMo, GPT-OSS
    "final_logit_softcapping": (), "attn_logit_softcapping": (), "clip_qkv": (), "swiglu_limit": (),
    # what a layer sees, and where: Gemma, Llama 4, SmolLM3, BLOOM, GPT-NeoX
    "layer_types": ("full_attention",), "sliding_window_pattern": _ONE, "attention_chunk_size": (),
    "no_rope_layers": _ONE, "no_rope_layer_interval": (), "alibi": (), "attn_temperature_tuning": (),
    "use_bidirectional_attention": (), "rotary_pct": _ONE,
    # other parts: norms of queries and keys, gates, blocks side by side, experts
    "use_qk_norm": (), "qk_norm": (), "qk_layernorm": (), "attn_output_gate": (), "parallel_attn": (),
    "use_parallel_residual": (), "num_experts": (), "num_local_experts": (), "n_routed_experts": (),
}  # fmt: skip
"""Values with which a field changes nothing, beside null, false and 0; of a list each element is one."""


class Watched(Mapping[str, Any]):
    """A config that notes which of its fields are read."""

    def __init__(self, raw: RawConfig) -> None:
        self.raw = raw
        self.read: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        self.read.add(name)
        return self.raw[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.raw)

    def __len__(self) -> int:
        return len(self.raw)


def refuse_unfollowed(config: Watched, architecture: str) -> None:
    """Raises ModelLoadError if a field that changes the model was not read, or a rotation is said in two ways."""
    for name in sorted(_NEUTRAL.keys() - config.read):
        value = config.raw.get(name)
        if not _changes_nothing(name, value):
            raise ModelLoadError(
                f"config.json: {name!r} is {value!r}, which {architecture} does not know: the model would not be the "
                "one that was trained"
            )
    older, newer = config.raw.get("rope_scaling"), config.raw.get("rope_parameters")
    if "rope_scaling" not in config.read and older and not _same_rotation(older, newer):
        raise ModelLoadError(
            f"config.json: 'rope_scaling' is {older!r}, and 'rope_parameters' says something else, {newer!r}: leave "
            "one of them out"
        )


def _same_rotation(older: Any, newer: Any) -> bool:
    """Whether the older spelling of a rotation says nothing but what the newer one, which is read, says of some
    layers."""
    parts = [newer, *newer.values()] if isinstance(newer, Mapping) else []
    told = [{"type": part.get("rope_type"), **part} for part in parts if isinstance(part, Mapping)]
    return isinstance(older, Mapping) and any(
        all(part.get(name) == value for name, value in older.items()) for part in told
    )


def _changes_nothing(name: str, value: Any) -> bool:
    if value is None:
        return True
    values = value if isinstance(value, list) else [value]
    off = () if name == "no_rope_layers" else (0,)  # there 0 is a layer without rotation
    return all(item is None or item in _NEUTRAL[name] + off for item in values)
