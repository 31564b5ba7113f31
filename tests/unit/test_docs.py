"""What the docs show is there: options, fields and flags of every snippet exist; pages are found; pictures are true."""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from draftwise.cli.help import help_text, innermost
from draftwise.cli.main import COMMANDS, build_parser, module_of, normalise
from draftwise.config.engine import ENGINE_OPTIONS
from draftwise.config.foreign import FOREIGN, HARMLESS
from draftwise.config.resolve import ALIASES, OLD_SPECULATIVE
from draftwise.config.speculative import SpeculativeConfig
from draftwise.sampling.params import SamplingParams

ROOT = Path(__file__).resolve().parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^```(?P<kind>python|sh|bash)\n(?P<body>.*?)^```$", re.DOTALL | re.MULTILINE)

KEYWORDS = {
    "LLM": {*ENGINE_OPTIONS, *ALIASES, *HARMLESS, *FOREIGN, *OLD_SPECULATIVE, "speculative_config"},
    "SamplingParams": {f.name for f in fields(SamplingParams)},
}
KEYWORDS["AsyncLLM"] = KEYWORDS["LLM"]
SPECULATIVE = {f.name for f in fields(SpeculativeConfig)}


def snippets(kinds: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    for page in PAGES:
        for number, match in enumerate(FENCE.finditer(page.read_text(encoding="utf-8"))):
            if match["kind"] in kinds:
                yield f"{page.relative_to(ROOT)}:{number}", match["body"]


def literal(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except ValueError:  # names stand for folders: keys are what is looked at
        if isinstance(node, ast.Dict):
            return {literal(k): None for k in node.keys if k is not None}
        return None


PYTHON = dict(snippets(("python",)))
SHELL = dict(snippets(("sh", "bash")))


@pytest.mark.parametrize("name", PYTHON)
def test_python_of_every_page_names_what_exists(name: str) -> None:
    for node in ast.walk(ast.parse(PYTHON[name])):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in KEYWORDS):
            continue
        given = {k.arg: k.value for k in node.keywords if k.arg is not None}
        assert set(given) <= KEYWORDS[node.func.id]
        configs = literal(given["speculative_config"]) if "speculative_config" in given else None
        for config in configs if isinstance(configs, list) else [configs]:
            assert set(config or ()) <= SPECULATIVE


@pytest.mark.parametrize("name", SHELL)
def test_commands_of_every_page_parse(name: str) -> None:
    for line in SHELL[name].replace("\\\n", " ").splitlines():
        for part in re.split(r"\s[|;&]+\s", line.partition(" #")[0]):
            words = shlex.split(part.replace("...", "").partition(" > ")[0])
            if len(words) < 2 or words[0] != "draftwise":
                continue
            command, rest = words[1], words[1:]
            assert command in COMMANDS, line
            module = module_of(command)
            parser = build_parser(command)
            if part.rstrip().endswith("..."):  # shortened on the page: what it shows has to exist
                assert {w for w in rest if w.startswith("--")} <= set(
                    help_text(innermost(parser, rest), "all").split()
                )
                continue
            parser.parse_args(normalise(rest, getattr(module, "BOOLEANS", ())))


def test_every_page_is_in_the_index() -> None:
    index = (ROOT / "docs/index.md").read_text(encoding="utf-8")
    linked = {(ROOT / "docs" / target).resolve() for target in re.findall(r"\]\(([^)#\s]+\.md)", index)}
    missing = [str(p.relative_to(ROOT)) for p in PAGES if p not in linked and p.name != "index.md"]
    assert missing == []


def test_every_page_is_in_the_navigation_of_the_site() -> None:
    nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("nav:")[2]
    named = set(re.findall(r"- (?:Start: )?(\S+\.md)$", nav, re.MULTILINE)) - {"reference.md"}
    pages = {p.relative_to(ROOT / "docs").as_posix() for p in PAGES if p.is_relative_to(ROOT / "docs")}
    assert named == pages | {f"about/{p.name}" for p in PAGES if p.parent == ROOT}


def test_every_variable_of_the_environment_is_on_the_page() -> None:
    files = [
        *(ROOT / "src").rglob("*.py"),
        *(ROOT / "src").rglob("*.cpp"),
        *(ROOT / "src").rglob("*.h"),
        ROOT / "setup.py",
    ]
    code = "\n".join(path.read_text(encoding="utf-8") for path in files)
    read = set(re.findall(r"environ(?:\.get)?[\[(]\s*\"([A-Z][A-Z_]+)\"|getenv\(\"([A-Z_]+)\"", code))
    names = {name for pair in read for name in pair if name} | set(
        re.findall(r"\"(DRAFTWISE_[A-Z_]+)\"", code)
    )
    page = (ROOT / "docs/guides/environment.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"^\| `([A-Z_]+)` \|", page, re.MULTILINE))
    assert "DRAFTWISE_KERNELS" in names and "OMP_NUM_THREADS" in names
    assert listed == names - {"PYTHONPATH"}, "Python's own is for nobody to set"


def test_links_lead_somewhere() -> None:
    broken = []
    for page in PAGES:
        text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
        for target, _, anchor in re.findall(r"\]\(([^)#\s]*)(#([^)\s]*))?\)", text):
            if "://" in target or target.startswith("mailto:"):
                continue
            file = (page.parent / target).resolve() if target else page
            if not file.exists() or (anchor and file.suffix == ".md" and anchor not in anchors(file)):
                broken.append(f"{page.relative_to(ROOT)}: {target}#{anchor}")
    assert broken == []


def anchors(page: Path) -> set[str]:
    """What headings are called in links, as GitHub makes it: "## What `x` is" -> "what-x-is"."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.strip().lower()).replace(" ", "-") for h in headings}


def test_pictures_are_what_the_engine_does() -> None:
    from draftwise.cli.env import environment

    if environment()["kernels"].split(" (")[0] != "native, avx512":
        pytest.skip("other instruction sets round otherwise, so that the drawn run may differ")
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts/pictures"), "--check"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
