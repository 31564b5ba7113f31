"""Finding proposers by name, alias and path; refusing what is not there."""

import subprocess
import sys
from collections.abc import Iterator, Sequence

import pytest

from draftwise.config import registry
from draftwise.config.registry import available_methods, canonical_name
from draftwise.errors import ConfigError
from draftwise.propose.base import DraftRow, Proposer
from draftwise.propose.registry import register_proposer, resolve_proposer
from draftwise.types import EMPTY_PROPOSAL, Proposal


class Silent(Proposer):
    name = "silent"

    def propose(self, rows: Sequence[DraftRow]) -> list[Proposal]:
        return [EMPTY_PROPOSAL] * len(rows)


@pytest.fixture(autouse=True)
def restore() -> Iterator[None]:
    before = dict(registry._registered)
    yield
    registry._registered.clear()
    registry._registered.update(before)


@pytest.mark.parametrize("name", ["ngram", "[ngram]", "prompt_lookup", "synthetic"])
def test_built_in_names_and_aliases(name: str) -> None:
    assert resolve_proposer(name).name == canonical_name(name)


def test_every_built_in_class_carries_its_registered_name() -> None:
    assert {"draft_model", "medusa", "ngram", "suffix", "synthetic"} <= set(available_methods())
    for name in available_methods():
        assert resolve_proposer(name).name == name


def test_register_a_class_or_a_path() -> None:
    register_proposer("silent", Silent)
    register_proposer("silent", Silent)
    assert resolve_proposer("silent") is Silent
    register_proposer("lazy", "draftwise.propose.synthetic:SyntheticProposer")
    assert resolve_proposer("lazy").name == "synthetic"
    assert {"silent", "lazy"} <= set(available_methods())


@pytest.mark.parametrize("separator", [".", ":"])
def test_a_path_needs_no_registration(separator: str) -> None:
    found = resolve_proposer(f"draftwise.propose.lookup.ngram{separator}NgramProposer")
    assert found is resolve_proposer("ngram")


def test_a_planned_name_can_be_taken() -> None:
    register_proposer("hydra", Silent)
    assert resolve_proposer("hydra") is Silent


@pytest.mark.parametrize("name", ["", "none", "auto", "grammar", "a.b", "a:b", "\n"])
def test_names_that_cannot_be_registered(name: str) -> None:
    with pytest.raises(ConfigError, match="cannot name a method"):
        register_proposer(name, Silent)


def test_taken_names_and_aliases() -> None:
    with pytest.raises(ConfigError, match="taken by"):
        register_proposer("ngram", Silent)
    with pytest.raises(ConfigError, match="another name of 'mtp'"):
        register_proposer("deepseek_mtp", Silent)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "ngramm",
            "unknown method 'ngramm'; did you mean 'ngram'.*available: .*ngram, .*suffix, synthetic",
        ),
        ("zzz", "unknown method 'zzz' "),
        ("hydra", "'hydra' is not supported yet; available: dflash, draft_model, .*ngram"),
        ("no.such.module.Class", "cannot load"),
        ("draftwise.propose.lookup.ngram.Missing", "cannot load"),
        (".Class", "cannot load"),
        ("draftwise.errors.ConfigError", "not a subclass of"),
        ("draftwise.errors.suggest", "not a subclass of"),
    ],
)
def test_what_cannot_be_resolved(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve_proposer(name)


def test_a_registered_class_must_be_a_proposer() -> None:
    with pytest.raises(ConfigError, match="not a subclass of"):
        register_proposer("wrong", dict)  # type: ignore[arg-type]
    register_proposer("wrong_later", "collections.OrderedDict")
    with pytest.raises(ConfigError, match="not a subclass of"):
        resolve_proposer("wrong_later")


def test_create_defaults_to_no_arguments() -> None:
    assert isinstance(Silent.create(None), Silent)  # type: ignore[arg-type]


def test_the_registry_and_the_tree_parser_do_not_import_torch() -> None:
    """Configurations are checked before anything heavy is loaded."""
    code = "import sys, draftwise.propose.registry, draftwise.config.trees; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
