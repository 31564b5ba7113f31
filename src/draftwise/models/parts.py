"""The sizes of a rank's part of a model; `models.cuts` says what it reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from draftwise.errors import ConfigError
from draftwise.kernels.ranks import Part, vocabulary_step
from draftwise.models.checkpoint import TensorEntry
from draftwise.models.config import ModelConfig
from draftwise.models.cuts import Cut


def of_rank(config: ModelConfig, part: Part, experts_by_rank: bool = False) -> ModelConfig:
    """The sizes that a rank has. Vocabulary and hidden state stay whole; with ``experts_by_rank`` experts, too.

    Raises:
        ConfigError: the model cannot be divided so often.
    """
    size = part.size
    if size == 1:
        return config
    heads, kv_heads, inner = config.num_heads, config.num_kv_heads, config.intermediate_size
    _divides("num_attention_heads", heads, size)
    experts = config.experts
    if experts is None or not all(experts.layers):
        _divides("intermediate_size", inner, size)
    latent = config.latent is not None
    if not latent and kv_heads % size and size % kv_heads:
        raise ConfigError(
            f"tensor_parallel_size: {kv_heads} num_key_value_heads can neither be divided by {size} ranks nor copied "
            "evenly"
        )
    if vocabulary_step(config.vocab_size, size) * (size - 1) >= config.vocab_size:
        raise ConfigError(f"tensor_parallel_size: {config.vocab_size} tokens are too few for {size} ranks")
    if experts is not None:
        if not experts_by_rank:
            _divides("moe_intermediate_size", experts.inner, size)
        _divides("shared_expert_intermediate_size", experts.shared_inner, size)
        own = experts.inner if experts_by_rank else experts.inner // size
        shared = experts.shared_inner // size
        experts = replace(experts, inner=own, shared_inner=shared, by_rank=experts_by_rank)
    return replace(
        config,
        num_heads=heads // size,
        num_kv_heads=kv_heads if latent else max(1, kv_heads // size),
        kv_copies=1 if latent else max(1, size // kv_heads),
        intermediate_size=inner // size,
        experts=experts,
        part=part,
    )


def entries_of_rank(entries: Mapping[str, TensorEntry], cuts: Mapping[str, Cut]) -> Mapping[str, TensorEntry]:
    """The same tensors, of some of them the part that a rank reads. Those of another shape than expected stay whole:
    whoever compares shapes says so."""
    found = dict(entries)
    for name, cut in cuts.items():
        entry = entries.get(name)
        if entry is not None and entry.shape == cut.shape:
            found[name] = replace(entry, shape=cut.own_shape, cut=cut)
    return found


def check_divisible(*, kept: bool) -> None:
    """Raise ConfigError if ``quantization_cache`` is given."""
    if kept:
        raise ConfigError("quantization_cache: rounded weights of several ranks cannot be kept; leave it out")


def _divides(name: str, value: int, size: int) -> None:
    if value % size:
        raise ConfigError(f"tensor_parallel_size: {name} {value} cannot be divided by {size} ranks")
