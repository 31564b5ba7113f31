"""Which modules are mutated, and which tests look at them."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = "draftwise"

SPINE = (
    "draftwise.sched",
    "draftwise.kv",
    "draftwise.verify",
    "draftwise.sampling",
    "draftwise.runner.batch",
    "draftwise.runner.compaction",
    "draftwise.runner.drafting",
    "draftwise.runner.fills",
    "draftwise.runner.local",
    "draftwise.runner.outcome",
    "draftwise.runner.rows",
    "draftwise.propose.base",
    "draftwise.propose.models.passes",
    "draftwise.propose.models.proposer",
    "draftwise.propose.models.draft_model",
    "draftwise.propose.heads.proposer",
    "draftwise.propose.heads.features",
    "draftwise.propose.heads.follower",
    "draftwise.propose.heads.loops",
    "draftwise.propose.heads.passes",
    "draftwise.propose.heads.state",
    "draftwise.propose.heads.trees",
    "draftwise.propose.trees",
    "draftwise.engine.core",
    "draftwise.engine.detokenizer",
    "draftwise.structured.cursor",
)
"""What every step of every request goes through."""

_FUZZ = "tests/e2e/test_engine_fuzz.py::test_each_request_gets_what_it_gets_alone"
_WHOLE_ENGINES = (
    "tests/e2e/test_lossless.py",
    "tests/e2e/test_limits.py",
    "tests/e2e/test_robustness.py",
    f"{_FUZZ}[10] {_FUZZ}[30]",  # of its cases so many as a mutant is worth
)
_MORE: dict[str, tuple[str, ...]] = {
    "draftwise.sched": ("tests/unit/test_scheduler_property.py", *_WHOLE_ENGINES, "tests/e2e/test_async.py"),
    "draftwise.kv": ("tests/unit/test_scheduler_property.py", *_WHOLE_ENGINES),
    "draftwise.runner": (*_WHOLE_ENGINES, "tests/e2e/test_structured.py"),
    "draftwise.verify": ("tests/statistical/test_lossless.py", *_WHOLE_ENGINES),
    "draftwise.sampling": ("tests/unit/test_verify_rules.py", *_WHOLE_ENGINES),
    "draftwise.propose": (
        *_WHOLE_ENGINES,
        "tests/e2e/test_trees.py",
        "tests/e2e/test_tree_drafting.py",
        "tests/e2e/test_every_method.py",
        "tests/e2e/test_parallel_drafting.py",
        "tests/e2e/test_drafter_storage.py",
    ),
    "draftwise.propose.heads": (
        "tests/unit/test_mtp.py",
        "tests/unit/test_medusa.py",
        "tests/e2e/test_heads.py",
        "tests/e2e/test_mtp.py",
    ),
    "draftwise.engine": (*_WHOLE_ENGINES, "tests/e2e/test_async.py", "tests/e2e/test_async_scheduling.py"),
    "draftwise.structured": ("tests/e2e/test_structured.py", *_WHOLE_ENGINES),
}
"""Tests that see a package through the engine, whatever they import."""
_UNRELATED = (
    "triton",
    "cuda",
    "server",
    "bench",
    "train",
    "cli",
    "readme",
    "examples",
    "gpu",
    "peers",
    "page",
)
"""Tests of these are long and about something else."""


def modules_of(names: list[str]) -> list[str]:
    """Dotted names or paths of modules and packages -> modules, in order. Raises ValueError for what is not there."""
    found: dict[str, None] = {}
    for name in names:
        dotted = name.removesuffix(".py").strip("/").removeprefix("src/").replace("/", ".")
        path = ROOT / "src" / Path(*dotted.split("."))
        if path.is_dir():
            # Triton's kernels need a GPU, or an interpreter that takes minutes.
            files = sorted(f for f in path.rglob("*.py") if f.stem not in ("__init__", "triton"))
        elif path.with_suffix(".py").is_file():
            files = [path.with_suffix(".py")]
        else:
            raise ValueError(f"no module {name!r} under src/")
        for file in files:
            found[".".join(file.relative_to(ROOT / "src").with_suffix("").parts)] = None
    return list(found)


def source_of(module: str) -> Path:
    """The file of a module, below the root."""
    return Path("src", *module.split(".")).with_suffix(".py")


def tests_of(module: str, *, quick: bool = False) -> list[str]:
    """Test files that import the module, by themselves or through fakes, those that import its neighbours (rules and
    drafters are found by name), then those that run it inside of engines. ``quick``: unit tests alone."""
    files = [
        file
        for folder in (("unit",) if quick else ("unit", "e2e", "statistical", "parity"))
        for file in sorted((ROOT / "tests" / folder).glob("test_*.py"))
        if not any(word in file.name for word in _UNRELATED)
    ]
    package = module.rpartition(".")[0] + "."
    importing = [file for file in files if module in _imported(file)]
    importing += [file for file in files if any(name.startswith(package) for name in _imported(file))]
    direct = [str(file.relative_to(ROOT)) for file in importing]
    more = [file for package in _MORE if f"{module}.".startswith(f"{package}.") for file in _MORE[package]]
    if quick:
        more = [file for file in more if file.startswith("tests/unit/")]
    return list(dict.fromkeys(direct + more))


@cache
def _imported(test: Path) -> frozenset[str]:
    """Modules of the package that a test imports, by itself or through fakes."""
    found: set[str] = set()
    files, seen = [test], {test}
    while files:
        own, fakes = _imports(files.pop())
        found |= own
        files += fakes - seen
        seen |= fakes
    return frozenset(found)


@cache
def _imports(file: Path) -> tuple[set[str], set[Path]]:
    """Modules of the package, and fakes, that a file imports itself."""
    found: set[str] = set()
    fakes: set[Path] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        for name in names:
            if name.startswith("tests.fakes."):
                fake = ROOT / Path(*name.split(".")).with_suffix(".py")
                if fake.is_file():
                    fakes.add(fake)
            elif name.split(".")[0] == PACKAGE:
                found.add(name)
    return found, fakes
