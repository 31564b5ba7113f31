"""What the suffix proposer costs: microseconds per step and bytes per cached token, with a million cached tokens.

    python benchmarks/suffix.py [--tokens 1000000] [--depth 24] [--streams code random300 ...] [--json]

Outputs of 500 tokens fill the cache; then requests are served one token per step (the hardest case: a look-up for every
token), each of them pushing an old output out. ``tree`` is the native call, which takes in the token and drafts;
``proposer`` is the whole of `SuffixProposer.propose`. Times are of the process, so that other work on the machine
counts for less.
"""

from __future__ import annotations

import argparse
import json
import random
import sysconfig
import time
from pathlib import Path
from typing import Any

import numpy as np

from draftwise.kernels.cpu.library import native_library, why_not_native
from draftwise.propose.base import DraftRow
from draftwise.propose.lookup import suffix as module
from draftwise.propose.lookup.suffix import SuffixProposer
from draftwise.types import IntArray, Speculation

OUTPUT = 500  # tokens of a cached output
MEASURED = 10  # requests


def code(tokens: int) -> IntArray:
    """Python's standard library in the embedded model's tokens, files in random order; repeated if it is too short."""
    from draftwise.config.embedded import embedded_path
    from draftwise.models.tokenizer import load_tokenizer

    tokenizer: Any = load_tokenizer(str(embedded_path("target")))
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py"))
    random.Random(0).shuffle(files)
    out: list[int] = []
    for file in files:
        try:
            out += tokenizer.encode(file.read_text(encoding="utf-8"))
        except UnicodeDecodeError:
            continue
        if len(out) >= tokens:
            break
    return np.resize(np.array(out, np.int32), tokens)


def stream(name: str, tokens: int) -> IntArray:
    if name == "code":
        return code(tokens)
    if name == "same":  # one output, again and again
        return np.resize(np.random.default_rng(0).integers(0, 5000, OUTPUT), tokens).astype(np.int32)
    return np.random.default_rng(0).integers(0, int(name.removeprefix("random")), tokens).astype(np.int32)


def row(rid: int, tokens: IntArray) -> DraftRow:
    return DraftRow(
        rid=rid,
        token_ids_np=tokens,
        num_prompt=OUTPUT,
        budget=15,
        max_depth=63,
        speculation=Speculation("suffix", 15),
        sampling=None,  # type: ignore[arg-type]  # not looked at
        block_table_np=tokens[:0],
        filled=0,
    )


class Timed:
    """The native call, with a clock around it."""

    def __init__(self, call: Any) -> None:
        self.call = call
        self.times: list[float] = []

    def __call__(self, *arguments: Any) -> Any:
        start = time.thread_time_ns()
        result = self.call(*arguments)
        self.times.append((time.thread_time_ns() - start) / 1e3)
        return result


def measure(name: str, cached: int, depth: int) -> dict[str, Any]:
    text = stream(name, cached + (MEASURED + 2) * OUTPUT)
    proposer = SuffixProposer(max_tree_depth=depth, max_cached_requests=cached // OUTPUT, native=True)
    prompt = np.zeros(OUTPUT, np.int32)
    start = time.thread_time_ns()
    for rid in range(cached // OUTPUT):
        whole = np.concatenate([prompt, text[rid * OUTPUT : (rid + 1) * OUTPUT]])
        proposer.propose([row(rid, whole[: OUTPUT + 1])])
        proposer.leaving(rid, whole)
        proposer.remove(rid)
    filled = (time.thread_time_ns() - start) / 1e3 / cached
    tree: Any = proposer._global
    bytes_per_token = tree.num_bytes / proposer.num_cached_tokens

    engine: Any = proposer._engine
    assert isinstance(engine, module.NativeEngine)
    timed = engine._call = Timed(engine._call)
    whole_times: list[float] = []
    drafted = 0
    for i in range(MEASURED):
        rid, at = cached // OUTPUT + i, cached + i * OUTPUT
        whole = np.concatenate([text[at : at + OUTPUT], text[at + OUTPUT : at + 2 * OUTPUT]])
        proposer.propose([row(rid, whole[: OUTPUT + 1])])  # takes in the prompt
        timed.times.pop()
        for n in range(OUTPUT + 2, 2 * OUTPUT + 1):
            request = row(rid, whole[:n])
            start = time.thread_time_ns()
            drafted += len(proposer.propose([request])[0])
            whole_times.append((time.thread_time_ns() - start) / 1e3)
        proposer.remove(rid)
    return {
        "stream": name,
        "cached_tokens": cached,
        "depth": depth,
        "fill_us_per_token": filled,
        "bytes_per_token": bytes_per_token,
        "tree_us": {"mean": float(np.mean(timed.times)), "p99": float(np.percentile(timed.times, 99))},
        "proposer_us": {"mean": float(np.mean(whole_times)), "p99": float(np.percentile(whole_times, 99))},
        "drafted_per_step": drafted / len(whole_times),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=1_000_000, help="cached tokens")
    parser.add_argument("--depth", type=int, default=24, help="depth of the trees")
    parser.add_argument(
        "--streams",
        nargs="+",
        default=["code", "same", "random2", "random300", "random50000"],
        help="code, same, or randomN: N random tokens",
    )
    parser.add_argument("--json", action="store_true", help="machine-readable")
    options = parser.parse_args()
    if native_library() is None:
        parser.error(f"the native tree is what is measured: {why_not_native()}")
    rows = [measure(name, options.tokens, options.depth) for name in options.streams]
    if options.json:
        print(json.dumps(rows, indent=2))
        return
    print(f"{options.tokens} cached tokens, depth {options.depth}; microseconds per step of one token")
    print(
        f"{'stream':<14}{'bytes/token':>12}{'fill':>8}{'tree':>8}{'p99':>8}{'proposer':>10}{'p99':>8}{'drafted':>9}"
    )
    for r in rows:
        print(
            f"{r['stream']:<14}{r['bytes_per_token']:>12.1f}{r['fill_us_per_token']:>8.2f}{r['tree_us']['mean']:>8.1f}"
            f"{r['tree_us']['p99']:>8.1f}{r['proposer_us']['mean']:>10.1f}{r['proposer_us']['p99']:>8.1f}"
            f"{r['drafted_per_step']:>9.1f}"
        )


if __name__ == "__main__":
    main()
