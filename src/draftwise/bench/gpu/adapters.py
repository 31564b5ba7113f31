"""Part: what adapters add to a captured pass."""

from __future__ import annotations

from dataclasses import replace

import torch

from draftwise.bench.gpu.models import random_target
from draftwise.bench.gpu.report import PartReport
from draftwise.bench.gpu.setting import BLOCK, Setting
from draftwise.bench.gpu.steps import DRAFTS, filled_storage
from draftwise.graphs.buffers import Shape
from draftwise.graphs.capture import Captures
from draftwise.graphs.decoder import GraphedDecoder, on_device
from draftwise.models.inputs import build_step_input
from draftwise.models.lora.decoder import AdaptedDecoder
from draftwise.models.lora.low_rank import LowRank

_LAYERS = 4
_RANK = 16
_ADAPTERS = 2


@torch.inference_mode()
def measure_adapters(setting: Setting, report: PartReport) -> None:
    """Captured passes of a few layers, in which all requests have an adapter of rank 16, one of two, against the same
    without; and whether they give what a pass call by call gives."""
    size = setting.size
    model = AdaptedDecoder(random_target(setting, setting.ops(), _LAYERS))
    assert model.stack(_ADAPTERS, _RANK)
    sites = {
        part.name: (part.outputs, site.inputs) for site in model.inner.linear_sites() for part in site.parts
    }
    for number in range(1, 1 + _ADAPTERS):
        random = torch.Generator().manual_seed(number)
        made = {
            name: LowRank(
                torch.randn(_RANK, inputs, generator=random) * inputs**-0.5,
                torch.randn(outputs, _RANK, generator=random) * 0.02,
                1.0,
            )
            for name, (outputs, inputs) in sites.items()
        }
        model.load(number, made)
    most = max(requests for requests, _ in size.batches)
    shapes = dict.fromkeys((r, n) for r in (1, min(16, most), min(64, most)) for n in (1, 1 + DRAFTS))
    keys = size.max_len + 64
    graphed = GraphedDecoder(
        model, Captures(tuple(Shape(r, n, keys) for r, n in shapes)), BLOCK, setting.graphs()
    )
    kv = filled_storage(setting, model, max(r for r, _ in shapes) * -(-(size.context + 64) // BLOCK))
    graphed.prepare(kv)
    for requests, rows in shapes:
        plain = build_step_input(setting.rows(requests, rows, size.context), BLOCK, graphed.inputs_on)
        adapted = replace(plain, adapters=tuple(1 + i % _ADAPTERS for i in range(requests)))
        seconds = []
        for batch in (plain, adapted):
            replay = graphed.replay_of(batch, kv)
            assert replay is not None
            seconds.append(setting.time(replay))
        note = f"{seconds[0] * 1e3:.2f} ms without; {_LAYERS} layers, and the output layer"
        name = f"{requests} requests x {rows} rows: with adapters / without"
        report.at_most(name, seconds[1] / seconds[0], 1.25, "x", note)
        # copied: the next pass writes over them
        found = graphed.forward_logits(adapted, kv)[1].clone()
        wanted = model.forward_logits(on_device(adapted, setting.device), kv)[1].clone()
        bare = graphed.forward_logits(plain, kv)[1]
        apart = (found - wanted).norm() / (found - bare).norm()
        report.at_most(
            f"{requests} x {rows}: apart from calls, as a part of what adapters add", float(apart), 0.1
        )
