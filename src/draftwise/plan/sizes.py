"""How much a model's passes read and compute, from its configuration alone."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from draftwise.errors import ConfigError
from draftwise.models.config import ModelConfig
from draftwise.models.loader import load_config


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """Weights by how often a pass reads them, and what a token keeps.

    ``dense``: weights that every token meets (attention, MLPs, shared experts, output layer; no embedding table).
    ``expert``: weights of one expert of one layer; ``expert_layers`` layers have ``num_experts`` each, of which a token
    meets ``top_k``. ``kv_values``: numbers of K/V per token in all layers. ``score_width``: sum over layers of
    heads x head size: 4 operations each per key. ``window``: positions that layers see on average; 0: all.
    """

    name: str
    layers: int
    hidden: int
    dense: int
    kv_values: int
    score_width: int
    table: int = 0
    expert: int = 0
    expert_layers: int = 0
    num_experts: int = 0
    top_k: int = 0
    window: int = 0

    @property
    def weights(self) -> int:
        """All of them, the embedding table included."""
        return self.dense + self.table + self.expert * self.expert_layers * self.num_experts

    @property
    def active(self) -> int:
        """Weights that one token is multiplied with."""
        return self.dense + self.expert * self.expert_layers * self.top_k

    def read(self, rows: int) -> float:
        """Weights that a pass over ``rows`` rows reads: of experts those that somebody chose, if all are equally liked.

        Example: 8 experts of which a row takes 2: one row reads 2 of them, two rows 8 * (1 - 0.75 ** 2) = 3.5, and 64
        rows all 8.
        """
        if not self.num_experts:
            return float(self.dense)
        chosen = self.num_experts * (1 - (1 - self.top_k / self.num_experts) ** rows)
        return self.dense + self.expert * self.expert_layers * chosen

    def head(self) -> ModelSizes:
        """A draft head of one of its layers (EAGLE, MTP): a layer, the joining product of two hidden states, and the
        output layer, which is shared."""
        output = self.table or self.hidden * 32_000
        layer = (self.dense - output) // max(self.layers, 1)
        joined = 2 * self.hidden * self.hidden
        return replace(
            self,
            name=f"{self.name} head",
            layers=1,
            dense=layer + joined + output,
            kv_values=self.kv_values // max(self.layers, 1),
            score_width=self.score_width // max(self.layers, 1),
            table=0,
            expert=0,
            expert_layers=0,
            num_experts=0,
            top_k=0,
        )


def sizes_of(config: ModelConfig, name: str) -> ModelSizes:
    """Count a configuration: products of attention and MLPs, experts, output layer; norms and biases are too small."""
    hidden, layers = config.hidden_size, config.num_layers
    query = config.num_heads * config.head_dim
    keys = config.num_kv_heads * config.head_dim
    latent = config.latent
    if latent is None:
        attention = hidden * (query + 2 * keys) + query * hidden
        kept, score = 2 * keys, query
    else:
        wide = config.num_heads * (latent.plain + latent.rotated)
        into = hidden * wide if latent.queries is None else hidden * latent.queries + latent.queries * wide
        up = latent.latent * config.num_heads * (latent.plain + latent.values)
        attention = (
            into + hidden * (latent.latent + latent.rotated) + up + config.num_heads * latent.values * hidden
        )
        kept = latent.latent + latent.rotated
        score = config.num_heads * kept
    experts = config.experts
    sparse = sum(experts.layers) if experts is not None else 0
    dense = layers * attention + (layers - sparse) * 3 * hidden * config.intermediate_size
    expert = num = top_k = 0
    if experts is not None:
        expert, num, top_k = 3 * hidden * experts.inner, experts.routing.num_experts, experts.routing.top_k
        dense += sparse * (3 * hidden * experts.shared_inner + hidden * num)
    table = config.vocab_size * hidden
    windows = [w for w in config.sliding_window if w is not None]
    return ModelSizes(
        name=name,
        layers=layers,
        hidden=hidden,
        dense=dense + table,
        kv_values=layers * kept,
        score_width=layers * score,
        table=0 if config.tied else table,
        expert=expert,
        expert_layers=sparse,
        num_experts=num,
        top_k=top_k,
        window=sum(windows) // len(windows) if len(windows) == layers else 0,
    )


SHAPES = {
    "llama-1b": ModelSizes("llama-1b", 16, 2048, 973_078_528 + 262_668_288, 16_384, 32_768),
    "llama-8b": ModelSizes("llama-8b", 32, 4096, 6_979_321_856 + 525_336_576, 65_536, 131_072, 525_336_576),
    "llama-70b": ModelSizes(
        "llama-70b", 80, 8192, 68_451_041_280 + 1_050_673_152, 163_840, 655_360, 1_050_673_152
    ),
}
"""Shapes of well-known models (Llama 3.x), for whom no checkpoint is at hand."""


def model_sizes(name: str) -> ModelSizes:
    """Sizes of a model by the name of a known shape, a folder with config.json, or a hub id.

    Raises:
        ModelLoadError: no such model, or one that is not supported.
        ConfigError: an empty name.
    """
    if not name:
        raise ConfigError(f"model: expected a folder, a hub id, or one of {', '.join(SHAPES)}")
    found = SHAPES.get(name.lower())
    return (
        found
        if found is not None
        else sizes_of(load_config(Path(name) if Path(name).is_dir() else name), name)
    )
