"""What several engines behind one port cost and gain, against one engine with all cores and the whole cache.

    python benchmarks/fleet.py                 # all three, as JSON
    python benchmarks/fleet.py --only routing hits

- ``routing``: time of the router for one request, by the length of its prompt, half of which is cached somewhere; and
  the time to the first token of single requests, from fleet and engine in turns.
- ``hits``: the share of prompt tokens that are found cached in conversations of several turns: caches of N replicas,
  routed, and one cache of the same size. No model runs; the router hears of blocks as it does from engines.
- ``streams``: tokens per second of N engines that share the cores and the streams, and of one that has all. Both are
  alive all the time and work in turns. Processor time is that of all processes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np

from draftwise.fleet.router import Router
from draftwise.kv.events import BlocksRemoved, BlocksStored
from draftwise.kv.manager import KVManager
from draftwise.kv.prefix_cache import block_digests, root_digest

BLOCK = 16


def routing(replicas: int) -> dict[str, Any]:
    """Milliseconds of `Router.route` and `Router.begin` together, medians."""
    rng = np.random.default_rng(0)
    found = {}
    for length in (64, 512, 2048, 8192):
        router = Router(BLOCK)
        for name in range(replicas):
            router.add(name)
        times = []
        for number in range(200):
            prompt_np = rng.integers(0, 50_000, length).astype(np.int32)
            half = block_digests(root_digest(None), prompt_np, BLOCK, 0, length // BLOCK // 2)
            router.stored(number % replicas, half)
            start = time.perf_counter()
            route = router.route(prompt_np, max_tokens=64)
            ticket = router.begin(route, route.names[0])
            times.append(time.perf_counter() - start)
            router.end(ticket, 64)
        found[f"{length} tokens"] = round(1000 * statistics.median(times), 4)
    return found


class Cache:
    """One replica's cache, without a model: requests come one after the other."""

    def __init__(self, blocks: int) -> None:
        self.kv = KVManager(blocks, BLOCK)
        self.kv.log_events()

    def serve(self, rid: int, prompt_np: Any, output_np: Any) -> None:
        known_np = np.concatenate([prompt_np, output_np])
        computed, _ = self.kv.open(rid, prompt_np)
        if self.kv.reserve(rid, len(known_np) - computed) is None:
            raise SystemExit("the cache is too small for one request")
        self.kv.commit(rid, len(known_np) - computed, known_np)
        self.kv.release(rid)


def hits(replicas: int, blocks: int, talks: int, turns: int, seed: int = 0) -> dict[str, float]:
    """Shares of prompt tokens that were found cached. Conversations take turns in random order; some begin with the
    same instructions."""
    rng = np.random.default_rng(seed)
    one, parts = Cache(blocks * replicas), [Cache(blocks) for _ in range(replicas)]
    router = Router(BLOCK)
    for name in range(replicas):
        router.add(name)
    instructions = [rng.integers(0, 50_000, 200).astype(np.int32) for _ in range(4)]
    texts = [
        np.concatenate([instructions[i % 4], rng.integers(0, 50_000, 40).astype(np.int32)])
        for i in range(talks)
    ]
    order = rng.permutation(np.repeat(np.arange(talks), turns))
    for rid, talk in enumerate(order.tolist()):
        prompt_np = texts[talk]
        output_np = rng.integers(0, 50_000, int(rng.integers(20, 200))).astype(np.int32)
        one.serve(rid, prompt_np, output_np)
        route = router.route(prompt_np)
        name = route.names[0]
        assert isinstance(name, int)
        ticket = router.begin(route, name)
        parts[name].serve(rid, prompt_np, output_np)
        for event in parts[name].kv.take_events():
            if isinstance(event, BlocksStored):
                router.stored(name, event.digests)
            elif isinstance(event, BlocksRemoved):
                router.removed(name, event.digests)
        router.end(ticket, len(output_np))
        question_np = rng.integers(0, 50_000, int(rng.integers(10, 60))).astype(np.int32)
        texts[talk] = np.concatenate([prompt_np, output_np, question_np])
    whole = one.kv.stats()
    several = [cache.kv.stats() for cache in parts]
    together = sum(s.prefix_hits for s in several) / sum(s.prefix_queries for s in several)
    alone = whole.prefix_hits / whole.prefix_queries
    return {"one cache": alone, "replicas": together, "ratio": together / alone}


def processor_seconds() -> float:
    """Of this process and of those that it started and that are alive."""
    total, tick = 0.0, os.sysconf("SC_CLK_TCK")
    children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text(encoding="ascii").split()
    for pid in (str(os.getpid()), *children):
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        total += (int(fields[11]) + int(fields[12])) / tick
    return total


async def engines(args: argparse.Namespace) -> dict[str, Any]:
    """``streams``, and the first tokens of ``routing``."""
    from draftwise import AsyncLLM, SamplingParams
    from draftwise.config import resolve_engine_config
    from draftwise.fleet.engine import FleetEngine
    from draftwise.fleet.replicas import plan

    params = SamplingParams(
        max_tokens=args.tokens, temperature=0, ignore_eos=True, output_kind="delta",
        speculation={"method": args.method},
    )  # fmt: skip
    single = SamplingParams(max_tokens=1, temperature=0, output_kind="delta", speculation={"method": "none"})
    rng = np.random.default_rng(1)
    config = resolve_engine_config(data_parallel_size=args.replicas, device="cpu")
    made: dict[str, Any] = {
        "one engine": AsyncLLM.from_config(
            resolve_engine_config(device="cpu"), max_chunk_rate=args.chunk_rate
        ),
        "fleet": FleetEngine(config, max_chunk_rate=args.chunk_rate),
    }
    threads = plan(config, 0, None, slot=0, count=args.replicas)[0].config.num_threads
    # What a replica would be without a fleet: its first token is what the fleet's is compared to.
    made["replica alone"] = AsyncLLM.from_config(resolve_engine_config(device="cpu", num_threads=threads))

    async def read(llm: Any, ids: list[int], how: Any) -> int:
        stream = llm.submit({"prompt_token_ids": ids}, how)
        count = 0
        async for piece in stream.pieces():
            count += piece.num_tokens if hasattr(piece, "num_tokens") else len(piece.outputs[0].token_ids)
        stream.close()
        return count

    def prompt(length: int) -> list[int]:
        return rng.integers(5, 900, length).tolist()  # type: ignore[no-any-return]

    async def many(llm: Any) -> tuple[float, float]:
        prompts = [prompt(32) for _ in range(args.streams)]
        start, before = time.perf_counter(), processor_seconds()
        tokens = sum(await asyncio.gather(*(read(llm, ids, params) for ids in prompts)))
        return (time.perf_counter() - start) / tokens, (processor_seconds() - before) / tokens

    pair = ("one engine", "fleet")
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in pair}
    firsts: dict[str, list[float]] = {"replica alone": [], "fleet": []}
    busy_first = dict.fromkeys(firsts, 0.0)
    try:
        for turn in range(args.turns + 1):
            for name in pair if "streams" in args.only else ():
                result = await many(made[name])
                if turn:  # the first one fills caches and learns what steps cost
                    times[name].append(result)
        for turn in range(args.firsts // 25 if "routing" in args.only else 0):
            for name in sorted(firsts, reverse=bool(turn % 2)):
                before = processor_seconds()
                for _ in range(25):
                    ids = prompt(64)
                    start = time.perf_counter()
                    await read(made[name], ids, single)
                    firsts[name].append(time.perf_counter() - start)
                busy_first[name] += processor_seconds() - before
    finally:
        for llm in made.values():
            await asyncio.to_thread(llm.close)
    report: dict[str, Any] = {}
    if "streams" in args.only:
        for name, pairs in times.items():
            wall, busy = (statistics.median(column) for column in zip(*pairs, strict=True))
            report[name] = {"tokens per second": 1 / wall, "processor us per token": 1e6 * busy}
        ratios = [
            (a[0] / b[0], a[1] / b[1]) for a, b in zip(times["one engine"], times["fleet"], strict=True)
        ]
        report["fleet over one engine, wall"] = statistics.median(r[0] for r in ratios)
        report["fleet over one engine, processor time"] = statistics.median(r[1] for r in ratios)
    if firsts["fleet"]:
        for name, values in firsts.items():
            deciles = statistics.quantiles(values, n=10)
            report[f"first token of {name} in ms"] = {
                "least": 1000 * min(values), "10 %": 1000 * deciles[0], "median": 1000 * statistics.median(values),
                "processor time": 1000 * busy_first[name] / len(values),
            }  # fmt: skip
    return report


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    kinds = ("routing", "hits", "streams")
    parser.add_argument("--only", nargs="+", choices=kinds, default=kinds)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64, help="of each stream (64)")
    parser.add_argument("--method", default="none", help="how streams are drafted (none)")
    parser.add_argument("--turns", type=int, default=5, help="measurements of each (5)")
    parser.add_argument(
        "--firsts", type=int, default=100, help="single requests of each, a multiple of 25 (100)"
    )
    parser.add_argument(
        "--chunk-rate", type=float, default=2500.0, help="pieces of all streams per second (2500)"
    )
    args = parser.parse_args()
    report: dict[str, Any] = {}
    if "routing" in args.only:
        report["router, ms per request"] = routing(args.replicas)
    if "hits" in args.only:
        report["hits"] = hits(args.replicas, 512, talks=40, turns=8)
        report["hits, small caches"] = hits(args.replicas, 192, talks=40, turns=8)
    if {"routing", "streams"} & set(args.only):
        report["engines"] = asyncio.run(engines(args))
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
