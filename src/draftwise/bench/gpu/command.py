"""``draftwise bench gpu``: runs the parts, each in a process of its own, and prints what they found."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from draftwise.bench.gpu.report import PartReport, table
from draftwise.errors import install

TEXT = "one GPU: kernels, graphs, drafting and whole engines, with random weights; under 8 minutes"
PARTS: dict[str, tuple[str, float]] = {
    "bandwidth": ("steps:measure_bandwidth", 40),
    "kernels": ("kernels:check_kernels", 120),
    "steps": ("steps:measure_steps", 130),
    "truth": ("truth:measure_truth", 60),
    "profile": ("profiles:profile_steps", 60),
    "drafting": ("steps:measure_drafting", 90),
    "engines": ("engines:measure_engines", 170),
    "memory": ("engines:measure_memory", 80),
    "transformers": ("engines:measure_transformers", 60),
    "attention": ("kernels:compare_attention", 90),
    "mixed": ("mixed:measure_mixed", 60),
    "adapters": ("adapters:measure_adapters", 45),
    "drafting_in_torch": ("steps:measure_drafting", 60),
}
"""name -> (module:function, most seconds), in order of importance: what comes last is cut first."""
_KERNELS = {"drafting_in_torch": "torch"}
"""``DRAFTWISE_KERNELS`` in a part's process, where it is not "triton": what stands between a loop's passes."""
TOTAL = 470.0
"""Seconds for everything."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS), help="(all)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write everything found as JSON")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout instead of the table")
    parser.add_argument("--device", default="cuda", help=argparse.SUPPRESS)
    parser.add_argument("--tiny", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--inside", choices=list(PARTS), help=argparse.SUPPRESS)


def main(argv: Sequence[str] | None = None) -> int:
    """Run from a command line of its own; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m draftwise.bench gpu", description=TEXT)
    add_arguments(parser)
    return run(parser.parse_args(argv))


def run(args: argparse.Namespace) -> int:
    """Carry it out. 0: every part came to its end; 1: some did not; 2: there is no GPU."""
    reason = why_not(args.device)
    if reason is not None:
        print(f"draftwise: bench gpu: {reason}", file=sys.stderr)
        return 2
    if args.inside:
        run_part(args.inside, args.device, args.tiny, args.out)
        return 0
    begun = time.monotonic()
    reports: list[PartReport] = []
    for name in args.parts:
        left = TOTAL - (time.monotonic() - begun)
        print(f"{time.monotonic() - begun:4.0f} s  {name} ...", file=sys.stderr, flush=True)
        if left < 15:
            reports.append(PartReport(name, skipped="no time was left"))
            continue
        reports.append(_in_a_process(name, args, min(PARTS[name][1], left)))
    found = {
        "benchmark": "gpu",
        "environment": environment(args.device),
        "seconds": time.monotonic() - begun,
        "parts": [report.as_dict() for report in reports],
    }
    text = json.dumps(found, indent=1)
    if args.out is not None:
        args.out.write_text(text + "\n")
    if args.json:
        print(text)
    else:
        print(", ".join(f"{name} {value}" for name, value in found["environment"].items()))  # type: ignore[attr-defined]
        print(table(reports))
    return 1 if any(report.error for report in reports) else 0


def why_not(device: str) -> str | None:
    """Why nothing can be measured on a device; None: it can."""
    try:
        import torch
    except ImportError as error:
        return f"torch cannot be imported: {error}"
    if device != "cpu" and not torch.cuda.is_available():
        return "torch sees no CUDA device; there is nothing to measure"
    if device != "cpu" and importlib.util.find_spec("triton") is None:
        return f"the package triton is not installed ({install('gpu')})"
    return None


def run_part(name: str, device: str, tiny: bool, path: Path | None = None) -> PartReport:
    """Run a part here. What it raises is in the report, which is written to ``path`` line by line."""
    from draftwise.bench.gpu.setting import Setting

    report = PartReport(name, error="it did not come to its end", path=None if path is None else str(path))
    module, _, function = PARTS[name][0].partition(":")
    begun = time.monotonic()
    try:
        part: Any = getattr(importlib.import_module(f"draftwise.bench.gpu.{module}"), function)
        part(Setting(device, tiny), report)
        report.error = None
    except Exception as error:
        report.error = _in_one_line(error)
    report.seconds = time.monotonic() - begun
    report.save()
    return report


def _in_one_line(error: BaseException) -> str:
    """The exception, and the innermost line of this package in its traceback."""
    place = ""
    trace = error.__traceback__
    while trace is not None:
        if "draftwise" in trace.tb_frame.f_code.co_filename:
            place = f" ({Path(trace.tb_frame.f_code.co_filename).name}:{trace.tb_lineno})"
        trace = trace.tb_next
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:400]}{place}"


def _in_a_process(name: str, args: argparse.Namespace, seconds: float) -> PartReport:
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "part.json")
        command = [sys.executable, "-m", "draftwise.bench", "gpu", "--inside", name, "--out", str(out)]
        command += ["--device", args.device] + ["--tiny"] * args.tiny
        source = str(Path(__file__).resolve().parents[3])
        paths = [source, *filter(None, [os.environ.get("PYTHONPATH")])]
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        if args.device != "cpu":
            environ["DRAFTWISE_KERNELS"] = _KERNELS.get(name, "triton")
        error = None
        try:
            done = subprocess.run(command, env=environ, timeout=seconds, capture_output=True, text=True)
            if done.returncode:
                last = [line for line in done.stderr.splitlines() if line.strip()][-1:] or ["it said nothing"]
                error = f"its process ended with {done.returncode}: {last[0][:400]}"
        except subprocess.TimeoutExpired:
            error = f"stopped after {seconds:.0f} s"
        report = PartReport(name)
        if out.exists():
            report = PartReport.from_dict(json.loads(out.read_text()))
        if error is not None:
            report.error = error
        report.seconds = time.monotonic() - begun
        return report


def environment(device: str) -> dict[str, str]:
    """The measured configuration."""
    import torch

    found = {"python": platform.python_version(), "torch": torch.__version__}
    try:
        import triton

        found["triton"] = triton.__version__
    except ImportError:
        pass
    if device != "cpu":
        properties = torch.cuda.get_device_properties(torch.device(device))
        found["gpu"] = properties.name
        found["memory"] = f"{properties.total_memory / 2**30:.0f} GiB"
        found["capability"] = f"{properties.major}.{properties.minor}"
        found["cuda"] = str(torch.version.cuda)
    found["date"] = time.strftime("%Y-%m-%d", time.gmtime())
    return found
