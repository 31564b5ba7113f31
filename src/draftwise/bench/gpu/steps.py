"""Parts: one step of the target against the memory's bandwidth, verification and drafting against the step."""

from __future__ import annotations

import time

import torch

from draftwise.bench.gpu.models import random_head, random_target
from draftwise.bench.gpu.report import PartReport
from draftwise.bench.gpu.setting import BLOCK, Setting, tree_parents
from draftwise.graphs.buffers import Shape
from draftwise.graphs.capture import Captures
from draftwise.graphs.decoder import GraphedDecoder, on_device
from draftwise.graphs.head import GraphedHead
from draftwise.kv.storage import KVStorage
from draftwise.models.base import DecoderModel
from draftwise.models.inputs import build_step_input

DRAFTS = 3
"""K of the EAGLE-3 loops."""


def measure_bandwidth(setting: Setting, report: PartReport) -> None:
    """The bandwidth of a copy."""
    report.add("copy, bytes read and written", setting.bandwidth() / 1e12, "TB/s")


def filled_storage(setting: Setting, model: DecoderModel, blocks: int) -> KVStorage:
    """K/V with arbitrary numbers, for passes over contexts that were not computed."""
    kv = KVStorage(model.kv_layout(), blocks, BLOCK, model.dtype, setting.device, spare=True)
    for layer in range(len(model.kv_layout())):
        for part in kv.layer(layer):
            part.normal_(0.0, 0.5)
    return kv


@torch.inference_mode()
def measure_steps(setting: Setting, report: PartReport) -> None:
    """The target's step, and verification of chains and trees."""
    bandwidth = setting.bandwidth()
    ones: list[float] = []
    report.add("copy bandwidth in this run", bandwidth / 1e12, "TB/s")
    for invariant in (False, True) if setting.cuda else (False,):
        kind = "fixed tiles" if invariant else "default"
        model = random_target(setting, setting.ops(batch_invariant=invariant))
        ones.append(_measure_target(setting, report, model, kind, bandwidth))
        del model
        if setting.cuda:
            torch.cuda.empty_cache()

    if len(ones) == 2:
        report.add(
            "fixed tiles / default, one row", ones[1] / ones[0], "x", note="under 1.05: the default-to-be"
        )


def _measure_target(
    setting: Setting, report: PartReport, model: DecoderModel, kind: str, bandwidth: float
) -> float:
    """Seconds of the step of one request."""
    size = setting.size
    nodes = size.tree
    keys = size.max_len + 64
    most = max(requests for requests, _ in size.batches)
    shapes = [
        (1, 1),
        (1, 1 + DRAFTS),
        (1, 8),
        (1, 1 + nodes),
        (min(16, most), 1),
        (min(16, most), 1 + DRAFTS),
    ]
    captures = Captures(tuple(Shape(r, n, keys) for r, n in dict.fromkeys(shapes)))
    graphed = GraphedDecoder(model, captures, BLOCK, setting.graphs())
    context = size.context
    kv = filled_storage(setting, model, max(r for r, _ in shapes) * -(-(context + 64) // BLOCK))
    begun = time.perf_counter()
    graphed.prepare(kv)
    setting.synchronize()
    report.add(f"{kind}: capturing {len(captures.passes)} passes", time.perf_counter() - begun, "s")
    seconds: dict[tuple[int, int], float] = {}
    for requests, rows in dict.fromkeys(shapes):
        parents = tree_parents(nodes) if rows == 1 + nodes else None
        batch = build_step_input(setting.rows(requests, rows, context, parents), BLOCK, graphed.inputs_on)
        replay = graphed.replay_of(batch, kv)
        assert replay is not None
        seconds[requests, rows] = setting.time(replay)
        if requests == 1 and rows == 1:
            placed = on_device(batch, setting.device)
            eager = setting.time(lambda placed=placed: model.forward_logits(placed, kv))  # type: ignore[misc]
            report.add(f"{kind}: one row, not captured", eager * 1e3, "ms")
            whole = _host_time(setting, graphed, kv, requests, rows)
            report.at_most(f"{kind}: one row, host included / graph alone", whole / seconds[1, 1], 1.05, "x")
    one = seconds[1, 1]
    embedding = size.vocab * size.hidden * model.dtype.itemsize  # one row of it is read
    read = (
        model.weight_bytes()
        - embedding
        + size.context * KVStorage.bytes_per_block(model.kv_layout(), 1, model.dtype)
    )
    report.add(
        f"{kind}: one row, context {size.context}", one * 1e3, "ms", note=f"{read / one / 1e12:.2f} TB/s"
    )
    report.at_least(f"{kind}: one row, share of what bandwidth allows", read / bandwidth / one, 0.9)
    report.at_most(f"{kind}: 8 rows / one", seconds[1, 8] / one, 1.05, "x")
    report.at_most(f"{kind}: tree of {nodes} / one", seconds[1, 1 + nodes] / one, 1.15, "x")
    for requests, rows in list(seconds)[4:]:
        report.add(f"{kind}: {requests} requests x {rows} rows / one", seconds[requests, rows] / one, "x")
    return one


def _host_time(setting: Setting, graphed: GraphedDecoder, kv: KVStorage, requests: int, rows: int) -> float:
    """Seconds from host data to results that are there, as a step has them."""
    found = []
    for _ in range(max(3, setting.size.repeats)):
        setting.synchronize()
        begun = time.perf_counter()
        batch = build_step_input(setting.rows(requests, rows, setting.size.context), BLOCK, graphed.inputs_on)
        graphed.forward_logits(batch, kv)
        setting.synchronize()
        found.append(time.perf_counter() - begun)
    return sorted(found)[len(found) // 2]


@torch.inference_mode()
def measure_drafting(setting: Setting, report: PartReport) -> None:
    """EAGLE-3's loop of drafts against the target's step."""
    size = setting.size
    target = random_target(setting, setting.ops())
    head = random_head(setting, target)
    keys = size.max_len + 64
    counts = sorted({1, *(requests for requests, _ in size.batches if requests <= 64)})
    loops = tuple(Shape(requests, 1 + DRAFTS, keys) for requests in counts)
    graphed = GraphedHead(head, Captures((), loops, DRAFTS), BLOCK, setting.graphs())
    steps = Captures(tuple(Shape(requests, rows, keys) for requests in counts for rows in (1, 1 + DRAFTS)))
    model = GraphedDecoder(target, steps, BLOCK, setting.graphs())
    blocks = max(counts) * -(-(size.context + 64) // BLOCK)
    head_kv = KVStorage(head.kv_layout(), blocks, BLOCK, head.dtype, setting.device, spare=True)
    head_kv.layer(0)[0].normal_(0.0, 0.5)
    if setting.cuda:  # the K/V of many long requests would fill the device
        free, _ = torch.cuda.mem_get_info(setting.device)
        per_block = KVStorage.bytes_per_block(model.kv_layout(), BLOCK, model.dtype)
        counts = [c for c in counts if c * -(-(size.context + 64) // BLOCK) * per_block < 0.6 * free]
    kv = filled_storage(setting, target, max(counts) * -(-(size.context + 64) // BLOCK))
    model.prepare(kv)
    graphed.prepare(head_kv)
    for requests in counts:
        inputs = setting.rows(requests, 1 + DRAFTS, size.context)
        batch = build_step_input(inputs, BLOCK, graphed.inputs_on, position_offset=-1)
        features = torch.randn(requests * (1 + DRAFTS), head.feature_size, device=setting.device).to(
            head.dtype
        )
        loop = graphed.loop_of(batch, features, head_kv, DRAFTS)
        assert loop is not None
        drafting = setting.time(loop)
        plain = build_step_input(setting.rows(requests, 1, size.context), BLOCK, model.inputs_on)
        replay = model.replay_of(plain, kv)
        assert replay is not None
        step = setting.time(replay)
        name = f"batch {requests}"
        report.add(f"{name}: target's step", step * 1e3, "ms")
        report.add(f"{name}: {DRAFTS} drafts", drafting * 1e3, "ms")
        report.at_most(f"{name}: {DRAFTS} drafts / step", drafting / step, 0.25, "x")
        wide = build_step_input(setting.rows(requests, 1 + DRAFTS, size.context), BLOCK, model.inputs_on)
        verify = model.replay_of(wide, kv)
        assert verify is not None
        spent = setting.time(verify) + drafting
        report.add(
            f"{name}: verification + drafts / step", spent / step, "x", note="tokens per step to break even"
        )
