"""Seconds from a command to its end: help, the environment, one token of the embedded model.

    python benchmarks/startup.py [--rounds 7]

Commands run in turns; medians, of the clock and of the processor.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time

COMMANDS = {
    "--help": ["--help"],
    "env": ["env"],
    "one token": ["generate", "def main(", "--max-tokens", "1"],
}


def measure(arguments: list[str]) -> tuple[float, float]:
    """Seconds of the clock and of the processor that a command takes."""
    before, start = os.times(), time.perf_counter()
    subprocess.run([sys.executable, "-m", "draftwise", *arguments], capture_output=True, check=True)
    clock, after = time.perf_counter() - start, os.times()
    return clock, after.children_user + after.children_system - before.children_user - before.children_system


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in COMMANDS}
    for _ in range(rounds):
        for name, arguments in COMMANDS.items():
            times[name].append(measure(arguments))
    print(f"{'command':<12}{'clock s':>9}{'cpu s':>9}")
    for name, measured in times.items():
        clock, cpu = (statistics.median(column) for column in zip(*measured, strict=True))
        print(f"{name:<12}{clock:>9.2f}{cpu:>9.2f}")


if __name__ == "__main__":
    main()
