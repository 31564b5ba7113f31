"""A run over many mutants: chooses them, orders the tests, hands out the work, gathers what came of it."""

from __future__ import annotations

import random
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path

from tests.mutation.operators import Mutation, is_valid, mutations
from tests.mutation.selection import source_of, tests_of
from tests.mutation.workers import Job, Ran, Worker

STATES = {"failed": "killed", "broken": "killed", "timed out": "timed out", "passed": "survived"}


@dataclass(frozen=True)
class Mutant:
    """``name``: the same as long as the module's text is the same."""

    module: str
    mutation: Mutation

    @property
    def name(self) -> str:
        m = self.mutation
        return f"{self.module}:{m.line}:{m.start}-{m.end}:{m.text!r}"


@dataclass(frozen=True)
class Verdict:
    """``status``: killed, survived or timed out. ``by``: the test that saw it."""

    mutant: Mutant
    status: str
    by: str
    seconds: float
    diff: str


@dataclass
class Timing:
    """What is known of a test target: how long it takes, and how often it was right about a mutant."""

    seconds: float
    tests: dict[str, float]
    kills: int = 0
    runs: int = 0

    @property
    def rank(self) -> float:
        """Seconds per mutant killed; lower is run earlier."""
        return self.seconds * (self.runs + 4) / (self.kills + 1)


def choose(root: Path, modules: Sequence[str], count: int | None, seed: int) -> list[Mutant]:
    """``count`` mutants of all modules by chance (None: all), the same for the same seed and text."""
    everything = [
        Mutant(module, mutation)
        for module in modules
        for mutation in mutations((root / source_of(module)).read_text())
    ]
    random.Random(seed).shuffle(everything)
    chosen: list[Mutant] = []
    for mutant in everything:
        if count is not None and len(chosen) == count:
            break
        if is_valid((root / source_of(mutant.module)).read_text(), mutant.mutation):
            chosen.append(mutant)
    return chosen


@dataclass
class Campaign:
    """``targets``: pytest targets for every module (None: by `tests_of`, ``quick`` or not). ``most_seconds``: tests of
    one mutant that nobody kills, quick ones first; what does not fit is left out."""

    root: Path
    workers: Sequence[Worker]
    say: Callable[[str], None]
    targets: Sequence[str] | None = None
    quick: bool = False
    most_seconds: float = 90.0
    timings: dict[str, Timing] = field(default_factory=dict)
    dropped: dict[str, str] = field(default_factory=dict)
    verdicts: list[Verdict] = field(default_factory=list)

    def tests_for(self, module: str) -> list[str]:
        return list(self.targets) if self.targets is not None else tests_of(module, quick=self.quick)

    def measure(self, modules: Sequence[str]) -> None:
        """Run every target once on the sources as they are. Targets that fail are dropped."""
        targets = list(dict.fromkeys(t for module in modules for t in self.tests_for(module)))
        self.say(f"measuring {len(targets)} test targets")
        jobs = [Job(i, None, "", (target,), limit=180.0) for i, target in enumerate(targets)]
        for ran in self._run(jobs):
            target = targets[ran.number]
            if ran.status == "passed":
                self.timings[target] = Timing(ran.took, ran.seconds)
                self.say(f"{ran.took:6.1f} s  {target}")
            else:
                self.dropped[target] = f"{ran.status} without a mutant: {ran.test}\n{ran.output}"
                self.say(f"dropped {target}: {self.dropped[target]}")

    def run(self, mutants: Sequence[Mutant]) -> None:
        """Try all mutants; `verdicts` grows meanwhile."""
        sources = {m.module: (self.root / source_of(m.module)).read_text() for m in mutants}

        jobs = [
            Job(i, source_of(m.module), m.mutation.apply(sources[m.module]), ())
            for i, m in enumerate(mutants)
        ]
        for ran in self._run(jobs, lambda job: self._with_tests(job, mutants[job.number].module)):
            mutant = mutants[ran.number]
            status = STATES[ran.status]
            file = str(source_of(mutant.module))
            diff = mutant.mutation.diff(sources[mutant.module], file)
            by = "" if status == "survived" else ran.test
            self.verdicts.append(Verdict(mutant, status, by, ran.took, diff))
            self._learn(mutant.module, ran)
            done = len(self.verdicts)
            self.say(f"{done}/{len(mutants)} {status:9} {ran.took:5.1f} s  {mutant.name}  {by}")

    def _with_tests(self, job: Job, module: str) -> Job:
        known = [target for target in self.tests_for(module) if target in self.timings]
        known.sort(key=lambda target: self.timings[target].rank)
        targets: list[str] = []
        total = 0.0
        for target in sorted(known, key=lambda target: self.timings[target].seconds):
            total += self.timings[target].seconds
            if total <= self.most_seconds or not targets:
                targets.append(target)
        limits = {
            name: 10.0 + 6.0 * seconds
            for target in targets
            for name, seconds in self.timings[target].tests.items()
        }
        ordered = tuple(target for target in known if target in targets)
        return Job(job.number, job.file, job.source, ordered, limits, 30.0)

    def _learn(self, module: str, ran: Ran) -> None:
        """Targets that kill move forward."""
        for target in self.tests_for(module):
            timing = self.timings.get(target)
            if timing is None:
                continue
            if timing.tests.keys() & ran.seconds.keys():
                timing.runs += 1
            if ran.status != "passed" and ran.test.split("::")[0] == target.split("::")[0].split()[0]:
                timing.kills += 1

    def _run(self, jobs: Sequence[Job], prepare: Callable[[Job], Job] = lambda job: job) -> Iterator[Ran]:
        """Hand jobs to whoever is free; answers in the order in which they come."""
        waiting = deque(jobs)
        by_connection = {worker.connection: worker for worker in self.workers}
        while True:
            for worker in self.workers:
                if waiting and not worker.busy:
                    worker.start(prepare(waiting.popleft()))
            busy = [connection for connection, worker in by_connection.items() if worker.busy]
            if not busy:
                return
            for connection in wait(busy):
                yield by_connection[connection].answer()  # type: ignore[index]

    def table(self) -> list[tuple[str, int, int, int]]:
        """(module, killed, survived, timed out) in order of names."""
        counts: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
        for verdict in self.verdicts:
            counts[verdict.mutant.module][verdict.status] += 1
        return [(m, c["killed"], c["survived"], c["timed out"]) for m, c in sorted(counts.items())]
