"""What a request takes after the engine has rested: the first of a conversation, or one in a while.

    python benchmarks/after_rest.py [--pauses 0 0.003 0.03 0.3] [--rounds 5] [--method eagle3]

The embedded model, a prompt of 128 tokens and 8 tokens out, one request at a time. Blocks of ten requests have the same
pause, in turns, so that what else the machine does falls on all of them. Times are medians in milliseconds: of the
clock, and of the processor (all threads). To compare two versions, run them in turns, each with its own source tree as
PYTHONPATH.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict

from draftwise import LLM, SamplingParams

PROMPT, OUTPUT = 128, 8
BLOCK = 10
"""Requests with the same pause in a row: the system places threads by what they did a while ago."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pauses", type=float, nargs="+", default=[0.0, 0.003, 0.03, 0.3], help="seconds")
    parser.add_argument("--rounds", type=int, default=5, help="blocks of each pause")
    parser.add_argument("--method", help="drafter; left out: plain decoding")
    args = parser.parse_args()
    method = {"method": args.method} if args.method else None
    params = SamplingParams(temperature=0, max_tokens=OUTPUT, ignore_eos=True)
    taken: dict[float, list[tuple[float, float]]] = defaultdict(list)
    with LLM(speculative_config=method, enable_prefix_caching=False) as llm:

        def request(number: int) -> None:
            ids = [(7 * number + 13 * at) % 3900 + 50 for at in range(PROMPT)]
            llm.generate([{"prompt_token_ids": ids}], params, use_tqdm=False)

        for number in range(10):
            request(number)
        for number in range(args.rounds):
            for pause in args.pauses:
                for again in range(BLOCK):
                    time.sleep(pause)
                    start, processor = time.perf_counter(), time.process_time()
                    request(number + again)
                    taken[pause].append((time.perf_counter() - start, time.process_time() - processor))
    print("pause      request   processor")
    for pause, times in taken.items():
        clock, processor = (1e3 * statistics.median(column) for column in zip(*times, strict=True))
        print(f"{pause:5g} s  {clock:7.2f} ms  {processor:7.2f} ms")


if __name__ == "__main__":
    main()
