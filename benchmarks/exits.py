"""Ends processes at random moments and looks at how: 200 scripts, servers and commands, each with an engine at work.

A process may end by itself (its script is over, or raises), by Ctrl-C, by SIGTERM, or fork a child that ends. Wanted:
the exit code that belongs to it, no signal, no traceback but that of a script's own exception, and not later than
``--limit`` seconds after the signal or the script's last line.

The command "fleet" is a server with two replicas. It may also be killed itself, or lose one of them before SIGTERM
comes ("child"). However it ends: none of the processes that it started stays behind.

Scripts of the kind "closed" closed their engine before: their end is Python's alone, and says what the machine and its
other load make of the rest.

    python benchmarks/exits.py --count 200 --seed 1
    python benchmarks/exits.py --seed 1 --only 17      # one of them again, with what it wrote

Commands are measured from the moment at which the package's first line has run: before it, a signal meets Python alone.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

SOURCES = Path(__file__).resolve().parents[1] / "src"
HANG = 60.0
"""Seconds after which a process is killed."""

PRELUDE = """
import asyncio, os, random, signal, sys, threading, time, warnings
signal.signal(signal.SIGINT, signal.default_int_handler)  # also for who was started in the background
warnings.simplefilter("ignore")
seed, ending, options = int(sys.argv[1]), sys.argv[2], eval(sys.argv[3])
rng = random.Random(seed)
from draftwise import AsyncLLM, LLM, SamplingParams
from draftwise.errors import EngineDeadError

def prompt():
    return {"prompt_token_ids": [rng.randrange(5, 900) for _ in range(rng.choice([5, 100, 600]))]}

def params():
    return SamplingParams(max_tokens=rng.choice([3, 50, 400]), ignore_eos=True, temperature=rng.choice([0.0, 1.0]))

def terminate(*_):
    sys.exit(143)

signal.signal(signal.SIGTERM, terminate)

def mark(name):
    os.write(1, name + b"\\n")

def fork(use):
    child = os.fork()
    if child == 0:
        signal.alarm(50)
        use()
        sys.exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code:
        sys.exit(f"the child ended with {code}")
"""

# A signal that arrives while a task runs ends that task with SystemExit, and asyncio itself then says of such a task,
# of any program's, that nobody asked for its exception. The script leaves that one remark out, so that what it writes
# is the engine's.
ASYNC = """
llm = AsyncLLM(**options)
loop = asyncio.new_event_loop()

def remark(loop, context):
    if not isinstance(context.get("exception"), (KeyboardInterrupt, SystemExit)):
        loop.default_exception_handler(context)

loop.set_exception_handler(remark)

async def one():
    while True:
        async for _ in llm.generate(prompt(), params()):
            pass

async def main():
    tasks = [asyncio.ensure_future(one()) for _ in range(rng.randrange(1, 9))]
    while not llm.stats().num_steps:
        await asyncio.sleep(0.001)
    mark(b"running")
    await asyncio.sleep(rng.uniform(0, 0.5))
    if ending == "fork":
        fork(in_child)
    if ending in ("ctrl-c", "term"):
        await asyncio.sleep(60)
    return tasks

def in_child():
    try:
        llm._thread.check_alive()
    except EngineDeadError:
        llm.close()
    else:
        os._exit(9)

try:
    kept = loop.run_until_complete(main())
    mark(b"end")
    if ending == "raise":
        raise ValueError("the script's own")
    if ending == "exit":
        sys.exit(3)
except KeyboardInterrupt:
    sys.exit(130)
"""

SYNC = """
llm = LLM(**options)
llm.generate(prompt(), SamplingParams(max_tokens=2))

def work():
    while True:
        llm.generate([prompt() for _ in range(rng.randrange(1, 5))], params())

def in_child():
    try:
        llm.generate(prompt(), SamplingParams(max_tokens=2))
    except EngineDeadError:  # another thread was at it
        pass
    llm.close()

mark(b"running")
try:
    if ending in ("ctrl-c", "term"):
        work()
    if rng.random() < 0.7:
        threading.Thread(target=work, daemon=True).start()
    time.sleep(rng.uniform(0, 0.5))
    if ending == "fork":
        fork(in_child)
    mark(b"end")
    if ending == "raise":
        raise ValueError("the script's own")
    if ending == "exit":
        sys.exit(3)
except KeyboardInterrupt:
    sys.exit(130)
"""

CLOSED = """
llm = LLM(**options)
llm.generate(prompt(), SamplingParams(max_tokens=2))
llm.close()
mark(b"running")
mark(b"end")
"""

COMMAND = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # also for who was started in the background
from draftwise import __main__ as command
os.write(2, b"running\\n")
sys.argv[0] = "draftwise"
command.start()
"""

COMMANDS = {
    "generate": ["generate", "def main(", "--max-tokens", "500", "--ignore-eos"],
    "chat": [
        "chat",
        "hello",
        "--chat-template",
        "{{ messages[-1].content }}",
        "--max-tokens",
        "500",
        "--ignore-eos",
    ],
    "bench": ["bench", "latency"],
    "demo": ["demo"],
    "env": ["env"],
    "train": ["train", "demo", "--out"],  # and a folder
    "serve": ["serve", "--port", "0", "--drain-timeout", "1", "--log-level", "warning"],
    "fleet": [
        "serve",
        "--port",
        "0",
        "--drain-timeout",
        "1",
        "--log-level",
        "critical",
        "--data-parallel-size",
        "2",
    ],
}
CODES = {"end": 0, "fork": 0, "raise": 1, "exit": 3, "ctrl-c": 130, "term": 143, "kill": -9, "child": 143}
SIGNALS = {
    "ctrl-c": signal.SIGINT, "term": signal.SIGTERM, "kill": signal.SIGKILL, "child": signal.SIGTERM,
}  # fmt: skip
SERVERS = ("serve", "fleet")


@dataclass
class Run:
    """One process: what it was, and how it ended."""

    index: int
    what: str
    ending: str
    seed: int
    code: int | None = None
    seconds: float = 0.0  # from the signal, or the script's last line, to the end
    problems: list[str] = field(default_factory=list)
    said: str = ""

    def expect(self, holds: bool, problem: str) -> None:
        if not holds:
            self.problems.append(problem)


def plan(count: int, seed: int, what: str | None = None) -> Iterator[Run]:
    """Runs of all kinds, or of this one, in turn, each with a seed of its own."""
    rng = random.Random(seed)
    scripts = ("LLM", "AsyncLLM", "LLM ahead", "AsyncLLM ahead")
    kinds = [
        (what, ending) for what in scripts for ending in ("end", "raise", "exit", "ctrl-c", "term", "fork")
    ]
    kinds += [("closed", "end")]
    kinds += [(what, ending) for what in COMMANDS for ending in ("ctrl-c", "term")]
    kinds += [("serve", ending) for ending in ("ctrl-c", "term")] * 3
    kinds += [("fleet", ending) for ending in SIGNALS]
    kinds = [kind for kind in kinds if what in (None, kind[0])]
    order: list[tuple[str, str]] = []
    for index in range(count):
        if not order:
            order = rng.sample(kinds, len(kinds))
        what, ending = order.pop()
        yield Run(index, what, ending, rng.randrange(1 << 30))


def carry_out(run: Run, limit: float) -> Run:
    """Start the process, end it, and write down what is wrong."""
    rng = random.Random(run.seed)
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(SOURCES), os.environ.get("PYTHONPATH", "")]),
    }
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            _command(run, folder),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=environment,
        )
        assert process.stdout is not None
        killer = threading.Timer(HANG + 120, process.kill)  # whatever happens
        killer.start()
        try:
            began, there = _end(run, process, errors, rng)
            try:
                process.wait(HANG)
            except subprocess.TimeoutExpired:
                run.problems.append("hangs")
                process.kill()
            run.seconds = time.monotonic() - began
            while (stay := [pid for pid in there if _is_running(pid)]) and time.monotonic() < began + HANG:
                time.sleep(0.01)
            if there:
                run.seconds = time.monotonic() - began
            run.expect(not stay, f"{len(stay)} processes stay behind")
            for pid in stay:
                os.kill(pid, signal.SIGKILL)
            process.stdout.close()
            run.code = process.wait()
        finally:
            killer.cancel()
        errors.seek(0)
        run.said = errors.read().decode(errors="replace")
    _judge(run, limit)
    return run


def _command(run: Run, folder: str) -> list[str]:
    if run.what in COMMANDS:
        arguments = COMMANDS[run.what] + ([folder] if run.what == "train" else [])
        return [sys.executable, "-c", COMMAND, *arguments]
    name, _, ahead = run.what.partition(" ")
    options = repr({"async_scheduling": True} if ahead else {})
    script = PRELUDE + {"LLM": SYNC, "AsyncLLM": ASYNC, "closed": CLOSED}[name]
    return [sys.executable, "-c", script, str(run.seed), run.ending, options]


def _end(
    run: Run, process: subprocess.Popen[bytes], errors: IO[bytes], rng: random.Random
) -> tuple[float, list[int]]:
    """Let it come to its end, with signals where they are asked for; when the end began, and processes that it had."""
    assert process.stdout is not None
    if run.what in COMMANDS:
        while b"running" not in _content(errors) and process.poll() is None:
            time.sleep(0.002)
        if run.what in SERVERS and (run.ending == "child" or rng.random() < 0.7):
            address = process.stdout.readline().split()[-1:]
            # no address: it ended before it served, which is judged below
            for _ in range(3 if address else 0):
                threading.Thread(target=_ask, args=(address[0].decode(),), daemon=True).start()
        time.sleep(rng.choice([rng.uniform(0, 0.2), rng.uniform(0, 4)]))
        if run.ending == "child" and (replicas := _children(process.pid)):
            os.kill(rng.choice(replicas), signal.SIGKILL)
            time.sleep(rng.uniform(0, 0.5))
    else:
        process.stdout.readline()
        if run.ending not in SIGNALS:
            process.stdout.readline()  # its last line
            return time.monotonic(), []
        time.sleep(rng.uniform(0, 0.5))
    there = _children(process.pid) if run.what == "fleet" else []
    began = time.monotonic()
    if process.poll() is None:
        process.send_signal(SIGNALS[run.ending])
    else:
        run.ending = "over before"
    if run.what in COMMANDS and rng.random() < 0.3:  # impatience
        time.sleep(rng.uniform(0, 0.3))
        if process.poll() is None:
            process.send_signal(SIGNALS.get(run.ending, signal.SIGINT))
    return began, there


def _children(pid: int) -> list[int]:
    """Processes that it started."""
    try:
        found = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()
    except OSError:
        return []
    return [int(child) for child in found]


def _is_running(pid: int) -> bool:
    """Zombies are not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _content(file: IO[bytes]) -> bytes:
    return os.pread(file.fileno(), 1 << 20, 0)


def _ask(address: str) -> None:
    """A stream that runs when the server is stopped; how it ends is the client's business."""
    import http.client
    import urllib.request

    body = json.dumps({"model": "draftwise-demo", "prompt": "def main(", "max_tokens": 500, "stream": True})
    request = urllib.request.Request(
        address + "/v1/completions", body.encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            while answer.read(256):
                pass
    except (OSError, http.client.HTTPException):
        pass


def _judge(run: Run, limit: float) -> None:
    wanted = CODES.get(run.ending)
    if run.what in SERVERS and run.ending in ("term", "child"):
        wanted = 0
    if run.ending == "over before":
        run.expect(run.code in (0, 1, 2, 3), f"ended by itself with {run.code}")
    else:
        run.expect(run.code == wanted or _was_done(run), f"ended with {run.code} instead of {wanted}")
    own = int(run.ending == "raise" and run.code == 1)
    run.expect(run.said.count("Traceback") == own, "a traceback")
    run.expect(run.seconds <= limit, f"took {run.seconds:.1f} s")


def _was_done(run: Run) -> bool:
    """Whether the command had done its work when the signal came, so that its own code stood."""
    return run.what in COMMANDS and run.what not in SERVERS and run.code == 0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=200, help="processes (200)")
    parser.add_argument("--seed", type=int, default=None, help="(drawn, and printed)")
    parser.add_argument("--only", type=int, help="only this one, and show what it wrote")
    parser.add_argument(
        "--what", choices=[*COMMANDS], help="only this command, with every ending (all kinds)"
    )
    parser.add_argument("--limit", type=float, default=5.0, help="seconds that an end may take (5)")
    parser.add_argument("--parallel", type=int, default=2, help="processes at a time (2)")
    parser.add_argument("--json", action="store_true", help="the report as JSON")
    args = parser.parse_args()
    seed = args.seed if args.seed is not None else random.randrange(1 << 30)
    runs = list(plan(args.count, seed, args.what))
    if args.only is not None:
        run = carry_out(runs[args.only], args.limit)
        print(run.said, run, sep="\n")
        return int(bool(run.problems))
    print(f"seed {seed}", file=sys.stderr)
    with ThreadPoolExecutor(args.parallel) as pool:
        for run in pool.map(lambda run: carry_out(run, args.limit), runs):
            for problem in run.problems:
                print(f"{run.index}: {run.what}, {run.ending}: {problem}", file=sys.stderr)
                print(run.said[-2000:], file=sys.stderr)
    bad = [run for run in runs if run.problems]
    if args.json:
        print(json.dumps({"seed": seed, "runs": [_facts(run) for run in runs]}))
    else:
        _print(runs)
        print(f"{len(runs)} processes, {len(bad)} with a problem (seed {seed})")
    return int(bool(bad))


def _facts(run: Run) -> dict[str, Any]:
    facts = asdict(run)
    if not run.problems:
        del facts["said"]
    return facts


def _print(runs: list[Run]) -> None:
    print(f"{'what':<16}{'ending':<13}{'runs':>5}  {'codes':<24}{'slowest end':>12}")
    for what, ending in sorted({(run.what, run.ending) for run in runs}):
        some = [run for run in runs if (run.what, run.ending) == (what, ending)]
        codes = " ".join(
            f"{code}:{n}" for code, n in sorted(Counter(run.code for run in some).items(), key=str)
        )
        print(f"{what:<16}{ending:<13}{len(some):>5}  {codes:<24}{max(run.seconds for run in some):>10.2f} s")


if __name__ == "__main__":
    sys.exit(main())
