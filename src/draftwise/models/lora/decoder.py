"""A model whose requests have adapters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from draftwise.errors import ConfigError
from draftwise.kernels.additions import Addition, Additions
from draftwise.kernels.cpu.program import Program
from draftwise.kernels.stacked import StackedAdditions
from draftwise.kv.storage import KVStorage
from draftwise.models.base import DecoderModel, SharedWeights
from draftwise.models.lora.low_rank import LowRank
from draftwise.models.lora.ops import AdaptedOps, AddingOps, PackedAdapter, additions_of, check_fits, site_of
from draftwise.models.recorded import RecordedDecoder
from draftwise.models.wrapped import WrappedDecoder
from draftwise.types import AttentionBatch, StateRows, StepInput, TargetOutput


class AdaptedDecoder(WrappedDecoder):
    """``plain`` for batches without an adapter, and the same weights with low-rank additions for the others.

    Where passes are recorded, one recording with additions serves requests with and without an adapter in one pass: in
    it a row without one has the very bits of ``plain``. Elsewhere requests without an adapter are computed by ``plain``
    as if there were no others, so that they have these bits, too; the rest are one pass, call by call, and a batch of
    both kinds reads the weights twice. Whoever captures passes asks for places for adapters first (`stack`): a pass
    whose `StaticRows` has adapters is captured with additions.
    """

    def __init__(self, plain: DecoderModel) -> None:
        """
        Raises:
            ConfigError: the model's linear layers take no additions.
        """
        super().__init__(plain)
        base = plain.inner if isinstance(plain, RecordedDecoder) else plain
        try:
            self._sites = base.linear_sites()
            self._with = base.operations()
            self._ops = AdaptedOps(self._with)
            self._base, self._adapted = base, base.with_operations(self._ops.as_ops)
        except NotImplementedError as error:
            raise ConfigError(f"enable_lora: {error}") from error
        self._additions: dict[int, list[Addition | None]] = {}
        self._packed: dict[int, PackedAdapter] = {}  # what passes call by call have needed
        self._recorded: RecordedDecoder | None = None
        self._kept: Additions | None = None  # of passes that are recorded or captured
        self._captured: tuple[DecoderModel, StackedAdditions] | None = None
        if isinstance(plain, RecordedDecoder) and plain.records:
            kept = self._with.pack_additions([site_of(site) for site in self._sites])
            if kept is not None:
                self._recorded = plain.of(self._adding(kept))
                self._kept = None if self._recorded is None else kept

    def stack(self, count: int, rank: int) -> bool:
        """Let passes with adapters be captured: of adapters of up to this rank, so many at a time. False: they cannot
        be, because layers are shared by ranks, or are no operations of a model's own."""
        sites = [site_of(site) for site in self._sites]
        if self._adapted is self._base or any(site.summed for site in sites):
            return False
        stacked = StackedAdditions(sites, count, rank, self._with.dtype, self._with.device)
        self._kept, self._captured = stacked, (self._adding(stacked), stacked)
        return True

    @property
    def captures_adapters(self) -> bool:
        """Whether passes with adapters can be captured."""
        return self._captured is not None

    def place_of(self, adapter: int) -> int | None:
        """Where captured passes find an adapter; None: it cannot be added in them."""
        return None if self._captured is None else self._captured[1].place_of(adapter)

    def weight_bytes(self) -> int:
        return super().weight_bytes() + (0 if self._captured is None else self._captured[1].num_bytes)

    def _adding(self, additions: Additions) -> DecoderModel:
        return self._base.with_operations(AddingOps(self._with, additions, self._sites).as_ops)

    # ----------------------------------------------------------------------------------------------- adapters

    def check(self, adapter: Mapping[str, LowRank]) -> None:
        """
        Raises:
            ModelLoadError: the adapter is for another model.
        """
        check_fits(adapter, self._sites)

    def load(self, slot: int, adapter: Mapping[str, LowRank]) -> None:
        """Pack an adapter that was checked, under a number that no other has. Between two passes."""
        assert slot > 0
        if slot in self._additions:
            return  # Ctrl-C came between this and the caller's note of it
        with torch.inference_mode():
            additions = additions_of(adapter, self._sites, self._with.dtype, self._with.device)
            if self._kept is not None:
                self._kept.put(slot, additions)
        self._additions[slot] = additions if self._recorded is None else []  # none goes call by call

    def drop(self, slot: int) -> None:
        """Let go of an adapter that no request has. Between two passes."""
        self._packed.pop(slot, None)
        if self._additions.pop(slot, None) is not None and self._kept is not None:
            self._kept.drop(slot)

    # ------------------------------------------------------------------------------------------------- passes

    def forward(self, batch: StepInput, kv: KVStorage, capture: Sequence[int] = ()) -> TargetOutput:
        return self._run(batch, kv, None, capture, logits=False)[0]

    def forward_logits(
        self, batch: StepInput, kv: KVStorage, rows: Sequence[int] | None = None, capture: Sequence[int] = ()
    ) -> tuple[TargetOutput, Tensor]:
        output, found = self._run(batch, kv, rows, capture, logits=True)
        assert found is not None
        return output, found

    def logits_alone(self, batch: StepInput, kv: KVStorage, rows: Sequence[int] | None = None) -> Tensor:
        model = self._whole_pass(batch)
        return super().logits_alone(batch, kv, rows) if model is None else model.logits_alone(batch, kv, rows)

    def pass_of(self, kv: KVStorage, capture: Sequence[int], *, adapted: bool = False) -> Program | None:
        if adapted:
            return None if self._recorded is None else self._recorded.pass_of(kv, capture)
        return self.inner.pass_of(kv, capture)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.inner.logits(hidden)

    def shared_weights(self) -> SharedWeights:
        return self.inner.shared_weights()

    def first_layers(self, count: int) -> DecoderModel:
        return self.inner.first_layers(count)

    def prepare(self, kv: KVStorage, capture: Sequence[int] = ()) -> None:
        self.inner.prepare(kv, capture)

    def _run(
        self,
        batch: StepInput,
        kv: KVStorage,
        rows: Sequence[int] | None,
        capture: Sequence[int],
        logits: bool,
    ) -> tuple[TargetOutput, Tensor | None]:
        model = self._whole_pass(batch)
        if model is not None:
            if logits:
                return model.forward_logits(batch, kv, rows, capture)
            return model.forward(batch, kv, capture), None
        assert batch.adapters is not None
        groups = self._groups(np.asarray(batch.adapters))
        if len(groups) == 1:
            output = self._with_adapters(batch, kv, capture)
        else:
            found: list[tuple[TargetOutput, Tensor]] = []
            for which in groups:
                part, at = part_of(batch, which)
                assert part.adapters is not None
                run = self._with_adapters if any(part.adapters) else self.inner.forward
                found.append((run(part, kv, capture), at))
            output = _joined(found)
        if not logits:
            return output, None
        chosen = output.hidden
        if rows is not None:
            chosen = chosen[torch.tensor(rows, dtype=torch.int64, device=chosen.device)]
        # by the plain model's own operation, of which a row's result is its own
        empty = chosen.new_empty((0, self.config.vocab_size), dtype=torch.float32)
        return output, self.inner.logits(chosen) if len(chosen) else empty

    def _whole_pass(self, batch: StepInput) -> DecoderModel | None:
        """The model that computes all of a batch in one pass; None: no such pass has a place for its adapters."""
        static = batch.attention.static
        if static is not None and static.adapters is not None:
            assert self._captured is not None
            model, stacked = self._captured
            stacked.for_pass(static.adapters, static.rows)
            return model
        if batch.adapters is None or not any(batch.adapters):
            return self.inner
        return self._recorded

    def _groups(self, adapters: npt.NDArray[np.int64]) -> list[npt.NDArray[np.bool_]]:
        """Requests [R] that are computed in one pass: without an adapter, and with adapters."""
        if self.inner.rows_in_order:
            groups = [adapters == 0, adapters > 0]
        else:
            groups = [adapters == slot for slot in np.unique(adapters)]
        return [which for which in groups if which.any()]

    def _packed_adapter(self, slot: int) -> PackedAdapter:
        found = self._packed.get(slot)
        if found is None:
            found = self._packed[slot] = PackedAdapter(self._additions[slot], self._sites, self._with)
        return found

    def _with_adapters(self, batch: StepInput, kv: KVStorage, capture: Sequence[int]) -> TargetOutput:
        assert batch.adapters is not None
        starts = batch.attention.query_start_np
        places: dict[int, list[npt.NDArray[np.int64]]] = {}
        for i, slot in enumerate(batch.adapters):
            places.setdefault(slot, []).append(np.arange(starts[i], starts[i + 1], dtype=np.int64))
        missing = places.keys() - self._additions.keys()
        assert not missing, f"adapters {sorted(missing)} are not loaded"
        groups: list[tuple[Tensor | None, PackedAdapter]] = []
        for slot, found in places.items():
            index = None if len(places) == 1 else torch.from_numpy(np.concatenate(found)).to(self.device)
            groups.append((index, self._packed_adapter(slot)))
        self._ops.begin(groups)
        try:
            return self._adapted.forward(replace(batch, adapters=None), kv, capture)
        finally:
            self._ops.end()


def adapted_of(model: DecoderModel) -> AdaptedDecoder | None:
    """What takes adapters in a model that may be wrapped; None: nothing does."""
    while isinstance(model, WrappedDecoder):
        if isinstance(model, AdaptedDecoder):
            return model
        model = model.inner
    return None


def part_of(batch: StepInput, which: npt.NDArray[np.bool_]) -> tuple[StepInput, Tensor]:
    """The requests ``which`` [R] of a batch as a batch of their own, and their rows in the whole, int64 [n]."""
    whole = batch.attention
    assert whole.static is None and whole.apart is None
    counts = np.diff(whole.query_start_np)
    rows_np = np.flatnonzero(np.repeat(which, counts))
    rows = torch.from_numpy(rows_np).to(batch.token_ids.device)
    ancestors = whole.ancestors_np
    attention = AttentionBatch(
        query_start_np=np.concatenate([[0], np.cumsum(counts[which])]).astype(whole.query_start_np.dtype),
        context_len_np=whole.context_len_np[which],
        is_tree_np=whole.is_tree_np[which],
        block_tables_np=np.ascontiguousarray(whole.block_tables_np[which]),
        ancestors_np=None if ancestors is None or not whole.is_tree_np[which].any() else ancestors[rows_np],
        block_size=whole.block_size,
        first_key_np=None if whole.first_key_np is None else whole.first_key_np[which],
        tree_start_np=None if whole.tree_start_np is None else whole.tree_start_np[which],
    )
    states = None
    if batch.states is not None:
        indices = np.flatnonzero(which).tolist()
        slots, revocable = batch.states
        states = StateRows([slots[i] for i in indices], [revocable[i] for i in indices])
    adapters = batch.adapters
    if adapters is not None:
        adapters = tuple(adapter for adapter, taken in zip(adapters, which, strict=True) if taken)
    part = StepInput(
        batch.token_ids[rows], batch.positions[rows], batch.slots[rows], attention, states, adapters
    )
    return part, rows


def _joined(parts: Sequence[tuple[TargetOutput, Tensor]]) -> TargetOutput:
    """Results of parts of a batch, with their rows in the whole, as those of the whole."""
    total = sum(len(rows) for _, rows in parts)

    def join(found: list[Tensor]) -> Tensor:
        out = found[0].new_empty((total, found[0].shape[1]))
        for (_, rows), x in zip(parts, found, strict=True):
            out[rows] = x
        return out

    captured = {layer: join([o.captured[layer] for o, _ in parts]) for layer in parts[0][0].captured}
    return TargetOutput(join([output.hidden for output, _ in parts]), captured)
