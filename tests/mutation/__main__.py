"""``scripts/mutate``: see docs/guides/mutation.md."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.mutation.campaign import Campaign, choose
from tests.mutation.selection import ROOT, SPINE, modules_of, source_of, tests_of
from tests.mutation.workers import Worker

_SLOW_IMPORTS = (
    "numpy", "torch", "transformers", "transformers.models.llama.modeling_llama", "tokenizers", "safetensors.torch",
    "scipy.stats", "hypothesis.stateful", "llguidance", "jsonschema", "_pytest.assertion.rewrite", "rich.console",
)  # fmt: skip


def warm() -> None:
    """Import what takes seconds and cannot have a mutant in it."""
    from importlib import import_module

    for name in _SLOW_IMPORTS:
        with contextlib.suppress(ImportError):
            import_module(name)
    import torch

    torch.set_num_threads(1)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/mutate",
        description="Change modules in one place at a time, in copies, and tell which changes no test sees.",
    )
    parser.add_argument("modules", nargs="*", help="modules or packages, as names or paths under src/")
    parser.add_argument("--spine", action="store_true", help="what every step of every request goes through")
    parser.add_argument("--count", type=int, help="mutants chosen by chance (all)")
    parser.add_argument("--seed", type=int, default=0, help="of that chance (0)")
    parser.add_argument("--processes", type=int, default=1, help="side by side (1)")
    parser.add_argument("--tests", nargs="+", help="pytest targets for all modules (found by imports)")
    parser.add_argument("--quick", action="store_true", help="unit tests alone; then --again with all")
    parser.add_argument("--test-seconds", type=float, default=90.0, help="of tests, for one mutant (90)")
    parser.add_argument("--json", type=Path, help="write everything to this file")
    parser.add_argument(
        "--again", type=Path, help="the survivors of an earlier run's --json, where they still stand"
    )
    parser.add_argument("--list", action="store_true", help="show mutants and tests, run nothing")
    options = parser.parse_args(arguments)
    if options.spine:
        options.modules += SPINE
    if options.again:
        options.modules += [v["module"] for v in json.loads(options.again.read_text())["mutants"]]
    if not options.modules:
        parser.error("name modules, or --spine")
    if options.processes < 1 or (options.count is not None and options.count < 1):
        parser.error("--processes and --count must be at least 1")
    try:
        options.modules = modules_of(options.modules)
    except ValueError as error:
        parser.error(str(error))
    return options


def main(arguments: list[str] | None = None) -> int:
    """0: every mutant was seen; 1: some survived, or no test could be run; 130: interrupted."""
    options = parse(arguments)
    mutants = choose(ROOT, options.modules, options.count, options.seed)
    if options.again:
        earlier = json.loads(options.again.read_text())["mutants"]
        survivors = {v["name"] for v in earlier if v["status"] != "killed"}
        mutants = [m for m in choose(ROOT, options.modules, None, 0) if m.name in survivors]
    if options.list:
        for mutant in mutants:
            print(mutant.name)
            print(mutant.mutation.diff((ROOT / source_of(mutant.module)).read_text(), mutant.module))
        for module in options.modules:
            print(module, *(options.tests or tests_of(module, quick=options.quick)), sep="\n  ")
        return 0
    os.environ.update(OMP_NUM_THREADS="1", OMP_WAIT_POLICY="passive", HF_HUB_OFFLINE="1")
    # Also where somebody started us in the background, in which Ctrl-C is ignored; a polite kill ends us likewise.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        workers: list[Worker] = []
        try:
            workers += [Worker(ROOT, Path(folder) / str(i), warm) for i in range(options.processes)]
            campaign = Campaign(ROOT, workers, _say, options.tests, options.quick, options.test_seconds)
            interrupted = False
            try:
                campaign.measure(sorted({mutant.module for mutant in mutants}))
                if not campaign.timings:
                    print("no test target passes on the sources as they are", file=sys.stderr)
                    return 1
                campaign.run(mutants)
            except KeyboardInterrupt:
                interrupted = True
        finally:
            for worker in workers:
                worker.stop()
    seconds = time.monotonic() - start
    report(campaign, len(mutants), seconds)
    if options.json:
        options.json.write_text(json.dumps(as_dict(campaign, options, seconds), indent=1))
    if interrupted:
        return 130
    return 1 if any(verdict.status == "survived" for verdict in campaign.verdicts) else 0


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def report(campaign: Campaign, asked: int, seconds: float) -> None:
    """A table, then every mutant that lived."""
    from rich.console import Console
    from rich.table import Table

    table = Table("module", "killed", "survived", "timed out")
    sums = [0, 0, 0]
    for module, *counts in campaign.table():
        table.add_row(module, *map(str, counts))
        sums = [a + b for a, b in zip(sums, counts, strict=True)]
    table.add_section()
    table.add_row("all", *map(str, sums))
    console = Console()
    for verdict in campaign.verdicts:
        if verdict.status == "survived":
            console.print(f"\n{verdict.mutant.name}  ({verdict.mutant.mutation.operator})", markup=False)
            console.print(verdict.diff, markup=False, highlight=False)
    console.print(table)
    done = len(campaign.verdicts)
    console.print(f"{done} of {asked} mutants in {seconds / 60:.1f} minutes")


def as_dict(campaign: Campaign, options: argparse.Namespace, seconds: float) -> dict[str, Any]:
    """For machines."""
    return {
        "modules": options.modules,
        "seed": options.seed,
        "seconds": round(seconds, 1),
        "targets": {name: round(timing.seconds, 2) for name, timing in campaign.timings.items()},
        "dropped": campaign.dropped,
        "mutants": [
            {
                "name": verdict.mutant.name,
                "module": verdict.mutant.module,
                "line": verdict.mutant.mutation.line,
                "operator": verdict.mutant.mutation.operator,
                "status": verdict.status,
                "by": verdict.by,
                "seconds": round(verdict.seconds, 2),
                "diff": verdict.diff,
            }
            for verdict in campaign.verdicts
        ],
    }


if __name__ == "__main__":
    sys.exit(main())
