"""Calls of `LLM.generate` with and without a drafter, in turn: ``python benchmarks/batches.py --methods suffix``.

Every call has other prompts of source code, and ends with its last request. Ratios are the time of plain decoding over
that with the drafter, under the default settings: under 1, drafting was slower. The first calls, in which control
learns, are shown apart; ``--engines 10 --calls 5`` makes ten engines of each kind, one after the other, for more of
them. Every temperature begins with a new engine.

``--against FOLDER`` names another checkout, with its native library built. Its engines take turns with those of this
one, and further lines say how much faster this one is. Every engine runs in a process of its own.
"""

from __future__ import annotations

import argparse
import logging
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from draftwise import LLM, TokensPrompt

LEARNING = 3
"""Calls shown apart."""
PROMPT = 128
"""Tokens."""
PLAIN = "none"
HERE = Path(__file__).resolve().parents[1]


def numbers(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


class Engine:
    """A process with an `LLM`, which makes calls when it is asked to."""

    def __init__(self, checkout: Path, method: str, tokens: int) -> None:
        environment = os.environ | {"PYTHONPATH": str(checkout / "src")}
        command = [sys.executable, __file__, "--engine", method, "--tokens", str(tokens)]
        self._process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        found = self._read()
        if Path(found) != checkout / "src" / "draftwise":
            raise SystemExit(f"{checkout} was named, and {found} was imported")

    def _read(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"an engine ended with status {self._process.wait()}")
        return line.rstrip("\n")

    def renew(self) -> None:
        """Make the engine anew."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        self._read()

    def seconds(self, call: int, requests: int, temperature: float) -> float:
        """What the call took."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{call} {requests} {temperature}\n")
        self._process.stdin.flush()
        return float(self._read())

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def serve(method: str, tokens: int) -> None:
    """Be the process of an `Engine`."""
    import draftwise
    from draftwise import LLM
    from draftwise.bench.workloads import code_prompts
    from draftwise.config.embedded import embedded_path
    from draftwise.kernels.cpu.library import native_library
    from draftwise.models.tokenizer import load_tokenizer

    if native_library() is None:
        raise SystemExit(f"{draftwise.__file__}: the native library is not built")
    # prompts are cut from a file that is longer than the model's context
    logging.getLogger("transformers.tokenization_utils_base").setLevel(logging.ERROR)
    tokenizer = load_tokenizer(str(embedded_path("target")))
    prompts: list[TokensPrompt] = [
        {"prompt_token_ids": list(ids)} for ids in code_prompts(tokenizer, 64, PROMPT, 0)
    ]
    lines = iter(sys.stdin.readline, "")
    more = True
    while more:
        with LLM(speculative_config={"method": method}) as llm:
            print(Path(draftwise.__file__).parent, flush=True)
            more = calls(llm, lines, prompts, tokens)


def calls(llm: LLM, lines: Iterator[str], prompts: list[TokensPrompt], tokens: int) -> bool:
    """Make calls as they are asked for. Whether another engine is wanted next."""
    from draftwise import SamplingParams

    for line in lines:
        if not line.strip():
            return True
        call, requests = map(int, line.split()[:2])
        chosen = [prompts[(call * requests + i) % len(prompts)] for i in range(requests)]
        params = [
            SamplingParams(
                temperature=float(line.split()[2]),
                max_tokens=tokens,
                seed=1000 * call + i,
                ignore_eos=True,
            )
            for i in range(requests)
        ]
        begun = time.perf_counter()
        llm.generate(chosen, params, use_tqdm=False)
        print(time.perf_counter() - begun, flush=True)
    return False


def ratios(slow: list[float], quick: list[float], of_engine: int) -> str:
    """Of calls made in turn, so many for each engine: median of the first ones, median of the others, and their
    quartiles."""
    found = [(i % of_engine < LEARNING, a / b) for i, (a, b) in enumerate(zip(slow, quick, strict=True))]
    early, late = ([ratio for first, ratio in found if first is kind] for kind in (True, False))
    low, middle, high = statistics.quantiles(late, n=4)
    return f"{statistics.median(early):12.2f} {middle:7.2f}  {low:.2f} to {high:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--methods", default="ngram,suffix,draft_model", help="separated by commas")
    parser.add_argument("--requests", type=numbers, default=[1, 4, 16], help="of a call")
    parser.add_argument("--temperatures", type=numbers, default=[0.0, 0.8])
    parser.add_argument("--calls", type=int, default=20, help="of each engine")
    parser.add_argument("--engines", type=int, default=1, help="of each kind, one after the other")
    parser.add_argument("--tokens", type=int, default=128, help="of each request")
    parser.add_argument("--against", type=Path, metavar="FOLDER", help="another checkout")
    parser.add_argument("--engine", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.engine:
        serve(args.engine, args.tokens)
        return
    if args.calls < LEARNING + 2:
        parser.error(f"--calls: at least {LEARNING + 2}, of which {LEARNING} are shown apart")
    checkouts = [HERE] if args.against is None else [HERE, args.against.resolve()]

    print("what                         requests  temperature  tokens/s  first calls  median  quartiles")
    for method in args.methods.split(","):
        for requests in map(int, args.requests):
            kinds = [(checkout, m) for checkout in checkouts for m in (PLAIN, method)]
            engines = {kind: Engine(*kind, args.tokens) for kind in kinds}
            for temperature in args.temperatures:
                times: dict[tuple[Path, str], list[float]] = {kind: [] for kind in kinds}
                for number in range(args.engines):
                    for engine in engines.values():
                        engine.renew()
                    for call in range(args.calls * number, args.calls * (number + 1)):
                        first = call % len(kinds)
                        for kind in kinds[first:] + kinds[:first]:
                            times[kind].append(engines[kind].seconds(call, requests, temperature))

                def show(
                    what: str,
                    slow: list[float],
                    quick: list[float],
                    sizes: tuple[int, float] = (requests, temperature),
                ) -> None:
                    late = [seconds for i, seconds in enumerate(quick) if i % args.calls >= LEARNING]
                    rate = sizes[0] * args.tokens / statistics.median(late)
                    found = ratios(slow, quick, args.calls)
                    print(f"{what:28} {sizes[0]:8} {sizes[1]:12g} {rate:9.0f} {found}", flush=True)

                show(f"{method} / plain", times[HERE, PLAIN], times[HERE, method])
                for other in checkouts[1:]:
                    show(f"there: {method} / plain", times[other, PLAIN], times[other, method])
                    show(f"{method} here / there", times[other, method], times[HERE, method])
                    show("plain here / there", times[other, PLAIN], times[HERE, PLAIN])
            for engine in engines.values():
                engine.close()


if __name__ == "__main__":
    main()
