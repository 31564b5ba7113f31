"""What it costs that a model has no file of its own: one Llama folder, served by the family's code, put together from
our operations, and on Transformers' code. Passes of one and of eight rows, and tokens per second of plain decoding,
taken in turns; medians, and ratios to the family's code.

    python benchmarks/any_model.py [FOLDER] [--dtype bfloat16] [--rounds 15] [--json]

FOLDER: a Llama checkpoint; without it, the embedded model. `benchmarks/make_model.py` writes one of 1.1 billion
parameters.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from draftwise import LLM, SamplingParams
from draftwise.config.embedded import embedded_path
from draftwise.models import registry
from draftwise.models.general import loading
from draftwise.models.general.model import GeneralDecoder
from draftwise.models.general.nodes import CannotAssemble

WAYS = ("family", "put together", "Transformers' code")
ARCHITECTURE = "LlamaForCausalLM"


@contextmanager
def served(way: str) -> Iterator[None]:
    """Models that are loaded meanwhile are served in this way."""
    family, assembled = registry._MODELS[ARCHITECTURE], loading.assembled

    def refuse(*args: object) -> object:
        raise CannotAssemble("the benchmark wants the model's own code")

    if way != "family":
        registry.register_model(ARCHITECTURE, GeneralDecoder)
    if way == "Transformers' code":
        loading.assembled = refuse  # type: ignore[assignment]
    try:
        yield
    finally:
        registry.register_model(ARCHITECTURE, family)
        loading.assembled = assembled


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", nargs="?", help="a Llama checkpoint (the embedded model)")
    parser.add_argument("--dtype", default="bfloat16", help="(bfloat16)")
    parser.add_argument("--rounds", type=int, default=15, help="of each way, in turns (15)")
    parser.add_argument("--tokens", type=int, default=24, help="of a round (24)")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    folder = args.folder or str(embedded_path("target"))
    engines: dict[str, LLM] = {}
    for way in WAYS:
        with served(way):
            engines[way] = LLM(
                folder, dtype=args.dtype, skip_tokenizer_init=True, num_kv_blocks=256, speculative_config=None
            )
    seconds: dict[tuple[str, int], list[float]] = {(way, n): [] for way in WAYS for n in (1, 8)}
    params = SamplingParams(
        temperature=0, max_tokens=args.tokens, ignore_eos=True, speculation={"method": "none"}
    )
    for done in range(args.rounds + 1):
        for way, count in seconds:
            prompts = [{"prompt_token_ids": [5 + i + 3 * k for k in range(32)]} for i in range(count)]
            began = time.perf_counter()
            engines[way].generate(prompts, params, use_tqdm=False)
            if done:  # the first round warms up
                seconds[way, count].append(time.perf_counter() - began)
    rows = []
    for count in (1, 8):
        speeds = {way: count * args.tokens / statistics.median(seconds[way, count]) for way in WAYS}
        rows += [
            {
                "requests": count,
                "way": way,
                "tokens/s": round(speed, 1),
                "ratio": round(speed / speeds["family"], 3),
            }
            for way, speed in speeds.items()
        ]
    if args.json:
        print(json.dumps({"folder": folder, "dtype": args.dtype, "rows": rows}))
        return 0
    print(f"{'requests':>8}  {'way':<20}{'tokens/s':>10}{'of family':>11}")
    for row in rows:
        print(f"{row['requests']:>8}  {row['way']:<20}{row['tokens/s']:>10}{row['ratio']:>11}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
