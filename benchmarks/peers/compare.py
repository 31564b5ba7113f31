"""Draftwise and other engines on one machine, in one run, taking turns round by round.

    python benchmarks/peers/compare.py passes --work DIR --peers ENVS --format bf16
    python benchmarks/peers/compare.py generate --work DIR --peers ENVS
    python benchmarks/peers/compare.py generate --work DIR --peers ENVS --batch 1 16 --engines draftwise vllm

``DIR`` holds the models that `prepare.py` made, ``ENVS`` one virtual environment per peer (README.md). A peer without
one is skipped with a message. ``passes``: the model of 1.1 billion parameters, single forward passes, in milliseconds;
``generate``: the embedded pair, in tokens per second. Each engine is a process that loads once and is then asked one
cell at a time; while others are asked, it is stopped. Medians over the rounds, their ratios, the memory's read
bandwidth in between, and the CPU time of idle engines are printed, and written with ``--json``.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from channel import Unsupported
from jobs import OURS, PEERS, Cell, Peer, family, generate_cell, model_path, step_cells
from processes import AnswerError, PeerError, Unavailable, Worker, check_imports, interpreter
from report import Samples, common_prefix, compare, idle_shares, table

HERE = Path(__file__).parent
IDLE_LIMIT = 0.02  # cores; more than that in idle engines spoils the others' numbers
ENVIRONMENTS_VARIABLE = "DRAFTWISE_PEERS"


@dataclass(slots=True)
class Runner:
    """A loaded worker: its row in the table, what it is asked, and whether it still answers."""

    label: str
    worker: Worker
    methods: tuple[str, ...] = ()
    batches: bool = False
    alive: bool = True

    def serves(self, cell: Cell) -> bool:
        """Whether the cell is for this worker: one of its methods, and no more requests at once than it takes."""
        if cell.tokens is None:
            return True
        return cell.question["method"] in self.methods and (self.batches or not cell.batched)


@dataclass(slots=True)
class Run:
    """Everything one run measures."""

    samples: Samples = field(default_factory=Samples)
    bandwidth: list[float] = field(default_factory=list)  # bytes per second, one per round
    versions: dict[str, Any] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    idle_used: dict[str, float] = field(default_factory=dict)  # CPU seconds while others were asked
    idle_time: dict[str, float] = field(default_factory=dict)  # seconds of that
    greedy: dict[tuple[str, str, int], list[int]] = field(default_factory=dict)  # (engine, method, prompt)
    runners: list[Runner] = field(default_factory=list)

    def close(self) -> None:
        for runner in self.runners:
            runner.worker.close()


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def start(run: Run, given: argparse.Namespace, peer: Peer, label: str, load: dict[str, Any]) -> None:
    """Start one worker and let it load; what keeps it from that is noted."""
    try:
        own = sys.executable if peer.name in (OURS, "transformers") else None
        named = dict(pair.split("=", 1) for pair in given.python)
        folder = given.peers or os.environ.get(ENVIRONMENTS_VARIABLE)
        python = interpreter(peer.name, named, folder, own)
        check_imports(python, peer.modules)
        for key in ("model", "draft"):
            if load.get(key) and not Path(load[key]).exists():
                raise Unavailable(f"{load[key]} is missing; prepare.py makes it")
    except Unavailable as reason:
        run.skipped[label] = str(reason)
        say(f"{label}: skipped: {reason}")
        return
    log = Path(given.work) / f"worker-{label.replace(' ', '-').replace(',', '')}.log"
    worker = Worker(
        label,
        [python, str(HERE / peer.adapter)],
        log,
        # said from outside, vLLM takes it as it is; without it, one thread
        environment={"OMP_NUM_THREADS": str(load["threads"])} if peer.name == "vllm" else None,
        pause=not given.no_pause,
    )
    runner = Runner(label, worker, tuple(load["methods"]), peer.batches)
    run.runners.append(runner)
    try:
        run.versions[label] = worker.ask({"do": "load", **load})
        say(f"{label}: loaded ({', '.join(f'{k} {v}' for k, v in run.versions[label].items())})")
    except (PeerError, Unsupported) as reason:
        runner.alive = False
        run.skipped[label] = str(reason)
        say(f"{label}: skipped: {reason}")


def ask(run: Run, runner: Runner, cell: Cell, *, keep: bool, prompt: int = 0) -> None:
    """Ask one cell; its value or the reason why there is none goes to the samples."""
    others = [other for other in run.runners if other is not runner]
    before = {other.label: other.worker.cpu_seconds() for other in others}
    clock = os.times().elapsed
    try:
        reply = runner.worker.ask(cell.question)
    except Unsupported as reason:
        run.samples.note(_row(runner, cell), _column(cell), str(reason))
        return
    except PeerError as reason:
        runner.alive = isinstance(reason, AnswerError)
        run.samples.note(_row(runner, cell), _column(cell), str(reason).partition("\n")[0])
        say(str(reason))
        return
    passed = os.times().elapsed - clock
    for other in others:
        used = other.worker.cpu_seconds() - before[other.label]
        run.idle_used[other.label] = run.idle_used.get(other.label, 0.0) + used
        run.idle_time[other.label] = run.idle_time.get(other.label, 0.0) + passed
    if not keep:
        return
    if cell.tokens is None:
        value = statistics.median(reply) if isinstance(reply, list) else float(reply)
    else:
        lengths = [len(ids) for ids in reply["token_ids"]]
        wanted = cell.tokens // len(lengths)
        if any(length != wanted for length in lengths):
            raise PeerError(f"{runner.label}: {wanted} tokens were asked for, {lengths} came")
        value = cell.tokens / reply["seconds"]
        if cell.question["temperature"] == 0 and not cell.batched:
            key = (runner.label.partition(",")[0], cell.question["method"], prompt)
            run.greedy[key] = reply["token_ids"][0]
    run.samples.add(_row(runner, cell), _column(cell), value)


def _row(runner: Runner, cell: Cell) -> str:
    """Passes: a row per engine and format. Generation: a row per engine and method."""
    if cell.tokens is None:
        return runner.label
    return f"{runner.label.partition(',')[0]}, {cell.question['method']}"


def _column(cell: Cell) -> str:
    return cell.name if cell.tokens is None else cell.name.partition(", ")[2]


def rounds(run: Run, given: argparse.Namespace, cells_of_round: Sequence[list[Cell]]) -> None:
    """All rounds; the first one warms up and does not count. Who interrupts them gets what was measured until then."""
    if given.wait:
        say("ready: waiting for a line on standard input")
        sys.stdin.readline()
    try:
        _rounds(run, given, cells_of_round)
    except KeyboardInterrupt:
        say("interrupted: what was measured until now")


def _rounds(run: Run, given: argparse.Namespace, cells_of_round: Sequence[list[Cell]]) -> None:
    began = time.monotonic()
    for turn in range(given.rounds + 1):
        if turn > 1 and given.seconds is not None and time.monotonic() - began > given.seconds:
            say(f"{given.seconds:g} s are over after {turn - 1} rounds")
            break
        number = max(0, turn - 1)
        cells = cells_of_round[number % len(cells_of_round)]
        living = [runner for runner in run.runners if runner.alive]
        if not living:
            return
        for runner in living[turn % len(living) :] + living[: turn % len(living)]:
            if runner.label.partition(" ")[0] == OURS and turn and len(run.bandwidth) < turn:
                run.bandwidth.append(runner.worker.ask({"do": "bandwidth"}))
            for cell in cells:
                if runner.alive and runner.serves(cell):
                    ask(run, runner, cell, keep=turn > 0, prompt=number % len(cells_of_round))
        say(f"round {turn} of {given.rounds}" + (" (warming up)" if not turn else ""))


def passes(run: Run, given: argparse.Namespace) -> dict[str, Any]:
    """Workload (a): forward passes of the large model in one weight format."""
    own = []
    for name in given.engines:
        peer = PEERS[name]
        for format in peer.formats:
            if family(format) != given.format:
                continue
            label = f"{name} {format}"
            if name == OURS:
                own.append(label)
            load = {
                "model": str(model_path(Path(given.work), name, "llama-1b", format)),
                "format": format,
                "methods": ["plain"],
                "threads": given.threads,
                "max_len": max([*given.contexts, *given.prefill]) + 1024,
                "batch": max(given.rows) if peer.batches and name != OURS else 1,
            }
            start(run, given, peer, label, load)
    rounds(run, given, [step_cells(given.contexts, given.rows, given.prefill)])
    return _report(run, own, lower=True, unit="ms, rows @ context", scale=1000.0)


def picked(prompts: Sequence[Sequence[int]], turn: int, size: int) -> list[Sequence[int]]:
    """The prompts of a round: ``size`` in a row, beginning with another one each turn."""
    return [prompts[(turn + i) % len(prompts)] for i in range(size)]


def generate(run: Run, given: argparse.Namespace) -> dict[str, Any]:
    """Workload (b): the embedded pair, end to end."""
    from draftwise.bench.workloads import code_prompts
    from draftwise.config.embedded import embedded_path
    from draftwise.models.tokenizer import load_tokenizer

    tokenizer: Any = load_tokenizer(str(embedded_path("target")))
    largest = max(given.batch)
    prompts = code_prompts(tokenizer, max(given.prompts, largest), given.prompt_tokens, seed=given.seed)
    for name in given.engines:
        peer = PEERS[name]
        methods = tuple(m for m in given.methods if m in peer.methods)
        for group in [(m,) for m in methods] if peer.alone else [methods]:
            label = f"{name}, {group[0]}" if peer.alone else name
            shipped = name in (OURS, "vllm", "transformers")  # read the embedded folders themselves
            load: dict[str, Any] = {
                key: str(embedded_path(model) if shipped else model_path(Path(given.work), name, model))
                for key, model in (("model", "target"), ("draft", "draft"))
                if key == "model" or "draft_model" in group
            }
            load |= {
                "methods": group,
                "threads": given.threads,
                "num_draft": given.num_draft,
                "batch": largest if peer.batches else 1,
            }
            start(run, given, peer, label, load)
    cells = [
        [
            generate_cell(
                method,
                temperature,
                picked(prompts, turn, size if size > 1 else given.in_turn),
                given.output_tokens,
                at_once=size > 1,
            )
            for size in given.batch
            for temperature in given.temperatures
            for method in given.methods
        ]
        for turn in range(given.prompts)
    ]
    rounds(run, given, cells)
    own = [row for row in run.samples.engines if row.startswith(OURS)]
    report = _report(run, own, lower=False, unit="tokens/s", scale=1.0)
    equal: dict[str, list[int]] = {}
    for (engine, method, prompt), ids in run.greedy.items():
        ours = run.greedy.get((OURS, "plain", prompt))
        if ours is not None:
            equal.setdefault(f"{engine}, {method}", []).append(common_prefix(ours, ids))
    report["greedy_tokens_equal_to_ours"] = {name: statistics.fmean(found) for name, found in equal.items()}
    for name, mean in report["greedy_tokens_equal_to_ours"].items():
        print(f"{name}: greedy output equals ours for {mean:.0f} of {given.output_tokens} tokens on average")
    return report


def _report(run: Run, own: Sequence[str], *, lower: bool, unit: str, scale: float) -> dict[str, Any]:
    print(table(run.samples, own, lower=lower, unit=unit, scale=scale))
    print()
    if run.bandwidth:
        low, middle, high = min(run.bandwidth), statistics.median(run.bandwidth), max(run.bandwidth)
        print(f"read bandwidth: median {middle / 1e9:.1f} GB/s, {low / 1e9:.1f} to {high / 1e9:.1f}")
    idle = idle_shares(run.idle_used, run.idle_time)
    for name, share in idle.items():
        if share > IDLE_LIMIT:
            print(f"careful: {name} used {share:.2f} of a core while others were measured")
    for name, why in run.skipped.items():
        print(f"{name}: skipped: {why.partition(chr(10))[0]}")
    return {
        "unit": unit,
        "medians": {
            engine: {cell: run.samples.median(engine, cell) for cell in run.samples.cells}
            for engine in run.samples.engines
        },
        "ratios": compare(run.samples, own, lower=lower),
        "samples": run.samples.values,
        "notes": run.samples.notes,
        "bandwidth": run.bandwidth,
        "idle_cores": idle,
        "versions": run.versions,
        "skipped": run.skipped,
    }


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("passes", "generate"):
        command = commands.add_parser(name)
        command.add_argument("--work", required=True, help="folder of prepare.py's models; logs go there")
        command.add_argument("--peers", help=f"folder of environments (default: ${ENVIRONMENTS_VARIABLE})")
        command.add_argument(
            "--python", action="append", default=[], metavar="NAME=PATH", help="one environment"
        )
        command.add_argument("--engines", nargs="+", choices=list(PEERS), default=list(PEERS))
        command.add_argument("--rounds", type=int, default=7)
        command.add_argument("--seconds", type=float, help="begin no round after so many")
        command.add_argument("--threads", type=int, default=os.cpu_count())
        command.add_argument("--json", type=Path, help="where to write everything that was measured")
        command.add_argument(
            "--wait", action="store_true", help="load, then wait for a line on standard input"
        )
        command.add_argument("--no-pause", action="store_true", help="let idle engines run")
        if name == "passes":
            command.add_argument("--format", choices=("bf16", "int8", "int4"), default="bf16")
            command.add_argument("--rows", type=int, nargs="+", default=[1, 4, 8])
            command.add_argument("--contexts", type=int, nargs="+", default=[64, 2048])
            command.add_argument("--prefill", type=int, nargs="*", default=[512], help="prompts' tokens")
        else:
            command.add_argument("--methods", nargs="+", default=["plain", "ngram", "draft_model", "suffix"])
            command.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.8])
            command.add_argument("--prompts", type=int, default=7, help="different ones; rounds take turns")
            command.add_argument("--prompt-tokens", type=int, default=128)
            command.add_argument("--output-tokens", type=int, default=128)
            command.add_argument("--num-draft", type=int, default=4)
            command.add_argument("--batch", type=int, nargs="+", default=[1], help="requests at once")
            command.add_argument(
                "--in-turn",
                type=int,
                default=3,
                help="requests one after the other, where one runs at a time",
            )
            command.add_argument("--seed", type=int, default=0)
    return parser.parse_args(arguments)


def main() -> int:
    given = parse()
    Path(given.work).mkdir(parents=True, exist_ok=True)
    run = Run()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # engines are ended in any case
    try:
        report = passes(run, given) if given.command == "passes" else generate(run, given)
    finally:
        run.close()
    if given.json:
        report["arguments"] = {key: str(value) for key, value in vars(given).items()}
        given.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
