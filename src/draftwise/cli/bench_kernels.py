"""``draftwise bench kernels``: native linear layers against the machine's roofline."""

from __future__ import annotations

import argparse
from typing import Any

from draftwise.cli.env import environment
from draftwise.cli.numbers import positive
from draftwise.cli.report import note, print_json, progress
from draftwise.cli.tables import table

_TEXT = "native linear layers of a 1.1 B model: what 1, 2, ... rows cost, against what the machine allows"


def add_parser(kinds: Any) -> None:
    """Register the kind with ``bench``'s parsers."""
    parser = kinds.add_parser(
        "kernels", help=_TEXT, description=_TEXT, usage="draftwise bench kernels [options]"
    )
    group = parser.add_argument_group("measurement")
    group.add_argument(
        "--formats",
        nargs="+",
        metavar="FORMAT",
        help="bfloat16, float32, nvfp4, mxfp4, both with _dynamic, and names of --quantization",
    )
    group.add_argument(
        "--rows",
        nargs="+",
        type=positive,
        metavar="N",
        default=[1, 2, 4, 6, 8, 16, 64],
        help="(1 2 4 6 8 16 64)",
    )
    group.add_argument("--threads", type=positive, metavar="N", help="(as many as torch uses)")
    group.add_argument(
        "--rounds", type=positive, default=15, metavar="N", help="times everything is run (15)"
    )
    group.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Carry it out."""

    from draftwise.bench.kernels import FORMATS, bench_kernels

    formats = args.formats or FORMATS[:5]
    total = (args.rounds + 1) * len(formats) * len({1, *args.rows})
    with progress(total, "packing weights") as advance:
        report = bench_kernels(
            formats=formats, rows=args.rows, threads=args.threads, rounds=args.rounds, advance=advance
        )
    if args.json:
        print_json(
            {
                "benchmark": "kernels",
                "settings": {"formats": list(formats), "rows": args.rows, "rounds": args.rounds},
                "environment": environment(),
                "isa": report.isa,
                "threads": report.threads,
                "bandwidth": report.bandwidth,
                "peaks": report.peaks,
                "results": [row.as_dict() for row in report.rows],
            }
        )
        return 0
    print(
        table(
            "linear layers of one pass, 1.1 B parameters",
            [
                "<format", "rows", "time", "against\n1 row", "weights\nread", "arithmetic", "share of\nroofline",
            ],
            [
                [
                    row.format if row.rows == 1 else "",
                    str(row.rows),
                    f"{1000 * row.seconds:.1f} ms",
                    "" if row.against_one is None else f"{row.against_one:.2f}x",
                    f"{row.read_rate / 1e9:.1f} GB/s",
                    f"{row.operation_rate / 1e9:.0f} Gop/s",
                    f"{row.share:.2f}",
                ]
                for row in report.rows
            ],
        )
    )  # fmt: skip
    peaks = ", ".join(f"{name} {rate / 1e9:.0f} Gop/s" for name, rate in report.peaks.items())
    note(
        f"{report.isa}, {report.threads} threads; in this run memory reads {report.bandwidth / 1e9:.1f} GB/s, "
        f"arithmetic peaks: {peaks}; medians, everything alternates"
    )
    return 0
