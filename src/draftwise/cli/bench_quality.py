"""``draftwise bench quality``: perplexity in each weight format."""

from __future__ import annotations

import argparse
from typing import Any

from draftwise.bench.quality import FORMATS
from draftwise.cli.env import environment
from draftwise.cli.numbers import positive
from draftwise.cli.options import add_engine_options, engine_kwargs
from draftwise.cli.report import print_json, progress
from draftwise.cli.tables import table

_TEXT = "perplexity on held-out code with the weights rounded to each format"


def add_parser(kinds: Any) -> None:
    """Register the kind with ``bench``'s parsers."""
    parser = kinds.add_parser(
        "quality", help=_TEXT, description=_TEXT, usage="draftwise bench quality [options]"
    )
    group = parser.add_argument_group("measurement")
    group.add_argument(
        "--formats",
        nargs="+",
        metavar="FORMAT",
        help="names of --quantization, and none (the weights as they are)",
    )
    group.add_argument("--prompts", type=positive, default=32, metavar="N", help="prompts (32)")
    group.add_argument(
        "--prompt-tokens", type=positive, default=256, metavar="N", help="tokens per prompt (256)"
    )
    group.add_argument("--seed", type=int, default=0, metavar="N", help="another seed, other prompts (0)")
    group.add_argument("--json", action="store_true", help="one JSON object on stdout")
    add_engine_options(parser, seed_flag="--engine-seed")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Carry it out."""
    from draftwise import LLM
    from draftwise.bench.quality import quality
    from draftwise.bench.workloads import code_prompts

    options = {name: value for name, value in engine_kwargs(args).items() if name != "quantization"}
    formats = args.formats or list(FORMATS)
    with progress(len(formats), "perplexity") as advance:
        rows = quality(
            lambda name: LLM(**options, quantization=name),
            lambda tokenizer: code_prompts(tokenizer, args.prompts, args.prompt_tokens, args.seed),
            formats,
            advance,
        )
    if args.json:
        settings = {"prompts": args.prompts, "prompt_tokens": args.prompt_tokens, "seed": args.seed}
        results = [row.as_dict() for row in rows]
        print_json(
            {"benchmark": "quality", "settings": settings, "environment": environment(), "results": results}
        )
        return 0
    print(
        table(
            f"perplexity over {rows[0].num_tokens} tokens of held-out code",
            ["<format", "perplexity", "increase"],
            [
                [
                    "as loaded" if row.format == "none" else row.format,
                    f"{row.perplexity:.3f}",
                    "" if row.increase is None or row.format == "none" else f"{100 * row.increase:+.2f} %",
                ]
                for row in rows
            ],
        )
    )
    return 0
