"""``draftwise show``: a model's architecture, its memory, and drafters that fit, without loading it."""

from __future__ import annotations

import argparse
import textwrap
from typing import TYPE_CHECKING, Any

from draftwise.cli.numbers import positive
from draftwise.cli.report import print_json

if TYPE_CHECKING:
    from draftwise.cli.options import Subparsers
    from draftwise.models.describe import ModelFacts, RankFacts
    from draftwise.models.drafters import Drafter

_NAME, _WIDTH = 14, 80
_TOGETHER = "\xa0"  # a space at which no line is broken
_WAYS = {
    "own": "code of its own, on our kernels",
    "general": "our operations if they compute all of it, else Transformers' code (found out at load)",
    "": "none",
}


def add_parser(subparsers: Subparsers) -> None:
    """Register ``show``."""
    parser = subparsers.add_parser(
        "show",
        help="what a model is and what drafts for it, without loading it",
        usage="draftwise show [MODEL] [options]",
        description="Architecture, memory, cache and drafters of a model, from the headers of its files.",
    )
    parser.add_argument(
        "model", nargs="?", metavar="MODEL", help="folder, GGUF file or hub id (the embedded model)"
    )
    parser.add_argument("--revision", help="revision of the model on the hub")
    parser.add_argument("--max-model-len", type=positive, metavar="N", help="tokens of context to plan for")
    parser.add_argument(
        "--speculative-model",
        action="append",
        default=[],
        metavar="DRAFTER",
        help="a draft model or head to check against the model; may be repeated",
    )
    parser.add_argument(
        "--tensor-parallel-size",
        type=positive,
        default=1,
        metavar="N",
        help="show the part of each of N ranks",
    )
    parser.add_argument(
        "--enable-expert-parallel", action="store_true", help="divide experts among ranks as whole ones"
    )
    parser.add_argument("--json", action="store_true", help="as a JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Carry out ``draftwise show``."""
    from draftwise.config.embedded import embedded_path
    from draftwise.models.describe import describe, describe_ranks
    from draftwise.models.drafters import beside, given, modelless

    model = args.model if args.model is not None else str(embedded_path("target"))
    facts = describe(model, args.revision, args.max_model_len)
    drafters = []
    if facts.refused is None:
        drafters = [*modelless(facts), *beside(facts)]
        known = {drafter.model for drafter in drafters}
        drafters += [given(facts, path) for path in args.speculative_model if path not in known]
    ranks: list[RankFacts] = []
    if args.tensor_parallel_size > 1:
        by_rank = args.enable_expert_parallel
        ranks = describe_ranks(facts, args.tensor_parallel_size, experts_by_rank=by_rank)
    report = as_dict(facts, drafters, ranks)
    if args.json:
        print_json(report)
    else:
        print("\n".join(lines(report)))
    return 0


def as_dict(facts: ModelFacts, drafters: list[Drafter], ranks: list[RankFacts]) -> dict[str, Any]:
    """The facts to show. Sizes in bytes, lengths in tokens; null: not known."""
    config = facts.config
    out: dict[str, Any] = {
        "model": str(facts.folder),
        "architecture": facts.architecture,
        "model_type": facts.model_type,
        "way": facts.way or None,
        "refused": facts.refused,
        "parameters": None if facts.parameters is None else facts.parameters.total,
        "stored": dict(facts.stored),
        "stored_bytes": facts.stored_bytes,
        "quantized": facts.quantized,
        "weight_bytes": facts.weight_bytes(),
        "cache_bytes_per_token": facts.cache_bytes(),
        "state_bytes": None if facts.state is None else facts.state.num_bytes,
        "cache_is_exact": facts.layout_is_exact if facts.layout else None,
        "ranks": [
            {
                "rank": r.rank,
                "heads": r.heads,
                "kv_heads": r.kv_heads,
                "weight_bytes": r.weight_bytes(),
                "cache_bytes_per_token": r.cache_bytes(),
            }
            for r in ranks
        ],
        "drafters": [
            {
                "method": d.method,
                "model": d.model,
                "fits": d.refused is None,
                "refused": d.refused,
                "num_speculative_tokens": d.num_tokens,
                "parameters": d.parameters,
            }
            for d in drafters
        ],
    }
    if config is not None:
        windows = sorted({window for window in config.sliding_window if window is not None})
        out |= {
            "layers": config.num_layers,
            "hidden_size": config.hidden_size,
            "heads": config.num_heads,
            "kv_heads": config.num_kv_heads,
            "head_dim": config.head_dim,
            "vocab_size": config.vocab_size,
            "max_model_len": config.max_model_len,
            "sliding_windows": windows,
            "cache_bytes_behind_windows": facts.unread_bytes(config.max_model_len),
            "dtype": config.dtype,
        }
    return out


def lines(report: dict[str, Any]) -> list[str]:
    """The report for people: names at the left, at most 80 columns."""
    rows: list[tuple[str, str]] = [("model", report["model"])]
    kind = f" ({report['model_type']})" if report["model_type"] else ""
    rows.append(("architecture", report["architecture"] + kind))
    rows.append(("runs on", _WAYS[report["way"] or ""]))
    if report["refused"] is not None:
        rows.append(("refused", report["refused"]))
    if "layers" in report:
        heads, kv = report["heads"], report["kv_heads"]
        shape = f"{report['layers']} layers of {report['hidden_size']}, {heads} heads of {report['head_dim']}"
        rows.append(("shape", shape if heads == kv else f"{shape} over {kv} of keys"))
        rows.append(("vocabulary", f"{report['vocab_size']} tokens"))
        rows.append(("context", f"{report['max_model_len']} tokens{_windows(report['sliding_windows'])}"))
    if report["parameters"] is not None:
        rows.append(("parameters", _count(report["parameters"])))
    stored = ", ".join(sorted(report["stored"], key=report["stored"].get, reverse=True))
    form = f", {report['quantized']}" if report["quantized"] else ""
    if stored:
        rows.append(("stored as", f"{size(report['stored_bytes'])} ({stored}{form})"))
    else:
        rows.append(("weights", f"none in this folder{form}: sizes are reckoned from config.json"))
    if report["weight_bytes"]:
        rows.append(("memory", _sizes(report["weight_bytes"])))
    rows += _cache(report)
    if report["state_bytes"] is not None:
        rows.append(("state", f"{size(report['state_bytes'])} a request and draft"))
    for r in report["ranks"]:
        over = "" if r["heads"] == r["kv_heads"] else f" over {r['kv_heads']} of keys"
        rows.append((f"rank {r['rank']}", f"{r['heads']} heads{over}"))
        rows.append(("  memory", _sizes(r["weight_bytes"])))
        rows.append(("  cache", f"{_sizes(r['cache_bytes_per_token'])} a token"))
    rows += [("drafts" if i == 0 else "", _drafter(d)) for i, d in enumerate(report["drafters"])]
    return [line for name, text in rows for line in _wrapped(name, text)]


def _cache(report: dict[str, Any]) -> list[tuple[str, str]]:
    per_token: dict[str, int] = report["cache_bytes_per_token"]
    if not per_token:
        return []
    about = "" if report["cache_is_exact"] else "about "
    context = report["max_model_len"]
    whole = {name: count * context for name, count in per_token.items()}
    rows = [
        ("cache", f"{about}{_sizes(per_token)} a token"),
        ("", f"{about}{_sizes(whole)} at {context} tokens"),
    ]
    unread = report["cache_bytes_behind_windows"]
    if unread:  # other layers read these tokens, and all share a table of blocks
        rows.append(("", f"{about}{_sizes(unread)} of that behind windows: kept, and not read"))
    return rows


def _sizes(found: dict[str, int]) -> str:
    return "   ".join(f"{name} {size(count)}".replace(" ", _TOGETHER) for name, count in found.items())


def _drafter(drafter: dict[str, Any]) -> str:
    parts = [drafter["method"]]
    if drafter["model"] is not None:
        parts.append(drafter["model"])
    if drafter["refused"] is not None:
        return f"{' '.join(parts)}: does not fit: {drafter['refused']}"
    if drafter["parameters"] is not None:
        where = "" if drafter["model"] is not None else "in the checkpoint, "
        parts.append(
            f"({where}{_count(drafter['parameters'])}, {drafter['num_speculative_tokens']} tokens a step)"
        )
    else:
        parts.append("(needs nothing)")
    return " ".join(parts)


def _windows(windows: list[int]) -> str:
    return f", windows of {', '.join(map(str, windows))} in some layers" if windows else ""


def _wrapped(name: str, text: str) -> list[str]:
    first = f"{name:<{_NAME}}"
    found = textwrap.wrap(
        text, _WIDTH, initial_indent=first, subsequent_indent=" " * _NAME, break_on_hyphens=False
    )
    return [line.replace(_TOGETHER, " ") for line in found] or [first.rstrip()]


def size(count: int) -> str:
    """Bytes for people, in powers of 1024.

    >>> size(0), size(1536), size(20 << 30)
    ('0 B', '1.5 KiB', '20 GiB')
    """
    value, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value, units = value / 1024, units[1:]
    return f"{value:.3g} {units[0]}" if value < 1000 else f"{value:.0f} {units[0]}"


def _count(number: int) -> str:
    for unit, name in ((10**9, "billion"), (10**6, "million"), (10**3, "thousand")):
        if number >= unit:
            return f"{number / unit:.3g} {name}"
    return str(number)
