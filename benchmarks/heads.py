"""What a draft token of EAGLE-3 costs, in layers of its target.

    python benchmarks/heads.py [--sizes demo 1b] [--requests 1 8] [--rounds 40] [--json]

Three slopes, never a difference of two single measurements. All are of recorded native passes over one row per request,
in one process, in an order that changes from round to round, on random weights made on the spot:

- a layer of the target: passes of its first 2, 4, ... layers, without logits;
- the head's output product: passes with 1, 2, ... products of the draft vocabulary's size;
- a draft token: chains of 1, 2, ... tokens, each in one native call, drawing included.

Each is called twice and the second call counts: weights of a small model are then where a model that decodes has them,
in the last cache, for all three alike.

``ratio`` is (draft token - product) / layer. Its floor is the ratio of the weights that are read: EAGLE-3's q, k and v
read token and feature side by side, twice the width. A slope is fitted in every round; printed are medians over the
rounds, with quartiles.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from draftwise.kernels.cpu.library import why_not_native
from draftwise.kernels.cpu.ops import NativeOps
from draftwise.kernels.cpu.program import Program
from draftwise.kernels.cpu.recording import Recording
from draftwise.kernels.select import default_ops
from draftwise.kv.storage import KVStorage
from draftwise.models.base import DecoderModel
from draftwise.models.heads.base import HeadModel, TargetLink
from draftwise.models.heads.eagle3 import Eagle3Head, Eagle3Options
from draftwise.models.heads.recorded import recorded_head
from draftwise.models.inputs import RowInput, build_step_input
from draftwise.models.llama import LlamaModel
from draftwise.models.recorded import recorded
from draftwise.models.weights import WeightPlan
from draftwise.types import StepInput

CPU = torch.device("cpu")
CONTEXT = 256  # tokens that every row attends to
BLOCK = 16
CALLS = 5  # per variant and round; their median counts


@dataclass(frozen=True)
class Size:
    """A target, the draft vocabulary of its head, and how many of its layers are measured."""

    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    draft_vocab: int
    depths: tuple[int, ...]

    def config(self) -> dict[str, Any]:
        return {
            "vocab_size": self.draft_vocab,
            "hidden_size": self.hidden,
            "intermediate_size": self.inner,
            "num_hidden_layers": max(self.depths),
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "max_position_embeddings": 2 * CONTEXT,
            "tie_word_embeddings": False,
        }

    def floor(self) -> float:
        """Weights of the head's layer over those of a target's."""
        qkv = self.hidden * (self.heads + 2 * self.kv_heads) * self.head_dim
        rest = self.hidden * self.heads * self.head_dim + 3 * self.hidden * self.inner
        return (2 * qkv + rest) / (qkv + rest)


SIZES = {
    "demo": Size(256, 704, 4, 2, 64, 3072, (1, 2, 3, 4)),
    "1b": Size(2048, 5632, 32, 4, 64, 8192, (1, 2, 3, 4, 5)),
}
PRODUCTS = (1, 2, 3, 4)
STEPS = (1, 2, 4, 6, 8)


def random_fill(plan: WeightPlan) -> None:
    generator = torch.Generator().manual_seed(0)

    def read(targets: Any) -> None:
        for tensor in targets.values():
            if tensor.dim() == 1:
                tensor.fill_(1.0)
            else:
                tensor.normal_(0.0, 0.02, generator=generator)

    plan.fill_with(read)


def make_target(size: Size, ops: NativeOps) -> DecoderModel:
    plan = WeightPlan(ops.dtype, CPU)
    model = LlamaModel(LlamaModel.parse(size.config(), "LlamaForCausalLM"), ops, plan)
    random_fill(plan)
    model.finish()
    return recorded(model, ops)


def make_head(size: Size, target: DecoderModel, ops: NativeOps) -> HeadModel:
    shared = target.shared_weights()
    link = TargetLink(
        vocab_size=size.draft_vocab,
        hidden_size=size.hidden,
        num_layers=max(size.depths),
        max_model_len=2 * CONTEXT,
        embedding=shared.embedding,
        head=shared.head,
    )
    plan = WeightPlan(ops.dtype, CPU)
    config = replace(target.config, num_layers=1, sliding_window=(None,))
    head = Eagle3Head(config, Eagle3Options(feature_layers=None), link, ops, plan)
    random_fill(plan)
    head.finish()
    return recorded_head(head, ops)


def make_products(size: Size, count: int, ops: NativeOps) -> Program:
    """A pass of nothing but a row and ``count`` products of it, each with weights of its own."""
    generator = torch.Generator().manual_seed(1)
    recording = Recording(ops.dtype)
    rows = torch.randn(16, size.hidden, generator=generator).to(ops.dtype)
    x = ops.embedding(recording.token_ids, rows)
    picked = logits = recording.pick(x)
    for _ in range(count):
        weight = torch.randn(size.draft_vocab, size.hidden, generator=generator).mul_(0.02).to(ops.dtype)
        logits = ops.logits(picked, ops.pack_head(weight))
    return recording.finish(ops.library, ops.pool, x, {}, logits)


def storage(model: DecoderModel | HeadModel, requests: int) -> KVStorage:
    blocks = requests * (2 * CONTEXT // BLOCK)
    return KVStorage(model.kv_layout(), blocks, BLOCK, model.dtype, CPU)


def one_row_each(requests: int, token: int = 5, position_offset: int = 0) -> StepInput:
    each = 2 * CONTEXT // BLOCK
    return build_step_input(
        [
            RowInput([token], CONTEXT, np.arange(i * each, (i + 1) * each, dtype=np.int32))
            for i in range(requests)
        ],
        BLOCK,
        CPU,
        position_offset,
    )


def variants(size: Size, requests: int, ops: NativeOps) -> dict[tuple[str, int], Callable[[], object]]:
    """(what, how many of it) -> one call."""
    target = make_target(size, ops)
    head = make_head(size, target, ops)
    batch = one_row_each(requests)
    calls: dict[tuple[str, int], Callable[[], object]] = {}
    for depth in size.depths:
        part = target if depth == max(size.depths) else target.first_layers(depth)
        kv = storage(part, requests)
        calls["layer", depth] = lambda part=part, kv=kv: part.forward(batch, kv)
    for count in PRODUCTS:
        program = make_products(size, count, ops)
        calls["product", count] = lambda program=program: program.run(batch, requests)
    own = one_row_each(requests, position_offset=-1)
    features = torch.randn(requests, size.hidden, generator=torch.Generator().manual_seed(2)).to(ops.dtype)
    kv = storage(head, requests)
    for steps in STEPS:
        calls["draft token", steps] = lambda steps=steps: head.draft_chains(own, features, kv, None, steps)
    return calls


def slope(points: Sequence[tuple[int, float]]) -> float:
    """Least squares."""
    mean_x = statistics.fmean(x for x, _ in points)
    mean_y = statistics.fmean(y for _, y in points)
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / spread


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    low, middle, high = statistics.quantiles(values, n=4)
    return low, middle, high


@torch.inference_mode()
def measure(name: str, requests: int, rounds: int) -> dict[str, Any]:
    size = SIZES[name]
    ops = default_ops(torch.bfloat16, CPU)
    if not isinstance(ops, NativeOps):
        raise SystemExit(f"the native kernels are what is measured: {why_not_native()}")
    calls = variants(size, requests, ops)
    order = list(calls)
    shuffle = random.Random(0).shuffle
    found: dict[str, list[float]] = {"layer": [], "product": [], "draft token": [], "ratio": []}
    for turn in range(rounds + 2):
        times: dict[tuple[str, int], list[float]] = {key: [] for key in order}
        for _ in range(CALLS):
            shuffle(order)
            for key in order:
                calls[key]()
                start = time.perf_counter()
                calls[key]()
                times[key].append(time.perf_counter() - start)
        if turn < 2:  # warming up
            continue
        slopes = {
            what: slope(
                [(n, statistics.median(series)) for (kind, n), series in times.items() if kind == what]
            )
            for what in ("layer", "product", "draft token")
        }
        for what, value in slopes.items():
            found[what].append(value * 1e6)
        found["ratio"].append((slopes["draft token"] - slopes["product"]) / slopes["layer"])
    return {
        "size": name,
        "requests": requests,
        "floor": size.floor(),
        "threads": ops.pool.threads,
        **{what: quartiles(values) for what, values in found.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=list(SIZES))
    parser.add_argument(
        "--requests", nargs="+", type=int, default=[1, 8], help="requests drafted for at once"
    )
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--json", action="store_true", help="machine-readable")
    options = parser.parse_args()
    rows = [measure(name, n, options.rounds) for name in options.sizes for n in options.requests]
    if options.json:
        print(json.dumps(rows, indent=2))
        return
    print("microseconds: median (quartiles)")
    for row in rows:
        print(f"{row['size']}, {row['requests']} at once, {row['threads']} threads")
        for what in ("layer", "product", "draft token"):
            low, middle, high = row[what]
            print(f"  {what:<12} {middle:9.1f} ({low:.1f} to {high:.1f})")
        low, middle, high = row["ratio"]
        print(f"  {'ratio':<12} {middle:9.2f} ({low:.2f} to {high:.2f}), floor {row['floor']:.2f}")


if __name__ == "__main__":
    main()
