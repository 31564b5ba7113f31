"""Record a decoder's pass once, replay it with one native call.

A model's forward is calls of `Ops` and nothing else. Run it with `Symbol`s instead of tensors and `NativeOps` writes
down what is to be done: a list of operations over numbered buffers. The number of rows is known only when a pass
runs, so one recording serves every batch. On the way, products are fused with what follows them: gate/up with SiLU, the
output projections with the residual addition.

Buffers, symbols and the end of a recording are in `tape`, operations row by row in `row_tape`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from draftwise.kernels.base import HeadShape
from draftwise.kernels.cpu.adapters import NativeAdditions
from draftwise.kernels.cpu.attention import DTYPES, KV_DTYPES, check_rotated, is_latent, kv_parts, sinks_of
from draftwise.kernels.cpu.checks import require
from draftwise.kernels.cpu.experts import NativeExperts
from draftwise.kernels.cpu.heads import NativeHeads
from draftwise.kernels.cpu.row_tape import RowTape
from draftwise.kernels.cpu.tape import ADAPT, RecordingError, Symbol, as_tensor, buffer_of
from draftwise.kernels.ranks import Ranks, vocabulary_step

# dw::OpKind of csrc/program.h
_ROPE_WRITE, _ATTENTION, _EXPERTS, _HEADS, _COLUMNS = 6, 7, 12, 19, 20
_SUM_RANKS, _GATHER_RANKS, _GATHER_PART = 60, 61, 62


class Recording(RowTape):
    """A program in the making; `NativeOps` appends to it what it would have done."""

    def experts(self, x: object, scores: object, experts: NativeExperts) -> Tensor:
        source, choosing = buffer_of(x), buffer_of(scores)
        require(
            source.dtype is experts.dtype and source.width == experts.hidden,
            "rows of the experts' type and width",
        )
        require(
            choosing.dtype is torch.float32 and choosing.width == experts.routing.num_scores,
            "a float32 score for each expert",
        )
        out = self._new(source.width, self._dtype)
        self._kept.append(experts)
        self._append(
            _EXPERTS,
            x=source.number,
            y=choosing.number,
            out=out.buffer.number,
            width=source.width,
            weight=experts.pointer,
        )
        return as_tensor(out)

    def heads(self, x: object, weight: NativeHeads) -> Tensor:
        source = buffer_of(x)
        require(
            source.dtype is weight.dtype and source.width == weight.count * weight.inputs, "rows of all heads"
        )
        out = self._new(weight.count * weight.outputs, self._dtype)
        self._kept.append(weight)
        self._append(
            _HEADS,
            x=source.number,
            out=out.buffer.number,
            width=source.width,
            out_width=weight.count * weight.outputs,
            weight=weight.pointer,
        )
        return as_tensor(out)

    def add_low_rank(self, x: object, out: object, additions: NativeAdditions, site: int) -> None:
        """See `Ops.add_low_rank`. What the layer makes is no plain product any more, with which others are fused."""
        source, target = buffer_of(x), buffer_of(out)
        sizes = additions.sites[site]
        require((source.width, target.width) == (sizes.inputs, sizes.outputs), "rows of the layer's sizes")
        require(source.dtype is target.dtype is self._dtype, "rows of the model's type")
        self._kept.append(additions)
        self._append(
            ADAPT,
            x=source.number,
            out=target.number,
            width=source.width,
            out_width=target.width,
            num_heads=site,
            weight=additions.pointer,
            weight2=self._exchange(additions.ranks) if sizes.summed and additions.ranks is not None else None,
        )

    def columns(self, x: object, start: int, count: int) -> Tensor:
        source = buffer_of(x)
        require(start >= 0 and count > 0 and start + count <= source.width, "columns that there are")
        out, size = self._new(count, source.dtype), source.dtype.itemsize
        self._append(
            _COLUMNS,
            x=source.number,
            out=out.buffer.number,
            width=source.width * size,
            out_width=count * size,
            head_dim=start * size,
        )
        return as_tensor(out)

    def sum_ranks(self, x: object, ranks: Ranks) -> Tensor:
        target = self._changed(x)
        self._append(
            _SUM_RANKS,
            x=target.number,
            width=target.width,
            dtype=DTYPES[target.dtype],
            weight=self._exchange(ranks),
        )
        return as_tensor(Symbol(target))

    def gather_ranks(self, x: object, total: int, ranks: Ranks) -> Tensor:
        source = buffer_of(x)
        step = vocabulary_step(total, ranks.part.size)
        own = min(step, total - ranks.part.rank * step)
        require(source.dtype is torch.float32 and source.width == own, "this rank's columns, float32")
        out = self._new(total, torch.float32)
        self._append(
            _GATHER_RANKS,
            x=source.number,
            out=out.buffer.number,
            width=step,
            out_width=total,
            weight=self._exchange(ranks),
        )
        return as_tensor(out)

    def gather_part(self, index: object, table: Tensor, first: int) -> Tensor:
        """Rows ``index`` of a table [N, H] that begins with row ``first``; zeros for those that it lacks."""
        require(table.is_contiguous(), "a contiguous table")
        width = table.stride(0)
        out = self._new(width, table.dtype)
        self._append(
            _GATHER_PART,
            x=buffer_of(index).number,
            out=out.buffer.number,
            width=width * table.element_size(),
            out_width=table.shape[0],
            num_heads=first,
            weight=self._pointer(table),
        )
        return as_tensor(out)

    def _exchange(self, ranks: Ranks) -> int:
        pointer = getattr(ranks, "pointer", None)
        if not isinstance(pointer, int):
            raise RecordingError("these ranks do not exchange through shared memory")
        self._kept.append(ranks)
        return pointer

    def qkv_rope_write(
        self,
        qkv: object,
        heads: HeadShape,
        rotation: object,
        kv: tuple[Tensor, ...],
        slots: object,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
    ) -> Tensor:
        """Queries are rotated where they stand: the result is the same buffer."""
        if slots is not self.slots:
            raise RecordingError("rows are written to the slots of the batch and to no others")
        packed, turns = buffer_of(qkv), buffer_of(rotation)
        entries, scales = kv_parts(kv)
        check_rotated(heads.head_dim)
        require(
            packed.width == (heads.num_heads + entries.shape[1]) * heads.head_dim,
            "rows and a cache of the same heads",
        )
        require(
            turns.dtype is torch.float32 and turns.width == heads.head_dim, "a float32 rotation for each row"
        )
        self._append(
            _ROPE_WRITE,
            x=packed.number,
            y=turns.number,
            num_heads=heads.num_heads,
            num_kv_heads=heads.num_kv_heads,
            head_dim=heads.head_dim,
            eps=eps,
            width=entries.shape[0],
            weight=self._pointer(q_norm),
            weight2=self._pointer(k_norm),
            kv=self._pointer(entries),
            kv_scales=self._pointer(scales),
            kv_dtype=KV_DTYPES[entries.dtype],
            epilogue=is_latent(entries, heads.num_kv_heads, heads.head_dim),
        )
        return as_tensor(Symbol(packed))

    def attention(
        self,
        q: object,
        kv: tuple[Tensor, ...],
        heads: HeadShape,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None = None,
        whole: bool = False,
    ) -> Tensor:
        packed = buffer_of(q)
        entries, scales = kv_parts(kv)
        sinks_of(sinks, heads.num_heads)
        out = self._new(heads.num_heads * heads.head_dim, self._dtype)
        self._append(
            _ATTENTION,
            x=packed.number,
            out=out.buffer.number,
            num_heads=heads.num_heads,
            num_kv_heads=heads.num_kv_heads,
            head_dim=heads.head_dim,
            window=window or 0,
            scale=scale,
            softcap=softcap or 0.0,
            weight=self._pointer(sinks),
            width=packed.width,
            kv=self._pointer(entries),
            kv_scales=self._pointer(scales),
            kv_dtype=KV_DTYPES[entries.dtype],
            epilogue=is_latent(entries, heads.num_kv_heads, heads.head_dim) + 2 * whole,
        )
        return as_tensor(out)


def recording_of(symbol: Symbol) -> Recording:
    """The one that it belongs to."""
    assert isinstance(symbol.program, Recording)
    return symbol.program
