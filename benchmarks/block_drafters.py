"""A block drafter beside the heads that ship for the embedded target: what is accepted, and what it costs.

    draftwise train demo-heads --heads dspark --out my-heads
    python benchmarks/block_drafters.py my-heads/dspark [--requests 1 4 16] [--prompts 16] [--rounds 3] [--json]

Every method drafts what it was made for, as a chain and as a dynamic tree, greedily and at temperature 0.8, with 1, 4
and 16 requests at once, static control. Methods take turns within a round, plain decoding among them; speeds are ratios
of medians to plain decoding's. Tokens per step are exact: they do not depend on the machine.

The last columns are what a draft costs beside what it must read: seconds per byte of weights that the draft reads (a
chain of K reads a head K times, a block its layers once and the output of its Markov head K times), over the same of
plain decoding's forward pass. 1: as dear as the target's own bytes. First the drafter's passes alone, then all that
the engine does to draft.

With ``--calls`` nothing but calls is timed, in turns, medians of many, of which the caches stay warm: the one that
stores three new tokens of each request and drafts a whole block, MTP's chain of four, the target's pass of one row per
request, and of as many as are verified.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from draftwise import LLM, SamplingParams
from draftwise.bench.measure import Series, measure, rotated, speculation_of
from draftwise.bench.workloads import code_prompts
from draftwise.config.embedded import embedded_path
from draftwise.models.inputs import RowInput, build_step_input
from draftwise.types import ChainDraws, ChainKey, StepInput

SHIPPED = {"mtp": 4, "eagle3": 4}
"""Heads and how many tokens they draft."""


@dataclass(frozen=True)
class Line:
    """One row of the table."""

    temperature: float
    requests: int
    method: str
    tokens_per_step: float
    accepted: tuple[float, ...]
    speed: float
    """Over plain decoding."""
    draft_bytes: int
    pass_per_byte: float | None
    """Seconds of a draft's passes, over plain decoding's; with one request only, where passes read weights and little
    else."""
    cost_per_byte: float | None
    """The same of all that is done to draft."""


def draft_bytes(method: str, folder: Path, drafts: int, shared: int) -> int:
    """Bytes of weights that one draft reads: the head's tensors, and the target's output layer (``shared``) if the head
    has none, for each pass. Of an embedding a few rows are read."""
    sizes = tensor_bytes(folder / "model.safetensors")
    once = sum(
        size for name, size in sizes.items() if not name.endswith(("embed_tokens.weight", "markov_w1.weight"))
    )
    if not any(name.endswith("lm_head.weight") for name in sizes):
        once += shared
    again = sum(size for name, size in sizes.items() if name.endswith("markov_w2.weight"))
    return once + again * (drafts - 1) if method == "dflash" else once * drafts


def tensor_bytes(path: Path) -> dict[str, int]:
    """Bytes of each tensor of a safetensors file."""
    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    header.pop("__metadata__", None)
    return {name: end - start for name, info in header.items() for start, end in [info["data_offsets"]]}


KNOWN, NEW, BLOCK = 100, 3, 16
"""Tokens of each request, how many of them the drafter has not seen, and tokens of a block of the cache."""
VERIFIED = (5, 9, 17)
"""Rows of a request when a chain of 4 or 8 drafts, or a tree of 16, is verified."""


def last_rows(requests: int, new: int, offset: int) -> StepInput:
    """The last ``new`` tokens of each request."""
    blocks = -(-KNOWN // BLOCK) + 1
    given = [
        RowInput(
            list(range(5, 5 + new)), KNOWN - new, np.arange(r * blocks, (r + 1) * blocks, dtype=np.int32)
        )
        for r in range(requests)
    ]
    return build_step_input(given, BLOCK, torch.device("cpu"), offset)


def seconds(call: Callable[[], object], times: int) -> float:
    """Median of ``times`` calls."""
    found = []
    for _ in range(times):
        begun = time.perf_counter()
        call()
        found.append(time.perf_counter() - begun)
    return statistics.median(found)


def calls_of(llm: LLM, requests: int) -> dict[str, Callable[[], object]]:
    """What is timed, by name."""
    executor: Any = llm._engine.core.executor  # type: ignore[union-attr]
    proposers = executor._drafting._proposers
    block, mtp = proposers["dflash"], proposers["mtp"]
    model, storage = executor._model, executor._storage
    batch = last_rows(requests, NEW, -1)
    last = (batch.attention.query_start_np[1:] - 1).tolist()
    features = torch.randn(NEW * requests, block._head.feature_size).to(block._head.dtype)
    draws = ChainDraws("draft", tuple(ChainKey(7 + r, 0, KNOWN, 0, 1.25) for r in range(requests)))

    def chain(proposer: Any, steps: int, how: ChainDraws | None) -> Callable[[], object]:
        kv = proposer._passes.kv
        return lambda: proposer._head.draft_chains(batch, features, kv, last, steps, how)

    def target(count: int) -> Callable[[], object]:
        own = last_rows(requests, count, 0)
        return lambda: model.forward_logits(own, storage, None, ())

    return {
        "target": target(1),
        **{f"target, {count} rows": target(count) for count in VERIFIED},
        "block": chain(block, block._most, None),
        "block, drawn": chain(block, block._most, draws),
        "mtp": chain(mtp, 4, None),
        "mtp, drawn": chain(mtp, 4, draws),
    }


def time_calls(drafter: Path, counts: Sequence[int], rounds: int, shared: int, target: int) -> None:
    """Print what one call costs, beside MTP's chain of four and the target's pass of one row per request."""
    specs: list[dict[str, Any]] = [
        {"method": "dflash", "model": str(drafter)},
        {"method": "mtp", "num_speculative_tokens": 4},
    ]
    with LLM(speculative_config=specs, speculation_control="static", max_num_seqs=max(counts)) as llm:
        for spec in specs:  # storages are there once somebody has drafted
            params = SamplingParams(max_tokens=8, speculation={"method": spec["method"]})
            llm.generate(["def main():"], params, use_tqdm=False)
        places = llm.config.drafters[0].num_speculative_tokens or 1
        reads = {"target": target, "mtp": draft_bytes("mtp", embedded_path("mtp"), 4, shared)}
        reads["block"] = draft_bytes("dflash", drafter, places, shared)
        print(f"{'req':>3} {'call':16} {'us':>7} {'MB':>6} {'per byte':>9}")
        for requests in counts:
            found: dict[str, list[float]] = {}
            with torch.inference_mode():
                calls = calls_of(llm, requests)
                for _ in range(rounds):
                    for name, call in calls.items():
                        found.setdefault(name, []).append(seconds(call, 80 if requests < 8 else 20))
            plain = statistics.median(found["target"]) / target
            for name, times in found.items():
                size, took = reads[name.split(",")[0]], statistics.median(times)
                print(
                    f"{requests:3d} {name:16} {1e6 * took:7.0f} {size / 1e6:6.1f} {took / size / plain:9.2f}"
                )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("drafter", type=Path, help="folder of a block drafter for the embedded target")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.8])
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output-tokens", type=int, default=96)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--calls", action="store_true", help="time the calls that draft, and nothing else")
    args = parser.parse_args()
    config = json.loads((embedded_path("target") / "config.json").read_text())
    shared = config["vocab_size"] * config["hidden_size"] * 2
    target_bytes = (embedded_path("target") / "model.safetensors").stat().st_size
    if args.calls:
        time_calls(args.drafter, args.requests, args.rounds, shared, target_bytes)
        return
    specs: list[dict[str, Any]] = [{"method": "dflash", "model": str(args.drafter)}]
    specs += [{"method": name, "num_speculative_tokens": count} for name, count in SHIPPED.items()]
    lines: list[Line] = []
    with LLM(speculative_config=specs, speculation_control="static", max_num_seqs=max(args.requests)) as llm:
        drafts = {spec.method: spec.num_speculative_tokens for spec in llm.config.drafters}
        reads = {
            name: draft_bytes(
                name, args.drafter if name == "dflash" else embedded_path(name), drafts[name] or 1, shared
            )
            for name in ("dflash", *SHIPPED)
        }
        prompts = code_prompts(llm.get_tokenizer(), args.prompts, 64)
        names = ["none", *(f"{name}{shape}" for name in reads for shape in ("", "/tree"))]
        for temperature in args.temperatures:
            for requests in args.requests:
                series = {name: Series(name, temperature) for name in names}
                for turn in range(args.rounds):
                    for start in range(0, len(prompts), requests):
                        for name in rotated(names, turn + start):
                            params = SamplingParams(
                                temperature=temperature,
                                max_tokens=args.output_tokens,
                                ignore_eos=True,
                                speculation=speculation_of(name),
                            )
                            sample = measure(llm, prompts[start : start + requests], params)
                            series[name].samples.append(sample)
                plain = series.pop("none")
                plain_cost = plain.per_step("forward_time") / target_bytes
                for name, one in series.items():
                    method, _, shape = name.partition("/")
                    passes: float | None = None
                    whole: float | None = None
                    if requests == 1 and not shape:
                        passes, whole = (
                            one.per_step(what) / reads[method] / plain_cost
                            for what in ("draft_forward_time", "draft_time")
                        )
                    lines.append(
                        Line(
                            temperature,
                            requests,
                            name,
                            one.tokens_per_step,
                            one.acceptance_per_position,
                            one.tokens_per_second / plain.tokens_per_second,
                            reads[method],
                            passes,
                            whole,
                        )
                    )
    if args.json:
        print(json.dumps([asdict(line) for line in lines], indent=2))
        return
    print(
        f"{'temp':>4} {'req':>3} {'method':12} {'tokens/step':>11} {'over plain':>10} {'MB/draft':>8} "
        f"{'pass/byte':>9} {'cost/byte':>9}"
    )
    for line in lines:
        costs = ["" if x is None else f"{x:.2f}" for x in (line.pass_per_byte, line.cost_per_byte)]
        print(
            f"{line.temperature:4g} {line.requests:3d} {line.method:12} {line.tokens_per_step:11.2f} "
            f"{line.speed:10.2f} {line.draft_bytes / 1e6:8.1f} {costs[0]:>9} {costs[1]:>9}  "
            + " ".join(f"{100 * share:.0f}" for share in line.accepted)
        )


if __name__ == "__main__":
    main()
