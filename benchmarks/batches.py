"""Calls of `LLM.generate` with and without a drafter, in turn: ``python benchmarks/batches.py --methods suffix``.

Every call has other prompts of source code, and ends with its last request. Ratios are the time of plain decoding over
that with the drafter, under the default settings: under 1, drafting was slower. The first calls, in which control
learns, are shown apart.
"""

from __future__ import annotations

import argparse
import statistics
import time

from draftwise import LLM, SamplingParams
from draftwise.bench.workloads import code_prompts
from draftwise.config.embedded import embedded_path
from draftwise.models.tokenizer import load_tokenizer

LEARNING = 3
"""Calls shown apart."""
PROMPT = 128
"""Tokens."""


def numbers(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--methods", default="ngram,suffix,draft_model", help="separated by commas")
    parser.add_argument("--requests", type=numbers, default=[1, 4, 16], help="of a call")
    parser.add_argument("--temperatures", type=numbers, default=[0.0, 0.8])
    parser.add_argument("--calls", type=int, default=20, help="of each kind")
    parser.add_argument("--tokens", type=int, default=128, help="of each request")
    args = parser.parse_args()
    if args.calls <= LEARNING:
        parser.error(f"--calls: more than {LEARNING}, which are shown apart")
    tokenizer = load_tokenizer(str(embedded_path("target")))
    prompts = [{"prompt_token_ids": list(ids)} for ids in code_prompts(tokenizer, 64, PROMPT, 0)]

    def seconds(llm: LLM, temperature: float, requests: int, call: int) -> float:
        chosen = [prompts[(call * requests + i) % len(prompts)] for i in range(requests)]
        params = [
            SamplingParams(
                temperature=temperature, max_tokens=args.tokens, seed=1000 * call + i, ignore_eos=True
            )
            for i in range(requests)
        ]
        begun = time.perf_counter()
        llm.generate(chosen, params, use_tqdm=False)
        return time.perf_counter() - begun

    print("method          requests  temperature  plain tok/s  first calls  median  quartiles")
    for method in args.methods.split(","):
        for requests in map(int, args.requests):
            with (
                LLM(speculative_config={"method": "none"}) as plain,
                LLM(speculative_config={"method": method}) as drafting,
            ):
                for temperature in args.temperatures:
                    times = []
                    for call in range(args.calls):
                        own = {}
                        for llm in (plain, drafting) if call % 2 else (drafting, plain):
                            own[llm is drafting] = seconds(llm, temperature, requests, call)
                        times.append((own[False], own[True]))
                    ratios = [a / b for a, b in times]
                    low, middle, high = statistics.quantiles(ratios[LEARNING:], n=4)
                    rate = requests * args.tokens / statistics.median(a for a, _ in times)
                    first = statistics.median(ratios[:LEARNING])
                    print(
                        f"{method:15} {requests:8} {temperature:12g} {rate:12.0f} {first:12.2f} {middle:7.2f}"
                        f"  {low:.2f} to {high:.2f}",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
