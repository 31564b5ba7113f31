"""What strangers can do to others: streams beside hostile requests, and what a thousand of these leave behind.

    python benchmarks/hostile.py gaps              # 64 streams, the slowest gap with and without each kind
    python benchmarks/hostile.py bodies            # 1,000 requests from a seed: no 5xx, no traceback, memory as before

Starts ``draftwise serve`` on a free port, by default of the embedded model; options it does not know go to the server.
Prints one JSON object; the exit code is 1 where the goal is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

from hostile_bodies import COMPLETIONS, Hostile, drawn, head, known, post

GAP_LIMIT = 2.0
"""How many times as long the slowest gap may be beside a hostile request."""
MEMORY_LIMIT = 0.02


@dataclass
class Server:
    """A server in a process of its own."""

    host: str
    port: int
    pid: int
    log: IO[str]

    def memory(self) -> int:
        """Resident KiB."""
        text = Path(f"/proc/{self.pid}/status").read_text()
        return int(next(line for line in text.splitlines() if line.startswith("VmRSS")).split()[1])

    async def ask(self, data: bytes, seconds: float = 120) -> tuple[int | None, bytes]:
        """(status, whole answer) of a request on a connection of its own; None: there was none."""
        # In a thread: 50 MB on their way must not keep this loop from looking at the streams.
        return await asyncio.to_thread(self._ask, data, seconds)

    def _ask(self, data: bytes, seconds: float) -> tuple[int | None, bytes]:
        answer = b""
        with socket.create_connection((self.host, self.port), seconds) as connection:
            with contextlib.suppress(OSError):  # refused before all of it was sent
                connection.sendall(data)
            with contextlib.suppress(OSError):
                while piece := connection.recv(1 << 16):
                    answer += piece
        words = answer.split(b" ", 2)
        return (int(words[1]), answer) if len(words) == 3 else (None, answer)


@contextlib.contextmanager
def serving(options: list[str]) -> Iterator[Server]:
    command = [sys.executable, "-m", "draftwise", "serve", "--port", "0", "--log-interval", "0", *options]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                log.seek(0)
                raise SystemExit(log.read())
            url = urlsplit(line.split()[-1])
            assert url.hostname and url.port
            yield Server(url.hostname, url.port, process.pid, log)
        finally:
            process.terminate()
            process.wait(60)


# ------------------------------------------------------------------------------------------------------- gaps


@dataclass
class Gaps:
    """Slowest gaps in seconds, of rounds without and with a kind, and what it was answered."""

    without: list[float] = field(default_factory=list)
    beside: list[float] = field(default_factory=list)
    answers: Counter[str] = field(default_factory=Counter)
    seconds: list[float] = field(default_factory=list)

    def row(self) -> dict[str, Any]:
        without, beside = statistics.median(self.without), statistics.median(self.beside)
        return {
            "without_ms": round(without * 1e3, 1),
            "beside_ms": round(beside * 1e3, 1),
            "ratio": round(beside / without, 2),
            "answer": "/".join(sorted(self.answers)),
            "answered_after_s": round(statistics.median(self.seconds), 3),
        }


async def round_of(
    server: Server, args: argparse.Namespace, hostile: Hostile | None, gaps: Gaps, salt: int
) -> None:
    """All streams once; the hostile request is sent when each of them has begun."""
    begun = 0
    all_begun = asyncio.Event()
    worst = 0.0

    async def stream(index: int) -> None:
        nonlocal begun, worst
        prompt = f"# {salt} {index}\ndef main("
        body = {
            "prompt": prompt,
            "max_tokens": args.tokens,
            "ignore_eos": True,
            "stream": True,
            "temperature": 0,
        }
        reader, writer = await asyncio.open_connection(server.host, server.port)
        try:
            writer.write(post("stream", COMPLETIONS, body).data)
            last = None
            while await reader.read(1 << 16):
                now = time.perf_counter()
                if last is None:
                    begun += 1
                    if begun == args.streams:
                        all_begun.set()
                elif all_begun.is_set():
                    worst = max(worst, now - last)
                last = now
        finally:
            writer.close()

    async def attack() -> None:
        await all_begun.wait()
        if hostile is not None:
            start = time.perf_counter()
            status, _ = await server.ask(hostile.data)
            gaps.answers[str(status)] += 1
            gaps.seconds.append(time.perf_counter() - start)

    await asyncio.gather(attack(), *(stream(i) for i in range(args.streams)))
    (gaps.without if hostile is None else gaps.beside).append(worst)


async def measure_gaps(server: Server, args: argparse.Namespace) -> dict[str, Any]:
    kinds = [h for h in known() if not args.only or any(word in h.name for word in args.only)]
    found = {h.name: Gaps() for h in kinds}
    salt = 0
    await round_of(server, args, None, Gaps(), salt)
    for number in range(args.rounds):
        for hostile in kinds:
            for one in (None, hostile) if number % 2 else (hostile, None):
                salt += 1
                await round_of(server, args, one, found[hostile.name], salt)
            print(f"{number + 1}/{args.rounds} {hostile.name}", file=sys.stderr)
    rows = {name: gaps.row() for name, gaps in found.items()}
    return {
        "streams": args.streams,
        "rounds": args.rounds,
        "kinds": rows,
        "over": [name for name, row in rows.items() if row["ratio"] > args.gap_limit],
        "not_refused_well": [
            name for name, row in rows.items() if "5" in {a[0] for a in row["answer"].split("/")}
        ],
    }


def show(found: dict[str, Any]) -> None:
    print(
        "| hostile request | answer | after | slowest gap without it | beside it | ratio |", file=sys.stderr
    )
    print("|---|---|---|---|---|---|", file=sys.stderr)
    for name, row in found["kinds"].items():
        print(
            f"| {name} | {row['answer']} | {row['answered_after_s']:.2f} s | {row['without_ms']:.0f} ms "
            f"| {row['beside_ms']:.0f} ms | {row['ratio']:.2f} |",
            file=sys.stderr,
        )


# ----------------------------------------------------------------------------------------------------- bodies


async def send_bodies(server: Server, args: argparse.Namespace) -> dict[str, Any]:
    problems: list[str] = []
    statuses: Counter[str] = Counter()
    memory: list[tuple[int, int]] = []
    limit = asyncio.Semaphore(args.concurrency)

    async def one(number: int, hostile: Hostile) -> None:
        async with limit:
            status, answer = await server.ask(hostile.data)
            statuses[str(status)] += 1
            if status is None and hostile.http:
                problems.append(f"{number} {hostile.name}: no answer to {hostile.data[:200]!r}")
            elif status is not None and status >= 500:
                problems.append(
                    f"{number} {hostile.name}: {status} {answer[-300:]!r} to {hostile.data[:400]!r}"
                )
            elif status is not None and status >= 400 and b'"error": {"message": ' not in answer:
                problems.append(f"{number} {hostile.name}: {answer[:300]!r}")
            elif b'"code":"generation_failed"' in answer or b"internal error" in answer:
                problems.append(f"{number} {hostile.name}: {answer[-300:]!r} to {hostile.data[:400]!r}")

    async def settled() -> int:
        """Resident KiB when nothing is left."""
        for _ in range(600):
            load = json.loads((await server.ask(head("/load", method="GET")))[1].partition(b"\r\n\r\n")[2])
            if not any(load.values()):
                break
            await asyncio.sleep(0.1)
        else:
            problems.append(f"left behind: {load}")
        await asyncio.sleep(1)
        return server.memory()

    for part in range(args.parts):  # parts, so that the growth shows
        bodies = drawn(args.seed * 1000 + part, args.requests // args.parts)
        await asyncio.gather(*(one(part * 1000 + i, h) for i, h in enumerate(bodies)))
        memory.append(((part + 1) * (args.requests // args.parts), await settled()))
        print(f"{memory[-1][0]} bodies: {memory[-1][1]} KiB", file=sys.stderr)
    status, _ = await server.ask(post("good", COMPLETIONS, {"prompt": "def main(", "max_tokens": 4}).data)
    if status != 200:
        problems.append(f"a good request is answered with {status}")
    server.log.seek(0)
    log = server.log.read()
    if "Traceback" in log or " ERROR " in log:
        problems.append("the log has an error: " + log[max(0, log.find("Traceback")) :][:3000])
    first, last = memory[len(memory) // 5][1], memory[-1][1]  # behind a warm-up: caches, arenas, late imports
    if args.memory_limit and last > first * (1 + args.memory_limit):
        problems.append(f"memory grew from {first} to {last} KiB")
    return {"requests": args.requests, "answers": dict(statuses), "memory_kib": memory, "problems": problems}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["gaps", "bodies"])
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=128, help="of each stream")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", action="append", help="kinds whose names have this word; again: one more")
    parser.add_argument("--gap-limit", type=float, default=GAP_LIMIT)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--parts", type=int, default=10)
    parser.add_argument("--concurrency", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--memory-limit", type=float, default=MEMORY_LIMIT, help="0: none")
    args, options = parser.parse_known_args(argv)
    with serving(
        [*options, "--body-timeout", "3", "--header-timeout", "3"] if args.what == "bodies" else options
    ) as server:
        if args.what == "bodies":
            found = asyncio.run(send_bodies(server, args))
            print(json.dumps(found))
            return 1 if found["problems"] else 0
        found = asyncio.run(measure_gaps(server, args))
        show(found)
        print(json.dumps(found))
        return 1 if found["over"] or found["not_refused_well"] else 0


if __name__ == "__main__":
    sys.exit(main())
