"""``draftwise extract``: hidden states of a target over a body of text, for training draft heads."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftwise.cli import signals
from draftwise.cli.errors import UsageError
from draftwise.cli.options import ENGINE_BOOLEANS, add_engine_options, engine_kwargs
from draftwise.cli.report import note, print_json, progress

if TYPE_CHECKING:
    from draftwise.cli.options import Subparsers

BOOLEANS = ENGINE_BOOLEANS

_EXAMPLES = """examples:
  draftwise extract --data corpus.txt --output states
  draftwise extract --model path/to/model --data chats.jsonl --layers 2 16 29 32 --tokens-per-shard 100000 --output out
"""


def add_parser(subparsers: Subparsers) -> None:
    """Register ``extract``."""
    parser = subparsers.add_parser(
        "extract",
        help="hidden states of a model over text, for training draft heads",
        description="Compute the hidden states of chosen layers over texts and write them to safetensors files. "
        "Interrupted, the same command goes on where it stopped.",
        usage="draftwise extract --data FILE ... --output FOLDER [options]",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    group = parser.add_argument_group("extraction")
    group.add_argument(
        "--data",
        nargs="+",
        type=Path,
        required=True,
        metavar="FILE",
        help='.jsonl (or .json, a list): {"text": ...}, {"prompt": ..., "completion": ...} or {"messages": [...]}; '
        "any other: one text",
    )
    group.add_argument("--output", type=Path, required=True, metavar="FOLDER", help="where the files go")
    group.add_argument(
        "--layers",
        nargs="+",
        type=int,
        metavar="N",
        help="layers whose entering states are written; the number of layers stands for what leaves the last one "
        "(2, half of them, the third last, and what leaves the last: what EAGLE-3 trains on)",
    )
    group.add_argument(
        "--tokens-per-shard",
        type=int,
        metavar="N",
        help="several texts per file, about so many tokens (one text each)",
    )
    group.add_argument(
        "--max-length", type=int, metavar="N", help="longer texts are cut (2048, or the model's length)"
    )
    group.add_argument("--limit", type=int, metavar="N", help="extract this many texts at most")
    group.add_argument("--json", action="store_true", help="one JSON object on stdout")
    add_engine_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Carry out ``draftwise extract``."""
    for name in ("tokens_per_shard", "max_length", "limit"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise UsageError(f"--{name.replace('_', '-')}: expected an integer >= 1, got {value}")
    options = engine_kwargs(args)
    if (
        options.get("speculative_config")
        or options.get("speculative_method")
        or options.get("speculative_model")
    ):
        raise UsageError("extract drafts nothing: leave the speculative options out")
    from draftwise import LLM
    from draftwise.train.extract import Job, extract, open_folder
    from draftwise.train.folders import make_folder

    path = options.get("model")
    layers = tuple(args.layers) if args.layers else default_layers(_num_layers(path, options.get("revision")))
    options["speculative_config"] = {
        "method": "extract_hidden_states",
        "draft_model_config": {"eagle_aux_hidden_state_layer_ids": list(layers)},
    }
    options["kv_transfer_config"] = {
        "kv_connector": "ExampleHiddenStatesConnector",
        "kv_connector_extra_config": {"shared_storage_path": str(args.output / "parts")},
    }
    start = time.perf_counter()
    if args.output.exists() and not args.output.is_dir():
        raise UsageError(f"--output {args.output}: not a folder")
    make_folder(args.output, "--output")
    with LLM(**options) as llm:
        longest = llm.max_model_len - 1
        job = Job(
            data=tuple(args.data),
            output=args.output,
            target="embedded" if llm.config.embedded else str(llm.config.model),
            layers=layers,
            max_length=min(args.max_length or 2048, longest),
            shard_tokens=args.tokens_per_shard,
            limit=args.limit,
            weights=" ".join(filter(None, (llm.config.dtype, llm.config.quantization))),
        )
        before = open_folder(job)
        if before.texts:
            note(f"going on after {before.texts} texts ({before.tokens} tokens)")
        total = _count(args) if not args.json else 0
        try:
            with (
                signals.raised(),
                progress(max(total - before.texts, 0), "extract", shown=not args.json) as advance,
            ):
                done = extract(llm, job, advance)
        except KeyboardInterrupt:
            texts = open_folder(job).texts
            note(f"interrupted: {texts} texts are in {args.output}; the same command goes on behind them")
            raise
    seconds = time.perf_counter() - start
    summary: dict[str, Any] = {
        "output": str(args.output), "layers": list(layers), "texts": done.texts, "skipped": done.skipped,
        "tokens": done.tokens, "files": len(done.files), "new_tokens": done.tokens - before.tokens, "seconds": seconds,
    }  # fmt: skip
    if args.json:
        print_json(summary)
    else:
        note(
            f"{done.tokens} tokens of {done.texts - done.skipped} texts in {len(done.files)} files in {args.output} "
            f"({summary['new_tokens'] / seconds:.0f} tokens/s); layers {' '.join(map(str, layers))}"
        )
    return 0


def default_layers(num_layers: int) -> tuple[int, ...]:
    """The layers that EAGLE-3 reads (inputs of layers 2, L // 2, L - 3), and the output of the last layer, which
    gives the target's distribution. Example: 12 layers: 2, 6, 9, 12."""
    return tuple(sorted({min(2, num_layers), num_layers // 2, max(num_layers - 3, 0), num_layers}))


def _num_layers(path: str | None, revision: str | None) -> int:
    from draftwise.config.embedded import embedded_path
    from draftwise.models.loader import load_config

    return load_config(path or str(embedded_path("target")), revision).num_layers


def _count(args: argparse.Namespace) -> int:
    """Texts in the data, for the progress bar; those that are cut count once."""
    from draftwise.train.heads.text import read_documents

    count = sum(1 for _ in read_documents(args.data))
    return min(count, args.limit) if args.limit else count
