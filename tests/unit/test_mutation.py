"""The mutator itself: every operator gives valid, different code; a run tells what tests see from what they do not."""

from __future__ import annotations

import ast
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.mutation import selection
from tests.mutation.campaign import Campaign, choose
from tests.mutation.operators import Mutation, is_valid, mutations
from tests.mutation.selection import ROOT, SPINE, modules_of, source_of
from tests.mutation.workers import Job, Worker, make_copy

EXAMPLES: dict[str, tuple[str, set[str]]] = {
    "comparison": ("return a < b", {"return a <= b"}),
    "comparison of identity": ("return a is not b", {"return a is b"}),
    "comparison in brackets": ("return (a) not in (b)", {"return (a) in (b)"}),
    "chained comparison": ("return 5 <= a < b", {"return 5 < a < b", "return 5 <= a <= b"}),
    "arithmetic": ("return a + b", {"return a - b"}),
    "arithmetic over lines": ("return (a  # - here\n    - b)", {"return (a  # - here\n    + b)"}),
    "floor division": ("return a // b", {"return a * b"}),
    "augmented": ("a += b", {"a -= b", "pass"}),
    "and": ("return a and b", {"return a or b"}),
    "not": ("return not a", {"return (a)"}),
    "condition": ("if a < b: return b", {"if not (a < b): return b", "if a <= b: return b"}),
    "opposites are there once": ("if a == b: return b", {"if a != b: return b"}),
    "constant": ("a = 7", {"a = 8", "a = 6"}),
    "constant zero": ("a = 0", {"a = 1"}),
    "float": ("a = 0.5", {"a = 1.5"}),
    "bool": ("a = True", {"a = False"}),
    "statement": ("a.append(b)", {"pass"}),
    "attribute": ("a.b = c", {"pass"}),
    "raise": ("raise ValueError(f'{a + 1}')", {"pass"}),
    "return": ("return a", {"return None"}),
    "break": ("while a: break", {"while a: continue", "while not (a): break"}),
    "arguments": ("return f(a, b)", {"return f(b, a)"}),
    "min": ("return min(a, b)", {"return max(a, b)"}),
    "slice": ("return a[b:]", {"return a[(b) + 1:]"}),
    "conditional": ("return a if b else c", {"return a if not (b) else c"}),
    "characters of several bytes": ("a = 'é' if b < c else 'ü'", {"a = 'é' if b <= c else 'ü'"}),
}
LEFT_ALONE = {
    "assert": "assert a < b, a + 1",
    "docstring": "'''1 + 1'''",
    "annotation": "a: Literal[1]",
    "logging": "logger.warning('a', a + 1)",
    "text": "return f'{a + 1}' + 'b' == a",
    "top level": "LIMIT = 1 + 2",
}


def _function(body: str) -> str:
    return "def f(a, b, c):\n" + "".join(f"    {line}\n" for line in body.splitlines())


def _mutants(source: str) -> set[str]:
    return {m.apply(source) for m in mutations(source)}


@pytest.mark.parametrize(("body", "wanted"), EXAMPLES.values(), ids=EXAMPLES)
def test_operators(body: str, wanted: set[str]) -> None:
    source = _function(body)
    found = _mutants(source)
    assert {_function(other) for other in wanted} <= found
    for mutation in mutations(source):
        assert is_valid(source, mutation)
        assert source.encode()[mutation.start : mutation.end].decode() != mutation.text
        assert source.count("\n", 0, len(source.encode()[: mutation.start].decode())) + 1 == mutation.line


def test_opposites_are_not_there_twice() -> None:
    assert len(mutations(_function("if a == b: pass"))) == 1


@pytest.mark.parametrize("text", LEFT_ALONE.values(), ids=LEFT_ALONE)
def test_what_nobody_tests_is_left_alone(text: str) -> None:
    source = text if text.startswith("LIMIT") else _function(text)
    for mutant in _mutants(source):  # of a returned text only that it is returned
        assert ("return" in text and "return None" in mutant) or "!=" in mutant


def test_invalid_and_equal_code_is_told() -> None:
    source = "a = 1\n"
    assert not is_valid(source, Mutation("x", 1, 4, 5, ")"))
    assert not is_valid(source, Mutation("x", 1, 4, 5, "(1)"))
    assert not is_valid(source, Mutation("x", 1, 0, 5, "break"))
    assert is_valid(source, Mutation("x", 1, 4, 5, "2"))


def test_most_mutations_of_the_spine_are_valid_and_all_differ() -> None:
    source = (ROOT / source_of("draftwise.kv.manager")).read_text()
    found = mutations(source)
    assert len(found) > 100
    assert len(_mutants(source)) == len(found)
    assert sum(is_valid(source, m) for m in found[::7]) >= 0.95 * len(found[::7])
    assert {"comparison", "arithmetic", "delete statement", "constant"} <= {m.operator for m in found}
    for mutation in found[:20]:
        assert sum(line[0] in "+-" for line in mutation.diff(source, "m").splitlines()) >= 1


def test_modules_and_their_tests() -> None:
    assert modules_of(["draftwise.kv.manager"]) == ["draftwise.kv.manager"]
    assert modules_of(["src/draftwise/kv/manager.py", "draftwise.kv.manager"]) == ["draftwise.kv.manager"]
    assert "draftwise.kv.block_pool" in modules_of(["src/draftwise/kv"])
    with pytest.raises(ValueError, match="nothing"):
        modules_of(["draftwise.nothing"])
    for module in modules_of(list(SPINE)):
        assert ast.parse((ROOT / source_of(module)).read_text())
        files = selection.tests_of(module)
        assert any("test_engine_fuzz" in file for file in files)
        assert all((ROOT / part.split("::")[0]).is_file() for file in files for part in file.split()), module
    assert "tests/unit/test_kv_manager.py" in selection.tests_of("draftwise.kv.manager")


def test_choice_follows_the_seed() -> None:
    modules = ["draftwise.kv.block_pool"]
    first = choose(ROOT, modules, 5, 3)
    assert len(first) == 5 and first == choose(ROOT, modules, 5, 3) != choose(ROOT, modules, 5, 4)


SUM = "def total(values, start):\n    for value in values:\n        start += value\n    unseen = 1\n    return start\n"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    root = tmp_path / "project"
    (root / "src" / "small").mkdir(parents=True)
    (root / "tests").mkdir()
    (root / "src" / "small" / "sums.py").write_text(SUM)
    (root / "tests" / "test_sums.py").write_text(
        "from small.sums import total\n\ndef test_total():\n    assert total([1, 2], 3) == 6\n"
    )
    (root / "tests" / "test_wrong.py").write_text("def test_wrong():\n    assert False\n")
    (root / "pyproject.toml").write_text("[tool.pytest.ini_options]\nmarkers = ['slow']\n")
    return root


def test_a_run(project: Path, tmp_path: Path) -> None:
    """What is seen is killed, what is not survives. Tests that fail anyway do not count. Sources stay as they are."""
    mutants = choose(project, ["small.sums"], None, 0)
    worker = Worker(project, tmp_path / "copy", lambda: None)
    said: list[str] = []
    try:
        campaign = Campaign(project, [worker], said.append, ["tests/test_wrong.py", "tests/test_sums.py"])
        campaign.measure(["small.sums"])
        assert list(campaign.timings) == ["tests/test_sums.py"] and list(campaign.dropped) == [
            "tests/test_wrong.py"
        ]
        campaign.run(mutants)
    finally:
        worker.stop()
    found = {v.mutant.mutation.text: (v.status, v.by) for v in campaign.verdicts}
    seen = ("killed", "tests/test_sums.py::test_total")
    assert found == {
        "pass": seen,
        "-=": seen,
        "return None": seen,
        "2": ("survived", ""),
        "0": ("survived", ""),
    }
    assert campaign.table() == [("small.sums", 3, 2, 0)]
    assert (project / "src" / "small" / "sums.py").read_text() == SUM
    assert "-    unseen = 1\n+    unseen = 2" in next(
        v.diff for v in campaign.verdicts if v.mutant.mutation.text == "2"
    )


def test_what_hangs_or_dies_is_told(project: Path, tmp_path: Path) -> None:
    worker = Worker(project, tmp_path / "copy", lambda: None)
    file, test = Path("src/small/sums.py"), "tests/test_sums.py::test_total"
    try:
        for source, wanted in (
            ("def total(values, start):\n    while True: pass\n", "timed out"),
            ("import os\ndef total(values, start):\n    os._exit(0)\n", "failed"),
            ("def total(values, start)\n", "broken"),
            (SUM, "passed"),  # the same file again
        ):
            worker.start(Job(0, file, source, ("tests/test_sums.py",), {test: 3.0}, 60.0))
            assert worker.answer().status == wanted
    finally:
        worker.stop()


def test_a_copy_has_everything(tmp_path: Path, project: Path) -> None:
    (project / "src" / "small" / "data.bin").write_bytes(b"1")
    make_copy(project, tmp_path)
    assert (tmp_path / "src" / "small" / "data.bin").is_symlink()
    assert not (tmp_path / "src" / "small" / "sums.py").is_symlink()


@pytest.mark.slow
def test_an_interrupted_run_reports_and_cleans_up(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "tests.mutation",
        "draftwise.kv.block_pool",
        "--json",
        str(tmp_path / "out.json"),
    ]
    command += ["--tests", "tests/unit/test_block_pool.py"]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("2/"):
            break
    process.send_signal(signal.SIGINT)
    out = process.communicate(timeout=60)[0]
    assert process.returncode == 130
    assert "draftwise.kv.block_pool" in out
    deadline = time.monotonic() + 10
    while list(tmp_path.glob("mutants-*")) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert (tmp_path / "out.json").is_file() and not list(tmp_path.glob("mutants-*"))
