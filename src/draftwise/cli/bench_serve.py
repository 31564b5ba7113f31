"""``draftwise bench serve``: load on a server."""

from __future__ import annotations

import argparse
import asyncio
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftwise.cli.env import environment
from draftwise.cli.errors import UsageError
from draftwise.cli.numbers import positive, temperature
from draftwise.cli.report import note, print_json, progress
from draftwise.cli.tables import table

if TYPE_CHECKING:
    from draftwise.bench.serve import ServeReport

_TEXT = "load on any OpenAI-compatible server: first token, time per token, throughput, goodput, acceptance"


def add_parser(kinds: Any) -> None:
    """Register the kind with ``bench``'s parsers."""
    parser = kinds.add_parser(
        "serve", help=_TEXT, description=_TEXT, usage="draftwise bench serve --url URL [options]"
    )
    group = parser.add_argument_group("load")

    def add(flag: str, text: str, kind: Any = str, **more: Any) -> None:
        group.add_argument(flag, type=kind, help=text, **{"metavar": flag.rpartition("-")[2].upper(), **more})

    add("--url", "the server (http://127.0.0.1:8000)", default="http://127.0.0.1:8000")
    add("--model", "the model's name (the server's first)")
    add("--api-key", "also OPENAI_API_KEY")
    group.add_argument("--chat", action="store_true", help="/v1/chat/completions instead of /v1/completions")
    add("--num-requests", "requests in all (64)", positive, default=64)
    add(
        "--request-rate",
        "open loop: requests per second, arriving at random (Poisson); inf: all at once; several: one after the other",
        _rate,
        nargs="+",
    )
    add(
        "--concurrency",
        "closed loop: so many clients (8; several: one after the other); with a rate: most requests in flight",
        positive,
        nargs="+",
    )
    add(
        "--prompt-tokens",
        "tokens of a prompt, by the embedded model's tokenizer (128)",
        positive,
        default=128,
    )
    add("--prompts-file", "a text file with one prompt per line instead")
    add("--output-tokens", "tokens generated per request (64)", positive, default=64)
    add("--temperature", "(0)", temperature, default=0.0)
    add("--goodput", "SLA in milliseconds: ttft:200 tpot:50 itl:100 e2e:2000", nargs="+")
    add("--extra-body", "JSON object added to every request", _object)
    add("--seed", "another seed, other arrivals and prompts (0)", int, default=0)
    add("--plot", "draw the times and rates over the load into a .svg file", Path, metavar="FILE")
    group.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.set_defaults(run=run)


def _rate(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not value > 0:
        raise argparse.ArgumentTypeError(f"expected requests per second > 0, or inf; got {text!r}")
    return value


def _object(text: str) -> dict[str, Any]:
    import json

    try:
        value = json.loads(text)
    except json.JSONDecodeError:
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"expected a JSON object, got {text!r}")
    return value


def parse_sla(given: list[str] | None) -> dict[str, float]:
    """["ttft:200"] -> {"ttft": 0.2}. Raises UsageError."""
    from draftwise.bench.serve import SLA_FIELDS

    out: dict[str, float] = {}
    for part in given or ():
        name, _, limit = part.partition(":")
        try:
            out[name] = float(limit) / 1000
        except ValueError:
            out[name] = -1.0
        if name not in SLA_FIELDS or not out[name] > 0:
            raise UsageError(f"--goodput: expected {', '.join(SLA_FIELDS)}:MILLISECONDS, got {part!r}")
    return out


def _loads(args: argparse.Namespace) -> list[tuple[float | None, int | None]]:
    """[(rate, concurrency)] of the loads to put on the server, in order. Raises UsageError."""
    rates, clients = args.request_rate, args.concurrency
    if rates is None:
        return [(None, count) for count in clients or (8,)]
    if clients is not None and len(clients) > 1:
        raise UsageError("--concurrency: with --request-rate it is one number, the most requests in flight")
    return [(rate, clients[0] if clients else None) for rate in rates]


def _json(rate: float | None) -> float | str | None:
    """JSON has no infinity."""
    return "inf" if rate == float("inf") else rate


def run(args: argparse.Namespace) -> int:
    """Carry it out."""
    from draftwise.bench.http_client import HttpError, Target
    from draftwise.bench.plot_serve import LoadPoint, draw_serve
    from draftwise.bench.serve import bench_serve
    from draftwise.charts import check_svg

    target = Target.parse(args.url, args.api_key or os.environ.get("OPENAI_API_KEY"))
    sla = parse_sla(args.goodput)
    loads = _loads(args)
    if args.plot is not None:
        check_svg(args.plot)
    prompts = _prompts(args)

    async def main() -> tuple[str, list[ServeReport]]:
        model = args.model or await _first_model(target)
        bodies = [_body(args, model, prompts[i % len(prompts)]) for i in range(args.num_requests)]
        with progress(len(bodies) * len(loads), "requests") as advance:
            return model, [
                await bench_serve(
                    target,
                    bodies,
                    path="/v1/chat/completions" if args.chat else "/v1/completions",
                    rate=rate,
                    concurrency=concurrency,
                    sla=sla,
                    seed=args.seed,
                    advance=advance,
                )
                for rate, concurrency in loads
            ]

    try:
        model, reports = asyncio.run(main())
    except HttpError as error:
        raise UsageError(f"{args.url}: {error}") from None
    if args.json:
        hidden = ("run", "api_key", "command", "kind", "plot", "request_rate", "concurrency")
        settings = {k: v for k, v in vars(args).items() if k not in hidden}
        results = [
            {"load": {"request_rate": _json(rate), "concurrency": concurrency}, **result.as_dict()}
            for (rate, concurrency), result in zip(loads, reports, strict=True)
        ]
        print_json(
            {
                "benchmark": "serve",
                "settings": settings,
                "environment": environment(),
                "results": results,
            }
        )
    else:
        for (rate, concurrency), result in zip(loads, reports, strict=True):
            how = f"{rate:g} requests/s arriving at random" if rate is not None else f"{concurrency} clients"
            _print(
                result, f"{args.url}: {args.num_requests} requests, {how}, {args.output_tokens} tokens each"
            )
    if args.plot is not None:
        points = [
            LoadPoint(rate if rate is not None else float(concurrency or 0), result)
            for (rate, concurrency), result in zip(loads, reports, strict=True)
        ]
        axis = "clients" if args.request_rate is None else "requests per second sent"
        draw_serve(points, args.plot, axis, _heads(args, model, sla))
        note(f"drawn: {args.plot}")
    for result in reports:
        for message, count in result.errors.items():
            note(f"{count} requests failed: {message}")
    return 1 if all(result.num_failed == result.num_requests for result in reports) else 0


def _heads(args: argparse.Namespace, model: str, sla: dict[str, float]) -> list[str]:
    """The title of the plot: the server, the load, and the SLA."""
    prompts = f"of {args.prompt_tokens} tokens" if args.prompts_file is None else f"from {args.prompts_file}"
    lines = [
        f"{model} at {args.url}",
        f"{args.num_requests} requests per load, prompts {prompts}, {args.output_tokens} tokens generated, "
        f"temperature {args.temperature:g}",
    ]
    if sla:
        lines.append("SLA: " + ", ".join(f"{name} {1000 * limit:g} ms" for name, limit in sla.items()))
    return lines


def _prompts(args: argparse.Namespace) -> list[str]:
    if args.prompts_file is not None:
        try:
            lines = Path(args.prompts_file).read_text(encoding="utf-8").split("\n")
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"--prompts-file {args.prompts_file}: {error}") from None
        prompts = [line for line in lines if line.strip()]
        if not prompts:
            raise UsageError(f"--prompts-file {args.prompts_file}: no prompt in it")
        return prompts
    from draftwise.bench.workloads import code_prompts
    from draftwise.config.embedded import embedded_path
    from draftwise.models.tokenizer import load_tokenizer

    if args.prompt_tokens < 32:
        raise UsageError("--prompt-tokens: expected at least 32")
    tokenizer = load_tokenizer(str(embedded_path("target")))
    count = min(args.num_requests, 256)
    found = code_prompts(tokenizer, count, args.prompt_tokens, args.seed)
    return [str(tokenizer.decode(list(ids))) for ids in found]


def _body(args: argparse.Namespace, model: str, prompt: str) -> dict[str, Any]:
    body: dict[str, Any] = {
        "model": model,
        "max_tokens": args.output_tokens,
        "temperature": args.temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
    }
    if args.chat:
        body["messages"] = [{"role": "user", "content": prompt}]
    else:
        body["prompt"] = prompt
    return body | (args.extra_body or {})


async def _first_model(target: Any) -> str:
    import json

    from draftwise.bench.http_client import HttpError, get_text

    try:
        return str(json.loads(await get_text(target, "/v1/models"))["data"][0]["id"])
    except (ValueError, KeyError, IndexError, TypeError):
        raise HttpError(0, "/v1/models names no model; give --model") from None


def _print(result: ServeReport, title: str) -> None:
    parts = (
        ("first token", result.ttft),
        ("per token", result.tpot),
        ("between chunks", result.itl),
        ("whole request", result.e2e),
    )
    print(
        table(
            title,
            ["<", "mean", "p50", "p90", "p95", "p99"],
            [
                [label, *(f"{1000 * seconds:.1f} ms" for seconds in value.as_dict().values())]
                for label, value in parts
                if value is not None
            ],
        )
    )
    print(
        f"{result.request_rate:.2f} requests/s, {result.token_rate:.0f} output tokens/s "
        f"({result.output_tokens} tokens in {result.seconds:.2f} s), {result.num_failed} failed"
    )
    if result.goodput is not None and result.attainment is not None:
        limits = ", ".join(f"{name} {1000 * limit:g} ms" for name, limit in result.sla.items())
        print(f"goodput {result.goodput:.2f} requests/s ({100 * result.attainment:.1f} % within {limits})")
    if result.acceptance is not None:
        a = result.acceptance
        positions = " ".join(f"{rate:.2f}" for rate in a["acceptance_per_position"])
        print(
            f"mean acceptance length {a['mean_acceptance_length']:.2f}, by position {positions} "
            "(from the server's /metrics: other clients are in it)"
        )
