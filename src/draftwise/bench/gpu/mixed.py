"""Part: a chunk of a prompt beside decoding requests, kernel by kernel and in pieces."""

from __future__ import annotations

from collections.abc import Callable

import torch

from draftwise.bench.gpu.models import random_target
from draftwise.bench.gpu.report import PartReport
from draftwise.bench.gpu.setting import BLOCK, Setting
from draftwise.bench.gpu.steps import filled_storage
from draftwise.graphs.buffers import Shape
from draftwise.graphs.capture import Captures
from draftwise.graphs.decoder import GraphedDecoder
from draftwise.graphs.sizes import piece_rows
from draftwise.models.base import DecoderModel
from draftwise.models.inputs import RowInput, build_step_input


@torch.inference_mode()
def measure_mixed(setting: Setting, report: PartReport) -> None:
    """Steps of decoding requests with and without a chunk, from host data to logits: what the host adds is in them."""
    size = setting.size
    decodes = min(16, max(requests for requests, _ in size.batches))
    chunks = [n for n in (32, 256) if decodes + n <= size.prefill] or [size.prefill // 2]
    inputs = setting.rows(decodes + 1, max(chunks), size.context)
    model = random_target(setting, setting.ops())
    sizes = piece_rows(max_num_batched_tokens=size.prefill)
    needed = {min(n for n in sizes if n >= decodes + chunk) for chunk in chunks}
    captures = Captures((Shape(decodes, 1, size.max_len + 64),), pieces=tuple(sorted(needed)))
    graphed = GraphedDecoder(model, captures, BLOCK, setting.graphs())
    kv = filled_storage(setting, model, sum(len(row.block_table_np) for row in inputs))
    graphed.prepare(kv)

    def step(run: DecoderModel, chunk: int) -> Callable[[], torch.Tensor]:
        rows = [RowInput(r.tokens[:1], size.context, r.block_table_np) for r in inputs[:decodes]]
        if chunk:
            rows.append(RowInput(inputs[-1].tokens[:chunk], size.context, inputs[-1].block_table_np))

        def whole() -> torch.Tensor:
            batch = build_step_input(rows, BLOCK, run.inputs_on)
            last = (batch.attention.query_start_np[1:] - 1).tolist()
            return run.forward_logits(batch, kv, last)[1]

        return whole

    alone = setting.time(step(graphed, 0))
    report.add(f"{decodes} rows, one graph", alone * 1e3, "ms")
    for chunk in chunks:
        eager, pieces = step(model, chunk), step(graphed, chunk)
        name = f"{decodes} rows and a chunk of {chunk}"
        wanted, found = eager(), pieces()
        # sums of other numbers of rows may be ordered otherwise
        error = float((wanted - found).abs().max() / wanted.std())
        report.at_most(
            f"{name}: in pieces, largest error", error, 0.1, note="of a logit, in deviations of logits"
        )
        by_kernel, in_pieces = setting.time(eager), setting.time(pieces)
        report.add(f"{name}: kernel by kernel", by_kernel * 1e3, "ms")
        report.add(f"{name}: in pieces", in_pieces * 1e3, "ms")
        report.add(f"{name}: in pieces / kernel by kernel", in_pieces / by_kernel, "x")
        report.add(f"{name}: in pieces / no chunk", in_pieces / alone, "x")
    assert graphed.num_piecewise, "the passes were captured"
