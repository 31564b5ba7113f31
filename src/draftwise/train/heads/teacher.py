"""A target as the teacher of draft heads: hidden states and distributions, computed by the engine's own model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from draftwise.errors import ConfigError, ModelLoadError
from draftwise.kv.storage import KVStorage
from draftwise.models.base import DecoderModel
from draftwise.models.checkpoint import copy_tensors, scan_checkpoint
from draftwise.models.config import ModelConfig
from draftwise.models.inputs import RowInput, build_step_input
from draftwise.models.loader import load_model
from draftwise.models.paths import resolve_path

from .layers import HeadShape

_BLOCK = 16
_EMBEDDING = "model.embed_tokens.weight"
_HEAD = "lm_head.weight"
_NORM = "model.norm.weight"


def default_feature_layers(num_layers: int) -> tuple[int, ...]:
    """Return the target layers whose entering states EAGLE-3 eats: 2, the middle one, the last but two.

    Example: 12 layers -> (2, 6, 9). Very shallow targets give fewer.
    """
    wanted = {2, num_layers // 2, num_layers - 3}
    return tuple(sorted(i for i in wanted if 0 < i < num_layers)) or (num_layers - 1,)


def default_block_layers(num_layers: int) -> tuple[int, ...]:
    """Return the target layers whose entering states a block drafter eats: up to five, evenly, the last one what leaves
    the target's last layer.

    Examples: 12 layers -> (3, 6, 9, 12); 36 -> (7, 14, 22, 29, 36).
    """
    count = min(5, max(1, num_layers // 3))
    return tuple(round(num_layers * (i + 1) / count) for i in range(count))


def head_shape(config: ModelConfig, intermediate_size: int | None = None) -> HeadShape:
    """Return the sizes of a head's decoder layer: the target's own, but for the MLP if asked for."""
    return HeadShape(
        hidden_size=config.hidden_size,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        intermediate_size=intermediate_size or config.intermediate_size,
        norm_eps=config.norm_eps,
        rope=config.rope,
    )


@dataclass(frozen=True, slots=True)
class Taught:
    """The target's results, one row of tokens after the other, padded to the longest."""

    hidden: Tensor  # [B, S, H] after the final norm
    features: Tensor  # [B, S, layers * H]
    probs: Tensor  # [B, S, V]


class EngineTeacher:
    """Any dense target that the engine loads.

    Args:
        folder: the target, a folder or hub id.
        feature_layers: captured for `Taught.features`.
        dtype: what the heads compute in.
        device: where.

    Raises:
        ModelLoadError: the target cannot be loaded, or its embedding is not stored under the usual name.
        ConfigError: a feature layer that the target does not have.
    """

    def __init__(
        self, folder: str | Path, feature_layers: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> None:
        self.folder = resolve_path(folder)
        self.model: DecoderModel = load_model(self.folder, dtype=dtype, device=device)
        if self.model.state_spec() is not None:
            raise ConfigError(
                f"{self.model.config.architecture} carries recurrent state; heads are not trained for such models"
            )
        self.config, self.dtype, self.device = self.model.config, dtype, device
        self.feature_layers: tuple[int, ...] = ()
        self.choose_features(feature_layers)
        matrices = read_matrices(self.folder, self.config, dtype)
        self.embedding = matrices[_EMBEDDING].to(device)
        self.lm_head = matrices[_HEAD].to(device)
        self._storage: KVStorage | None = None

    def choose_features(self, layers: Sequence[int]) -> None:
        """Capture these layers' entering hidden states from now on, in ascending order.

        Raises:
            ConfigError: a layer that the target does not have.
        """
        bad = [i for i in layers if not 0 <= i <= self.config.num_layers]
        if bad:
            raise ConfigError(
                f"--feature-layers: the target has {self.config.num_layers} layers, there is no {bad[0]}"
            )
        self.feature_layers = tuple(sorted(layers))

    @torch.no_grad()  # not inference mode: heads' gradients are taken through what it returns
    def teach(self, rows: Sequence[Sequence[int]]) -> Taught:
        """Compute rows of tokens, each from position 0."""
        counts = [-(-len(row) // _BLOCK) for row in rows]
        if self._storage is None or self._storage.num_blocks < sum(counts):
            self._storage = KVStorage(
                self.model.kv_layout(), sum(counts), _BLOCK, self.model.dtype, self.device
            )
        starts = np.cumsum([0, *counts])
        inputs = [
            RowInput(row, 0, np.arange(first, first + count, dtype=np.int32))
            for row, first, count in zip(rows, starts, counts, strict=False)
        ]
        batch = build_step_input(inputs, _BLOCK, self.device)
        output, logits = self.model.forward_logits(batch, self._storage, None, self.feature_layers)
        probs = torch.softmax(logits, -1).to(self.dtype)
        captured = [output.captured[i] for i in self.feature_layers]
        features = torch.cat(captured, -1) if captured else output.hidden[:, :0]
        lengths = [len(row) for row in rows]
        return Taught(*(padded(x, lengths) for x in (output.hidden, features, probs)))

    def finish_hidden(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return (hidden after the final norm, probs) of rows [n, H] that left the last layer."""
        norm = read_matrices(self.folder, self.config, torch.float32, (_NORM,))[_NORM].to(self.device)
        wide = hidden.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.config.norm_eps)
        done = (wide * scale * norm).to(self.dtype)
        return done, torch.softmax(torch.nn.functional.linear(done, self.lm_head).float(), -1).to(self.dtype)


def padded(rows: Tensor, lengths: Sequence[int]) -> Tensor:
    """Turn rows [sum of lengths, X] of a ragged batch into [B, longest, X], zeros behind."""
    out = torch.zeros((len(lengths), max(lengths), rows.shape[-1]), dtype=rows.dtype, device=rows.device)
    start = 0
    for i, length in enumerate(lengths):
        out[i, :length] = rows[start : start + length]
        start += length
    return out


def read_matrices(
    folder: Path, config: ModelConfig, dtype: torch.dtype, names: Sequence[str] = (_EMBEDDING, _HEAD)
) -> dict[str, Tensor]:
    """Read tensors of a target's checkpoint that its heads start from; a tied output matrix is the embedding.

    Raises:
        ModelLoadError: one is missing.
    """
    entries = scan_checkpoint(folder)
    out: dict[str, Tensor] = {}
    for name in names:
        stored = _EMBEDDING if name == _HEAD and (config.tied or _HEAD not in entries) else name
        if stored in out:
            out[name] = out[stored]
            continue
        if stored not in entries:
            raise ModelLoadError(f"{folder} has no tensor {stored}, which heads are trained from")
        out[name] = torch.empty(entries[stored].shape, dtype=dtype)
        copy_tensors({stored: entries[stored]}, {stored: out[name]})
    return out
