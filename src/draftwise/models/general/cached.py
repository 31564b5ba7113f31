"""The second way: attention stays the model's own, and its cache is ours.

Models that keep attention to themselves still hand their keys and values to a cache and take all of them back. So each
request is a sequence of its own, whose past stands in our paged cache. A tree becomes its paths: each leaf with its
ancestors is a sequence, causal as the model knows it; no mask of ours has to reach its scores, and biases by distance
(ALiBi) are those of plain decoding. Sequences of one past and one length are one call.

Example: a request with 10 keys and the tree ``root, a, b, a1`` (parents of nodes -1, -1, 0), beside one with 10 keys
and 2 new rows: the paths are ``root a a1`` and ``root b``, the calls [root a a1] and [root b | the other's two]. The
root is computed twice, stored once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicIndexedLayer

from draftwise.attention.base import request_ancestors, request_slots, tree_start
from draftwise.errors import ModelLoadError
from draftwise.kv.storage import KVLayerSpec, KVStorage, dequantized, write_entries
from draftwise.models.general.ways import Part
from draftwise.transfer import to_device
from draftwise.types import AttentionBatch, StepInput

IntArray = npt.NDArray[np.int64]
KEYS, VALUES, INDEX = "keys", "values", "index"


class Cached:
    """A cache for every call, in which the call's sequences have their past."""

    name = "its own attention over our cache"
    cost = " (requests of different lengths are computed one after the other)"

    def __init__(self, layout: Sequence[KVLayerSpec], first_position: int | None) -> None:
        """
        Args:
            layout: from `layout_of`; number i of it is the model's layer i.
            first_position: what the model calls the position of a sequence's first token; None: the model counts for
                itself, from the length of the past.
        """
        self._layout, self._first = tuple(layout), first_position

    @property
    def layout(self) -> tuple[KVLayerSpec, ...]:
        return self._layout

    def parts(self, batch: StepInput, kv: KVStorage) -> Sequence[Part]:
        return list(self._parts(batch, kv))

    def _parts(self, batch: StepInput, kv: KVStorage) -> Iterator[Part]:
        device, total = batch.token_ids.device, len(batch.token_ids)
        known = np.zeros(total, np.bool_)  # rows that an earlier sequence has computed
        for sequences in sequences_of(batch.attention):
            numbers = sequences.rows.reshape(-1)
            new = np.zeros(len(numbers), np.bool_)
            new[np.unique(numbers, return_index=True)[1]] = True
            new &= ~known[numbers]
            known[numbers] = True
            rows = to_device(numbers, device)
            own = batch.slots[rows]
            places = None if new.all() else to_device(np.flatnonzero(new), device)
            count, length = sequences.rows.shape
            slots = torch.cat([to_device(sequences.past, device), own.view(count, length)], 1)
            call = _Call(
                own if places is None else own[places], places, slots.reshape(-1), count, length
            )  # fmt: skip
            cache = Cache(layers=[_PagedLayer(call, spec, kv.layer(i)) for i, spec in enumerate(kv.layout)])
            arguments: dict[str, Any] = {"past_key_values": cache, "use_cache": True}
            if self._first is not None:
                arguments["position_ids"] = (batch.positions[rows] + self._first).view(count, length)
            yield Part(
                batch.token_ids[rows].view(count, length), arguments,
                rows=rows if places is None else rows[places], places=places,
            )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Sequences:
    """Some with P keys and n rows each."""

    past: IntArray  # [B, P] slots of keys
    rows: IntArray  # [B, n] rows of the batch


def sequences_of(batch: AttentionBatch) -> list[Sequences]:
    """Causal requests as they are, trees as paths; together what has the same past and length.

    A row may be in several: an inner node, or the root, is in the path of every leaf below it.
    """
    assert batch.first_key_np is None, "that is asked for draft heads alone"
    groups: dict[tuple[int, int], list[tuple[IntArray, IntArray]]] = {}
    for r in range(len(batch.context_len_np)):
        start, end = int(batch.query_start_np[r]), int(batch.query_start_np[r + 1])
        stored = int(batch.context_len_np[r])
        before = tree_start(batch, r)
        past = request_slots(batch, r, 0, stored + before)
        if not batch.is_tree_np[r]:
            groups.setdefault((stored, end - start), []).append((past, np.arange(start, end)))
            continue
        sees = request_ancestors(batch, r)  # [n, before + n]
        # A leaf is a row that only itself sees.
        for leaf in np.flatnonzero(sees[:, before:].sum(0) == 1):
            path = np.flatnonzero(sees[leaf])
            earlier, own = path[path < before], path[path >= before] - before
            slots = np.concatenate([past[:stored], past[stored + earlier]])
            groups.setdefault((len(slots), len(own)), []).append((slots, start + own))
    return [Sequences(np.stack([s for s, _ in g]), np.stack([r for _, r in g])) for g in groups.values()]


# ------------------------------------------------------------------------------------------------------ the cache


@dataclass(frozen=True, slots=True)
class _Call:
    """Data that all layers of a call share. Of its B * n rows, ``places`` are stored (None: all), in ``stores``."""

    stores: Tensor  # slots
    places: Tensor | None
    slots: Tensor  # [B * (P + n)] of each sequence's keys
    count: int  # B
    length: int  # n

    @property
    def past(self) -> int:
        return len(self.slots) // self.count - self.length


class _PagedLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """One layer's part of our cache, seen by one call."""

    is_sliding = False

    def __init__(self, call: _Call, spec: KVLayerSpec, tensors: tuple[Tensor, ...]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._call = call
        each = len(tensors) // max(1, len(spec.tensors))  # codes have scales behind them
        self._parts = {name: tensors[i * each : (i + 1) * each] for i, (name, _) in enumerate(spec.tensors)}
        self._length = call.past
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """[B, .., n, D] each -> [B, .., P + n, D]"""
        self._length = self._call.past + self._call.length
        return self._put(KEYS, key_states), self._put(VALUES, value_states)

    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
        """Keys by which sparse attention chooses, [B, n, D] -> [B, P + n, D]."""
        return self._put(INDEX, indexer_key_states)

    def _put(self, name: str, new: Tensor) -> Tensor:
        call, tensors = self._call, self._parts[name]
        entries = new.movedim(-2, 1)
        shape = entries.shape[2:]
        assert entries.shape[:2] == (call.count, call.length)
        entries = entries.reshape(-1, *shape)
        if call.places is not None:
            entries = entries[call.places]
        write_entries(tensors, call.stores, entries)
        taken = dequantized(tuple(part.index_select(0, call.slots) for part in tensors), new.dtype)
        return taken.view(call.count, -1, *shape).movedim(1, -2).contiguous()

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing: the cache is there."""

    @property
    def indexer_position_ids(self) -> Tensor | None:
        """Positions of the keys before, [3, B, P], where a model wants to have kept them; None: there are none."""
        call = self._call
        if not call.past:
            return None
        return torch.arange(call.past, device=call.slots.device).expand(3, call.count, -1)

    @indexer_position_ids.setter
    def indexer_position_ids(self, value: Tensor) -> None:
        """They follow from the number of keys."""

    def get_seq_length(self) -> int:
        return self._length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Keys that `update` will give, and the position of the first of them."""
        return self._call.past + query_length, 0

    def get_max_length(self) -> int:
        """The length of a cache that grows."""
        return -1


# --------------------------------------------------------------------------------------------------------- at load


def probe_cache(num_layers: int = 0) -> Any:
    """For one pass of a few tokens, by which `layout_of` tells what the layers keep; it grows if they are more."""
    cache = Cache(layer_class_to_replicate=DynamicIndexedLayer)
    cache.layers += [DynamicIndexedLayer() for _ in range(num_layers)]  # type: ignore[no-untyped-call]
    return cache


def layout_of(cache: Any, tokens: int) -> tuple[KVLayerSpec, ...]:
    """The tensors that each layer has put into `probe_cache`.

    Raises:
        ModelLoadError: nothing, or not one entry per token.
    """
    layout = []
    for number, layer in enumerate(cache.layers):
        found = ((KEYS, layer.keys), (VALUES, layer.values), (INDEX, layer.indexer_keys))
        kept = [(name, x) for name, x in found if x is not None]
        for name, x in kept:
            if x.ndim < 3 or x.shape[0] != 1 or x.shape[-2] != tokens:
                raise ModelLoadError(
                    f"layer {number} keeps {name} of shape {list(x.shape)} for {tokens} tokens"
                )
        layout.append(KVLayerSpec(tuple((name, tuple(x.movedim(-2, 1).shape[2:])) for name, x in kept)))
    if not any(spec.tensors for spec in layout):
        raise ModelLoadError("its code puts no keys and values into a cache")
    return tuple(layout)
