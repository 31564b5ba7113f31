"""Part: where the time of one step goes, kernel by kernel."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from draftwise.bench.gpu.models import random_head, random_target
from draftwise.bench.gpu.report import PartReport
from draftwise.bench.gpu.setting import BLOCK, Setting, tree_parents
from draftwise.bench.gpu.steps import DRAFTS, filled_storage
from draftwise.graphs.buffers import Shape
from draftwise.graphs.capture import Captures
from draftwise.graphs.decoder import GraphedDecoder
from draftwise.graphs.head import GraphedHead
from draftwise.graphs.sizes import piece_rows
from draftwise.kv.storage import KVStorage
from draftwise.models.inputs import RowInput, build_step_input

_LAYERS = 8
"""Layers of the profiled model: 3.5 GB of an 8 B shape's weights are far more than a second-level cache holds."""
_RUNS = 5
_ACTIVITIES = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
_SHOWN = 9
"""Kernels of a step that are named, those that take the longest."""


@dataclass(frozen=True, slots=True)
class KernelTime:
    """A kernel in one run: how often it is launched, and the seconds of all its launches."""

    name: str
    launches: float
    seconds: float


def kernel_times(events: Iterable[tuple[str, float]], runs: int) -> list[KernelTime]:
    """Sum up (name, seconds) of single launches in ``runs`` runs, the longest first.

    Example: two runs with a at 1 s, b at 2 s, a at 3 s each: [a: 2 launches, 4 s; b: 1 launch, 2 s].
    """
    count: dict[str, int] = defaultdict(int)
    spent: dict[str, float] = defaultdict(float)
    for name, seconds in events:
        count[name] += 1
        spent[name] += seconds
    found = [KernelTime(name, count[name] / runs, spent[name] / runs) for name in count]
    return sorted(found, key=lambda kernel: -kernel.seconds)


def profiled(setting: Setting, run: Callable[[], object], runs: int = _RUNS) -> list[KernelTime]:
    """The kernels that one call launches; none on a CPU."""
    run()
    setting.synchronize()
    if not setting.cuda:
        return []
    with torch.profiler.profile(activities=_ACTIVITIES) as profiler:
        for _ in range(runs):
            run()
        setting.synchronize()
    events = profiler.events() or []
    kernels = [e for e in events if "CUDA" in str(e.device_type)]
    return kernel_times(((e.name, e.device_time_total / 1e6) for e in kernels), runs)


@torch.inference_mode()
def profile_steps(setting: Setting, report: PartReport) -> None:
    """Steps of one and of many requests, chunks of a prompt behind contexts of several lengths, and the draft loop."""
    _profile_target(setting, report)
    _profile_drafts(setting, report)


def _profile_target(setting: Setting, report: PartReport) -> None:
    size = setting.size
    layers = min(_LAYERS, size.layers)
    behind = (0, 4 * size.context, 16 * size.context)
    model = random_target(setting, setting.ops(), layers, behind[-1] + size.prefill)
    many = min(64, max(requests for requests, _ in size.batches))
    chunk = min(512, size.prefill)
    keys = size.max_len + 64
    shapes = [(1, 1), (1, 1 + DRAFTS), (1, 1 + size.tree), (many, 1), (many, 1 + DRAFTS)]
    pieces = min(n for n in piece_rows(max_num_batched_tokens=size.prefill) if n >= chunk)
    captures = Captures(tuple(Shape(r, n, keys) for r, n in shapes), pieces=(pieces,))
    graphed = GraphedDecoder(model, captures, BLOCK, setting.graphs())
    blocks = max(many * -(-(size.context // 2 + 64) // BLOCK), -(-(behind[-1] + chunk) // BLOCK))
    kv = filled_storage(setting, model, blocks)
    graphed.prepare(kv)
    for requests, rows in shapes:
        context = size.context // 2 if requests > 1 else size.context
        parents = tree_parents(size.tree) if rows == 1 + size.tree else None
        batch = build_step_input(setting.rows(requests, rows, context, parents), BLOCK, graphed.inputs_on)
        replay = graphed.replay_of(batch, kv)
        assert replay is not None
        _report(setting, report, f"{requests} x {rows} rows, context {context}, {layers} layers", replay)
    for context in behind:

        def prompt(context: int = context) -> None:
            row: RowInput = setting.rows(1, chunk, context)[0]
            batch = build_step_input([row], BLOCK, graphed.inputs_on)
            graphed.forward_logits(batch, kv, [chunk - 1])

        _report(setting, report, f"a chunk of {chunk} behind {context}, {layers} layers", prompt)


def _profile_drafts(setting: Setting, report: PartReport) -> None:
    size = setting.size
    head = random_head(setting, random_target(setting, setting.ops(), min(4, size.layers)))
    shape = Shape(1, 1 + DRAFTS, size.max_len + 64)
    graphed = GraphedHead(head, Captures((), (shape,), DRAFTS), BLOCK, setting.graphs())
    inputs = setting.rows(1, 1 + DRAFTS, size.context)
    kv = KVStorage(
        head.kv_layout(), len(inputs[0].block_table_np), BLOCK, head.dtype, setting.device, spare=True
    )
    kv.layer(0)[0].normal_(0.0, 0.5)
    graphed.prepare(kv)
    batch = build_step_input(inputs, BLOCK, graphed.inputs_on, position_offset=-1)
    features = torch.randn(1 + DRAFTS, head.feature_size, device=setting.device).to(head.dtype)
    loop = graphed.loop_of(batch, features, kv, DRAFTS)
    assert loop is not None
    _report(setting, report, f"a loop of {DRAFTS} drafts of EAGLE-3", loop)


def _report(setting: Setting, report: PartReport, name: str, run: Callable[[], object]) -> None:
    whole = setting.time(run)
    report.add(name, whole * 1e6, "us")
    kernels = profiled(setting, run)
    if not kernels:
        return
    for place, kernel in enumerate(kernels[:_SHOWN], 1):
        each = kernel.seconds / kernel.launches * 1e6
        note = f"{kernel.launches:g} x {each:.1f} us: {kernel.name[:150]}"
        report.add(f"{name}: kernel {place}", kernel.seconds * 1e6, "us", note=note)
    rest = kernels[_SHOWN:]
    if rest:
        spent, count = sum(k.seconds for k in rest), sum(k.launches for k in rest)
        report.add(f"{name}: other kernels", spent * 1e6, "us", note=f"{count:g} launches")
    gaps = whole - sum(k.seconds for k in kernels)
    launches = sum(k.launches for k in kernels)
    report.add(f"{name}: between kernels", gaps * 1e6, "us", note=f"{launches:g} launches")
