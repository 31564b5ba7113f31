"""Adaptive control against plain decoding and static control, in turn: ``python benchmarks/adaptive.py``.

Tokens per second of the engine's thread's processor time (one thread does everything), so that neighbours on the
machine count for less; with ``--clock`` of time that passes.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

from draftwise import LLM, SamplingParams
from draftwise.bench.workloads import code_prompts
from draftwise.config.embedded import embedded_path
from draftwise.models.tokenizer import load_tokenizer

TOKENS = 128


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--method", default="mtp")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--clock", action="store_true")
    args = parser.parse_args()
    clock = time.perf_counter if args.clock else time.thread_time
    tokenizer = load_tokenizer(str(embedded_path("target")))
    prompts = [{"prompt_token_ids": list(ids)} for ids in code_prompts(tokenizer, 64, TOKENS, 0)]

    def engine(control: str) -> LLM:
        llm = LLM(
            speculative_config=[{"method": args.method}],
            speculation_control=control,
            num_threads=None if args.clock else 1,
        )
        core: Any = llm._engine.core  # type: ignore[union-attr]
        core.clock = core.executor._clock = clock
        return llm

    def rate(llm: LLM, method: str, turn: int) -> float:
        llm.reset_prefix_cache()
        llm.reset_drafters()
        params = SamplingParams(
            temperature=args.temperature,
            max_tokens=TOKENS,
            ignore_eos=True,
            speculation={"method": method},
        )
        calls = max(1, 8 // args.requests)
        begun = clock()
        for i in range(calls):
            first = (turn * calls + i) % 64 if args.requests == 1 else 0
            llm.generate(prompts[first : first + args.requests], params, use_tqdm=False)
        return calls * args.requests * TOKENS / (clock() - begun)

    with engine("static") as static, engine("adaptive") as adaptive:
        rate(static, "none", 0)
        rate(static, args.method, 0)
        found = []
        for turn in range(args.rounds):
            plain = rate(static, "none", turn)
            learned = rate(adaptive, args.method, turn)
            fixed = rate(static, args.method, turn)
            found.append((fixed / plain, learned / plain))
            ratios = "  ".join(
                f"{name} {r:.2f}" for name, r in zip(("static", "adaptive"), found[-1], strict=True)
            )
            print(f"plain {plain:.0f} tokens/s  of it: {ratios}", flush=True)
    later = [ratio for _, ratio in found[len(found) // 3 :]]
    print(f"first run {found[0][1]:.2f}, later runs {statistics.median(later):.2f} of plain decoding")


if __name__ == "__main__":
    main()
