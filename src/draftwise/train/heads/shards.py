"""Hidden states from files, as `draftwise extract` writes them, instead of computing them while training.

A folder of ``*.safetensors`` files, each with ``token_ids`` [n] and ``hidden_states`` [n, layers, H] of one text, or of
several with ``starts`` [texts + 1], where each begins and the last one ends. The layers (entering states; the number
of the target's layers for what leaves the last one, before the final norm) are named in the file's
metadata, ``layers``, as a JSON list, or in the folder's config.json (``eagle_aux_hidden_state_layer_ids``).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from draftwise.errors import ConfigError

from .batch import HeadBatch
from .data import MIN_TOKENS, PieceSource, head_batch
from .teacher import EngineTeacher, Taught, padded
from .text import Tokens


@dataclass(frozen=True, slots=True)
class Piece:
    """Where a piece of text lies: rows start..end of a file."""

    file: Path
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Shards:
    """All pieces of a folder, and where their hidden states lie."""

    pieces: list[Tokens]
    places: dict[int, Piece]  # id() of a piece's token list -> where it lies
    features: tuple[int, ...]  # columns of hidden_states that are features
    last: int  # column of what left the last layer


def read_shards(folder: Path, teacher: EngineTeacher, max_length: int) -> Shards:
    """Read the headers and token ids of all files.

    Raises:
        ConfigError: no files; a file that is empty, truncated, or holds other tensors; hidden states of another
            target or without the layers that training needs. The file is named.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ConfigError(f"--shards {folder}: no .safetensors files")
    pieces: list[Tokens] = []
    places: dict[int, Piece] = {}
    columns: tuple[tuple[int, ...], int] | None = None
    for file in files:
        ids, starts, layers = _header(file, teacher)
        found = _columns(file, layers, teacher)
        if columns is not None and found != columns:
            raise ConfigError(f"--shards {file}: layers {list(layers)} are not those of the files before it")
        columns = found
        for first, end in pairwise(starts):
            for start in range(first, end, max_length):
                stop = min(end, start + max_length)
                if stop - start >= MIN_TOKENS:
                    piece = Tokens(ids[start:stop], [True] * (stop - start))
                    pieces.append(piece)
                    places[id(piece.ids)] = Piece(file, start, stop)
    if not pieces:
        raise ConfigError(f"--shards {folder}: no text of at least {MIN_TOKENS} tokens")
    assert columns is not None
    return Shards(pieces, places, *columns)


def _header(file: Path, teacher: EngineTeacher) -> tuple[list[int], list[int], tuple[int, ...]]:
    """Return token ids, where texts start, and the layers of one file."""
    try:
        with safe_open(file, framework="pt") as handle:
            names = set(handle.keys())
            missing = {"token_ids", "hidden_states"} - names
            if missing:
                raise ConfigError(f"--shards {file}: tensor {min(missing)} is missing")
            ids: Tensor = handle.get_tensor("token_ids")
            shape = handle.get_slice("hidden_states").get_shape()
            starts = handle.get_tensor("starts").tolist() if "starts" in names else [0, len(ids)]
            metadata: dict[str, str] = handle.metadata() or {}
    except SafetensorError as error:
        what = "empty" if file.stat().st_size == 0 else "truncated or damaged"
        raise ConfigError(f"--shards {file}: the file is {what}: {error}") from error
    config = teacher.config
    if len(ids) == 0:
        raise ConfigError(f"--shards {file}: holds no tokens")
    if len(shape) != 3 or shape[0] != len(ids):
        raise ConfigError(f"--shards {file}: {len(ids)} tokens, but hidden_states has shape {list(shape)}")
    if shape[2] != config.hidden_size:
        raise ConfigError(
            f"--shards {file}: hidden size {shape[2]}, the target has {config.hidden_size}: it is of another target"
        )
    if int(ids.max()) >= config.vocab_size or int(ids.min()) < 0:
        raise ConfigError(f"--shards {file}: token {int(ids.max())} is not in the target's vocabulary")
    layers = _layers(file, metadata)
    if len(layers) != shape[1]:
        raise ConfigError(f"--shards {file}: {shape[1]} layers stored, {len(layers)} named: {list(layers)}")
    return ids.tolist(), starts, layers


def _layers(file: Path, metadata: dict[str, str]) -> tuple[int, ...]:
    text: Any = metadata.get("layers")
    config = file.parent / "config.json"
    if text is None and config.is_file():
        text = json.dumps(json.loads(config.read_text("utf-8")).get("eagle_aux_hidden_state_layer_ids"))
    try:
        layers = json.loads(text) if text is not None else None
    except json.JSONDecodeError:
        layers = None
    if not isinstance(layers, list) or not all(type(i) is int for i in layers):
        raise ConfigError(f"--shards {file}: does not say which layers it holds (metadata 'layers')")
    return tuple(layers)


def _columns(file: Path, layers: Sequence[int], teacher: EngineTeacher) -> tuple[tuple[int, ...], int]:
    """Return the columns of the features, and of what left the last layer."""
    needed = [*teacher.feature_layers, teacher.config.num_layers]
    missing = [i for i in needed if i not in layers]
    if missing:
        raise ConfigError(
            f"--shards {file}: layers {list(layers)} are stored, training needs {needed} "
            f"({teacher.config.num_layers}: what leaves the last one)"
        )
    return tuple(layers.index(i) for i in teacher.feature_layers), layers.index(needed[-1])


@dataclass(slots=True, kw_only=True)
class ShardSource(PieceSource):
    """Batches from files. Only the rows of a batch are read; distributions are computed from the last hidden state."""

    shards: Shards

    @torch.no_grad()
    def make_batch(self, pieces: Sequence[Tokens], least: int) -> HeadBatch:
        states = []
        for piece in pieces:
            place = self.shards.places[id(piece.ids)]
            try:
                with safe_open(place.file, framework="pt") as handle:
                    states.append(handle.get_slice("hidden_states")[place.start : place.end])
            except SafetensorError as error:
                raise ConfigError(f"--shards {place.file}: cannot be read: {error}") from error
        lengths = [len(state) for state in states]
        rows = torch.cat(states).to(self.teacher.device, self.teacher.dtype)
        hidden, probs = self.teacher.finish_hidden(rows[:, self.shards.last])
        features = rows[:, list(self.shards.features)].flatten(1)
        taught = Taught(*(padded(x, lengths) for x in (hidden, features, probs)))
        return head_batch(pieces, taught, least)
