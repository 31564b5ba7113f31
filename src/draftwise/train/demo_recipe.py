"""The demo recipe: sizes, numbers that decide the weights, options that do not. No torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class LlamaShape:
    """Sizes of a Llama model with tied embeddings."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    max_positions: int
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5

    def hf_config(self, dtype: str, eos_id: int) -> dict[str, Any]:
        """Return `config.json`, with the rope's base spelt for old and for new readers."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "max_position_embeddings": self.max_positions,
            "rms_norm_eps": self.norm_eps,
            "rope_theta": self.rope_theta,
            "rope_scaling": None,
            "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_theta},
            "tie_word_embeddings": True,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "mlp_bias": False,
            "initializer_range": 0.02,
            "bos_token_id": None,
            "eos_token_id": eos_id,
            "pad_token_id": None,
            "use_cache": True,
            "dtype": dtype,
            "torch_dtype": dtype,
        }


@dataclass(frozen=True, slots=True)
class Schedule:
    """Warm up, hold, fall linearly to zero: three numbers say it all, so that a run can be repeated."""

    steps: int
    decay_steps: int
    warmup_steps: int = 30

    def factor(self, step: int) -> float:
        """Return the learning-rate factor of 0-based `step`."""
        left = (self.steps - step) / max(1, self.decay_steps)
        return max(0.0, min(1.0, (step + 1) / self.warmup_steps, left))


TARGET = LlamaShape(
    vocab_size=4096,
    hidden_size=256,
    num_layers=12,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    intermediate_size=704,
    max_positions=1024,
)
"""Deep and narrow, 9.9 M parameters: a step takes long for its size, as large models' steps do."""

DRAFT = replace(TARGET, num_layers=2, intermediate_size=320)
"""1.9 M parameters. Two layers, since copying a name needs two; as wide as the target."""


@dataclass(frozen=True, slots=True)
class DemoRecipe:
    """Everything that decides the weights. Steps of 0 are chosen from the time budget."""

    target: LlamaShape = TARGET
    draft: LlamaShape = DRAFT
    seed: int = 0
    batch_windows: int = 6
    """Windows of `target.max_positions` tokens per step."""
    short_cut: int = 2
    """Sequences each window is cut into until the last `long_steps`: short ones train faster."""
    test_parts: int = 2
    """Each epoch takes one of so many parts of the library's own tests."""
    joint: Schedule = field(default_factory=lambda: Schedule(steps=0, decay_steps=0))
    long_steps: int = 0
    """Last steps of the joint stage, with sequences as long as the context."""
    distil: Schedule = field(default_factory=lambda: Schedule(steps=0, decay_steps=0, warmup_steps=1))
    decay_share: float = 0.45
    """Share of the joint stage in which the learning rate falls, where a budget decides."""
    long_share: float = 0.15
    muon_lr: float = 0.02
    adam_lr: float = 0.004
    draft_muon_lr: float = 0.02
    draft_adam_lr: float = 0.004
    weight_decay: float = 0.1
    """Weight decay of the matrices, times the learning rate."""
    distil_factor: float = 0.7
    """Learning rate at the start of the distil stage, relative to the draft model's own."""
    variation_weight: float = 1.0
    """Weight of the total variation distance in the distil stage: one minus it is the chance of acceptance."""


@dataclass(frozen=True, slots=True)
class RunOptions:
    """Where and how to run: with the same text, nothing here changes the weights that given steps lead to."""

    work: Path
    root: Path | None = None
    """The library's folder; the running interpreter's by default."""
    joint_minutes: float = 0.0
    distil_minutes: float = 0.0
    resume: bool = False
    compile: bool = True
    checkpoint_seconds: float = 240.0
    validation_windows: int = 16
    stop_after: int = 0
    """Stop, as if interrupted, after so many steps of this process (0: never)."""

    def minutes(self, stage: str) -> float:
        """Return the time budget of a stage."""
        return self.joint_minutes if stage == "joint" else self.distil_minutes


@dataclass(slots=True)
class TrainState:
    """The state of training; saved with every checkpoint."""

    stage: str = "joint"
    step: int = 0
    """Steps done in this stage."""
    tokens: int = 0
    """Target tokens seen in the joint stage."""
    draft_tokens: int = 0
    seconds: float = 0.0
    stage_seconds: float = 0.0
    history: list[dict[str, float]] = field(default_factory=list)


def recipe_to_json(recipe: DemoRecipe) -> dict[str, Any]:
    """Return the recipe as plain numbers, for checkpoints and provenance."""
    return asdict(recipe)


def recipe_from_json(data: dict[str, Any]) -> DemoRecipe:
    """Undo `recipe_to_json`."""
    shapes = {key: LlamaShape(**data[key]) for key in ("target", "draft")}
    schedules = {key: Schedule(**data[key]) for key in ("joint", "distil")}
    return DemoRecipe(**{**data, **shapes, **schedules})
