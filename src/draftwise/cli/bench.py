"""``draftwise bench``: measure latency, throughput or acceptance, kernels, or a server."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftwise.bench.workloads import WORKLOADS, code_prompts, make_workload
from draftwise.cli import bench_gpu, bench_kernels, bench_quality, bench_serve
from draftwise.cli.env import environment, machine
from draftwise.cli.errors import UsageError
from draftwise.cli.numbers import positive, temperature
from draftwise.cli.options import ENGINE_BOOLEANS, add_engine_options, engine_kwargs
from draftwise.cli.report import note, print_json, progress
from draftwise.cli.tables import WIDTH, positions, table

if TYPE_CHECKING:
    from draftwise import LLM
    from draftwise.cli.options import Subparsers

BOOLEANS = ENGINE_BOOLEANS


def add_parser(subparsers: Subparsers) -> None:
    """Register ``bench`` and its kinds."""
    parser = subparsers.add_parser(
        "bench",
        help="measure latency, throughput or acceptance",
        description="Measure the engine on held-out code.",
    )
    kinds = parser.add_subparsers(dest="kind", metavar="KIND", required=True, parser_class=type(parser))
    for name, function, text in (
        (
            "latency",
            _latency,
            "one request at a time: tokens per second of each method against plain decoding",
        ),
        ("throughput", _throughput, "many requests at once: tokens per second by their number"),
        ("accept", _accept, "measure each method's acceptance and the cost of its drafts, by kind of text"),
    ):
        kind = kinds.add_parser(name, help=text, description=text, usage=f"draftwise bench {name} [options]")
        _add_options(kind, name)
        add_engine_options(kind, seed_flag="--engine-seed")
        kind.set_defaults(run=run, measure=function)
    bench_gpu.add_parser(kinds)
    bench_kernels.add_parser(kinds)
    bench_serve.add_parser(kinds)
    bench_quality.add_parser(kinds)


def _add_options(parser: argparse.ArgumentParser, kind: str) -> None:
    group = parser.add_argument_group("measurement")

    def add(flag: str, default: Any, text: str, kind: Any = positive) -> None:
        shown = " ".join(map(str, default)) if isinstance(default, list) else default
        nargs = "+" if isinstance(default, list) else None
        metavar = flag.rpartition("-")[2].upper()
        group.add_argument(
            flag, type=kind, default=default, nargs=nargs, metavar=metavar, help=f"{text} ({shown})"
        )

    group.add_argument(
        "--methods",
        nargs="+",
        metavar="METHOD",
        help="none (plain decoding) and names of drafters (none and all that are loaded)",
    )
    if kind == "latency":
        add("--prompts", 8, "prompts")
        add("--temperatures", [0.0, 0.8], "temperatures", temperature)
        add("--output-tokens", 128, "tokens generated per prompt")
        add("--rounds", 3, "times each prompt is run with each method")
    elif kind == "throughput":
        add("--concurrency", [1, 8, 16, 64], "requests at once")
        add("--temperature", 0.0, "temperature", temperature)
        add("--output-tokens", 128, "tokens generated per request")
        add("--rounds", 3, "times each batch is run with each method")
    else:
        group.add_argument(
            "--prompts",
            type=_prompts,
            default=8,
            metavar="N|FILE",
            help="prompts per workload (8); or a JSONL file of your own instead of the workloads: a line has turns, "
            "question, prompt or messages, and perhaps a category (Spec-Bench, MT-Bench, GSM8K, HumanEval)",
        )
        group.add_argument(
            "--per-category",
            type=positive,
            metavar="N",
            help="with a file: most prompts of each category, drawn at random (all)",
        )
        add("--temperature", 0.0, "temperature", temperature)
        add("--output-tokens", 96, "tokens generated per prompt")
        group.add_argument(
            "--workloads",
            nargs="+",
            choices=list(WORKLOADS),
            default=list(WORKLOADS),
            help="; ".join(f"{name}: {text}" for name, text in WORKLOADS.items()),
        )
        group.add_argument(
            "--shapes",
            nargs="+",
            choices=["chain", "tree"],
            default=["chain", "tree"],
            help="chain, or tree: dynamic trees, for methods that draft them (both)",
        )
        group.add_argument(
            "--plot", type=Path, metavar="FILE", help="draw the results: .svg, or .png with matplotlib"
        )
    add("--prompt-tokens", 128, "tokens per prompt")
    group.add_argument("--seed", type=int, default=0, metavar="N", help="another seed, other prompts (0)")
    group.add_argument("--json", action="store_true", help="one JSON object on stdout")


def run(args: argparse.Namespace) -> int:
    """Carry out ``draftwise bench KIND``."""
    options = engine_kwargs(args)
    if args.kind != "throughput":  # what a method does whenever it is asked, not what is left where it pays
        options.setdefault("speculation_control", "static")
    if args.kind == "accept":
        chosen = ("model", "speculative_config", "speculative_method", "speculative_model")
        if all(options.get(name) is None for name in chosen):
            options["speculative_config"] = _everything()
        if args.plot is not None:
            from draftwise.bench.plot import check_plot

            check_plot(args.plot)
    if args.prompt_tokens < 32:
        raise UsageError("--prompt-tokens: expected at least 32")
    from draftwise import LLM

    with LLM(**options) as llm:
        methods = _methods(llm, args.methods)
        length = args.prompt_tokens + args.output_tokens
        if length > llm.max_model_len and not isinstance(getattr(args, "prompts", None), Path):
            raise UsageError(
                f"--prompt-tokens and --output-tokens: together {length}, but the model's context has "
                f"{llm.max_model_len} tokens"
            )
        rows, drawn = args.measure(args, llm, methods)
        config = llm.config
        if args.json:
            settings = {
                k: str(v) if isinstance(v, Path) else v
                for k, v in vars(args).items()
                if not k.startswith("engine_") and not callable(v)
            }
            model = "embedded" if config.embedded else config.model
            print_json(
                {
                    "benchmark": args.kind,
                    "model": model,
                    "settings": {**settings, "methods": methods},
                    "environment": environment(),
                    "results": [row.as_dict() for row in rows],
                }
            )
        else:
            _print(drawn, config.device)
    return 0


def _methods(llm: LLM, asked: Sequence[str] | None) -> list[str]:
    loaded = ["none", *(spec.method for spec in llm.config.drafters)]
    for name in asked or ():
        if name not in loaded:
            raise UsageError(f"--methods: {name!r} is not loaded; there are {', '.join(loaded)}")
    return list(dict.fromkeys(asked)) if asked else loaded


def _latency(args: argparse.Namespace, llm: LLM, methods: list[str]) -> tuple[Any, str]:
    from draftwise.bench.latency import latency

    prompts = code_prompts(llm.get_tokenizer(), args.prompts, args.prompt_tokens, args.seed)
    variants = len(methods) + ("none" not in methods)
    total = variants * len(prompts) * args.rounds * len(args.temperatures)
    with progress(total, "latency") as advance:
        rows = latency(
            llm,
            prompts,
            methods=methods,
            temperatures=args.temperatures,
            output_tokens=args.output_tokens,
            rounds=args.rounds,
            advance=advance,
        )
    drawn = table(
        f"{len(prompts)} prompts of {args.prompt_tokens} tokens, {args.output_tokens} generated, one at a time; "
        f"{_drafts(llm)}",
        [
            "temp", "<method", "tokens\nper s", "speed\n-up", "accept.\nlength", "first\ntoken", "per\ntoken",
            "host,\nper step", "tokens\nequal",
        ],
        [
            [
                f"{row.temperature:g}",
                _shown(row.method),
                f"{row.tokens_per_second:.0f}",
                _ratio(row.speedup),
                _number(row.mean_acceptance_length),
                _ms(row.ttft),
                _ms(row.itl),
                _ms(row.host_time_per_step),
                "" if row.equal_tokens is None else f"{row.equal_prompts}/{row.num_samples}",
            ]
            for row in rows
        ],
    )  # fmt: skip
    return rows, drawn


def _throughput(args: argparse.Namespace, llm: LLM, methods: list[str]) -> tuple[Any, str]:
    from draftwise.bench.throughput import throughput

    concurrency = sorted(set(args.concurrency))
    prompts = code_prompts(llm.get_tokenizer(), concurrency[-1], args.prompt_tokens, args.seed)
    with progress(len(methods) * len(concurrency) * args.rounds, "throughput") as advance:
        rows = throughput(
            llm,
            prompts,
            methods=methods,
            concurrencies=concurrency,
            temperature=args.temperature,
            output_tokens=args.output_tokens,
            rounds=args.rounds,
            advance=advance,
        )
    drawn = table(
        f"prompts of {args.prompt_tokens} tokens, {args.output_tokens} generated, temperature "
        f"{args.temperature:g}; {_drafts(llm)}",
        [
            "requests", "<method", "tokens\nper s", "against\none", "against\nplain", "accept.\nlength",
            "host,\nper step",
        ],
        [
            [
                str(row.concurrency),
                _shown(row.method),
                f"{row.tokens_per_second:.0f}",
                _ratio(row.scaling),
                _ratio(row.speedup),
                _number(row.mean_acceptance_length),
                _ms(row.host_time_per_step),
            ]
            for row in rows
        ],
    )  # fmt: skip
    return rows, drawn


def _accept(args: argparse.Namespace, llm: LLM, methods: list[str]) -> tuple[Any, str]:
    from draftwise.bench.accept import accept
    from draftwise.bench.prompt_files import read_prompt_file

    tokenizer = llm.get_tokenizer()
    own = isinstance(args.prompts, Path)
    if own:
        room = llm.max_model_len - args.output_tokens
        workloads, left_out = read_prompt_file(args.prompts, tokenizer, room, args.per_category, args.seed)
        if left_out:
            note(
                f"{left_out} prompts are longer than the {room} tokens that there is room for; they are left out"
            )
        head = f"{args.prompts.name}: {sum(len(w.prompts) for w in workloads)} prompts, at most {args.output_tokens} "
    else:
        if args.per_category is not None:
            raise UsageError("--per-category: needs a file (--prompts FILE)")
        workloads = [
            make_workload(name, tokenizer, args.prompts, args.prompt_tokens, args.seed)
            for name in args.workloads
        ]
        head = f"{args.prompts} prompts of each kind, {args.output_tokens} "
    methods = [name for name in methods if name != "none"]
    if not methods:
        raise UsageError("--methods: name at least one drafter")
    methods = _variants(llm, methods, args.shapes)
    with progress((len(methods) + 1) * sum(len(w.prompts) for w in workloads), "acceptance") as advance:
        rows = accept(
            llm,
            workloads,
            methods=methods,
            temperature=args.temperature,
            output_tokens=args.output_tokens,
            ignore_eos=not own,
            advance=advance,
        )
    counts = {workload.name: len(workload.prompts) for workload in workloads}
    lines: list[list[str] | str] = []
    for workload in dict.fromkeys(row.workload for row in rows):
        about = (
            WORKLOADS.get(workload, "")
            if not own
            else f"{counts.get(workload, sum(counts.values()))} prompts"
        )
        lines.append(f"{workload}: {about}".rstrip(": "))
        lines += [
            [
                _shown(row.method),
                _number(row.mean_acceptance_length),
                f"{row.tokens_per_step:.2f}",
                positions(row.acceptance_per_position),
                _ms(row.draft_time_per_step),
                _ms(row.forward_time_per_step),
                _ratio(row.speedup),
            ]
            for row in rows
            if row.workload == workload
        ]
    drawn = table(
        f"{head}generated, temperature {args.temperature:g}",
        [
            "<method", "accept.\nlength", "tokens\n/step", "<accepted at\nposition 1, 2, ..", "drafting\n/step",
            "target\n/step", "speed\n-up",
        ],
        lines,
    )  # fmt: skip
    if args.plot is not None:
        from draftwise.bench.plot import draw_accept

        draw_accept(rows, args.plot)
        note(f"drawn in {args.plot}")
    return rows, drawn


def _prompts(text: str) -> int | Path:
    """A number, or a file."""
    if text.isdecimal():
        return positive(text)
    return Path(text)


def _variants(llm: LLM, methods: Sequence[str], shapes: Sequence[str]) -> list[str]:
    """Each method as a chain, and, where it drafts dynamic trees, as "method/tree"."""
    from draftwise.propose.registry import resolve_proposer

    specs = {spec.method: spec for spec in llm.config.drafters}
    out: list[str] = []
    for name in methods:
        trees = resolve_proposer(name).drafts_dynamic_trees and not specs[name].parallel_drafting
        if "chain" in shapes or not trees:
            out.append(name)
        if "tree" in shapes and trees:
            out.append(f"{name}/tree")
    return out


def _everything() -> list[dict[str, Any]]:
    """Every drafter that comes with the embedded target."""
    from draftwise.config.embedded import embedded_path
    from draftwise.errors import ModelLoadError
    from draftwise.names import SHIPPED_HEADS

    found: list[dict[str, Any]] = []
    for head in SHIPPED_HEADS:
        try:
            embedded_path(head)
        except ModelLoadError:
            continue
        found.append({"method": head})
    return [{"method": "draft_model"}, *found, {"method": "early_exit"}, {"method": "hybrid"}]


def _shown(method: str) -> str:
    return "plain" if method == "none" else method


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}x"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _ms(value: float | None) -> str:
    return "" if value is None else f"{1000 * value:.2f} ms"


def _drafts(llm: LLM) -> str:
    if llm.config.speculation_control == "static":
        return "every method drafts in every step"
    return "methods draft where the controller finds that it pays"


def _print(table: str, device: str) -> None:
    """``device``: where the models ran."""
    print(table, flush=True)
    where, kernels = machine(device)
    for line in (
        "",
        where,
        *textwrap.wrap(f"kernels: {kernels}", WIDTH),
        "ratios are of medians; methods alternate within the run",
    ):
        note(line)
