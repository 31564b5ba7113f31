"""What a step costs on several ranks, against one process with as many threads.

    python benchmarks/ranks.py                          # the embedded model, two ranks
    python benchmarks/ranks.py FOLDER --requests 1 8    # another model; both engines are in memory at once

Both engines are alive all the time and decode plainly in turns, with greedy tokens and no end. Steps are whole ones:
the host's work and its messages to the ranks are in them. Per layer: the difference over the number of
layers, of which each has two sums over the ranks.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

import numpy as np

from draftwise import LLM, SamplingParams


class Timed:
    """An engine, and the seconds of its steps that decode."""

    def __init__(self, **options: Any) -> None:
        self.llm = LLM(device="cpu", **options)
        core = self.llm._engine.core
        self._step, core.step = core.step, self._timed  # type: ignore[method-assign]
        self.steps: list[float] = []

    def _timed(self) -> Any:
        start = time.perf_counter()
        result = self._step()
        self.steps.append(time.perf_counter() - start)
        return result

    def median(self, requests: int, tokens: int) -> float:
        """Median seconds of a step with so many requests."""
        rng = np.random.default_rng(0)
        params = SamplingParams(
            max_tokens=tokens, temperature=0, ignore_eos=True, detokenize=False, speculation={"method": "none"}
        )  # fmt: skip
        prompts: list[Any] = [
            {"prompt_token_ids": rng.integers(5, 900, 16).tolist()} for _ in range(requests)
        ]
        self.steps.clear()
        self.llm.generate(prompts, params, use_tqdm=False)
        return statistics.median(self.steps[2:])  # behind the prompts


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", help="a folder (the embedded model)")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--requests", type=int, nargs="+", default=[1])
    parser.add_argument("--tokens", type=int, default=64, help="of each request (64)")
    parser.add_argument("--turns", type=int, default=7, help="measurements of each (7)")
    args = parser.parse_args()
    options: dict[str, Any] = {"max_model_len": 1024, "max_num_seqs": max(args.requests)}
    if args.model is not None:
        options |= {"model": args.model, "skip_tokenizer_init": True}
    one = Timed(num_threads=args.ranks, **options)
    several = Timed(num_threads=1, tensor_parallel_size=args.ranks, **options)
    layers = one.llm._engine.model.config.num_layers
    report: dict[str, Any] = {}
    with one.llm, several.llm:
        for requests in args.requests:
            pairs = []
            for turn in range(args.turns + 1):
                order = (one, several) if turn % 2 else (several, one)
                found = {each: each.median(requests, args.tokens) for each in order}
                if turn:  # the first one fills caches
                    pairs.append((found[one], found[several]))
            a, b = (statistics.median(column) for column in zip(*pairs, strict=True))
            report[f"{requests} requests"] = {
                "one process, ms": 1000 * a,
                f"{args.ranks} ranks, ms": 1000 * b,
                "ratio": statistics.median(y / x for x, y in pairs),
                "more per layer, us": 1e6 * (b - a) / layers,
            }
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
