"""Which drafters fit a model, from configurations and headers alone."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

import torch

from draftwise.config import SpeculativeConfig
from draftwise.config.methods import method_of, read_config
from draftwise.errors import ConfigError, DraftwiseError, ModelLoadError
from draftwise.models.describe import META, DescribedTarget, ModelFacts, describe
from draftwise.models.heads.loading import (
    DeclaredHead,
    declare_block,
    declare_eagle,
    declare_eagle3,
    declare_medusa,
    declare_mtp,
    head_folder,
    target_link,
)
from draftwise.models.heads.mtp_names import mtp_form
from draftwise.names import HEAD_METHODS

_MOST_NEIGHBOURS = 64  # folders that are looked into


@dataclass(frozen=True, slots=True)
class Drafter:
    """A way to draft for a model."""

    method: str
    model: str | None = (
        None  # folder or hub id; None: it needs none, or stands in the target's own checkpoint
    )
    refused: str | None = None  # why it does not fit
    num_tokens: int | None = None  # drafts per step, by default
    parameters: int | None = None


@dataclass(frozen=True, slots=True)
class _Context:
    """A `HeadContext` for a target that is not loaded."""

    speculative: SpeculativeConfig
    target_model: DescribedTarget
    target_path: str | None
    max_model_len: int
    target_revision: str | None = None
    dtype: torch.dtype = torch.bfloat16
    device: torch.device = META


def modelless(facts: ModelFacts) -> list[Drafter]:
    """Methods that need nothing beside the model."""
    found = [Drafter("ngram"), Drafter("suffix")]
    if facts.cuts:
        found.append(Drafter("early_exit"))
    if mtp_form(facts.names, False) is not None:
        found.append(fit(facts, SpeculativeConfig(method="mtp")))
    return found


def beside(facts: ModelFacts) -> list[Drafter]:
    """Draft heads and smaller models of the same vocabulary in folders below the model's and beside it, if they fit."""
    around = [facts.folder] if "snapshots" in facts.folder.parts else [facts.folder, facts.folder.parent]
    folders: list[Path] = []
    for place in around:
        with contextlib.suppress(OSError):  # a folder that may not be listed
            folders += [path for path in sorted(place.iterdir()) if path != facts.folder]
    found = []
    for folder in [path for path in folders if (path / "config.json").is_file()][:_MOST_NEIGHBOURS]:
        try:
            config = read_config(str(folder), None) or {}
            if method_of(config) not in HEAD_METHODS and not _is_smaller(
                facts, config.get("vocab_size"), folder
            ):
                continue
            drafter = given(facts, str(folder))
        except DraftwiseError:
            continue  # a folder that is nothing for this model
        if drafter.refused is None:
            found.append(drafter)
    return found


def given(facts: ModelFacts, model: str, revision: str | None = None) -> Drafter:
    """The drafter that ``speculative_model=model`` would be.

    Raises:
        ConfigError: it is none of a known kind.
    """
    return fit(facts, SpeculativeConfig(model=model, revision=revision))


def fit(facts: ModelFacts, spec: SpeculativeConfig) -> Drafter:
    """Whether the drafter that a ``speculative_config`` describes fits."""
    try:
        count = _parameters(facts, spec)
    except (ConfigError, ModelLoadError) as error:
        return Drafter(spec.method, spec.model, refused=str(error))
    return Drafter(spec.method, spec.model, None, spec.num_speculative_tokens, count)


def _parameters(facts: ModelFacts, spec: SpeculativeConfig) -> int | None:
    """Elements of a drafter's weights; raises what loading it would raise."""
    if facts.config is None or facts.refused is not None:
        raise ConfigError("the model itself cannot be served")
    if spec.method == "draft_model":
        return _draft_model(facts, spec)
    if spec.method not in HEAD_METHODS:
        return None
    context = _Context(spec, DescribedTarget(facts), str(facts.folder), facts.config.max_model_len)
    declared = _declared(context)
    declared.tensors.check(declared.plan)
    return sum(target.dest.numel() for target in declared.plan.targets.values())


def _declared(context: _Context) -> DeclaredHead:
    method = context.speculative.method
    if method == "eagle":
        return declare_eagle(context)
    if method == "eagle3":
        return declare_eagle3(context)
    if method == "dflash":
        return declare_block(context)
    if method == "mtp":
        return declare_mtp(context, compare=False)
    folder = head_folder(context.speculative.model, context.speculative.revision, method)
    link, ops = target_link(context.target_model, context.max_model_len, context.dtype, context.device)
    return declare_medusa(folder, link, ops)


def _draft_model(facts: ModelFacts, spec: SpeculativeConfig) -> int:
    assert spec.model is not None and facts.config is not None
    drafter = describe(spec.model, spec.revision)
    if drafter.refused is not None or drafter.config is None:
        raise ConfigError(drafter.refused or "it cannot be served")
    mine, other = facts.config.vocab_size, drafter.config.vocab_size
    if mine != other and not spec.use_heterogeneous_vocab:
        raise ConfigError(
            f"a vocabulary of {other} tokens, the model one of {mine}; use_heterogeneous_vocab maps one to the other"
        )
    return num_elements(drafter)


def _is_smaller(facts: ModelFacts, vocab_size: object, folder: Path) -> bool:
    """Whether a folder holds a model of the same vocabulary and at most half as many weights."""
    if facts.config is None or vocab_size != facts.config.vocab_size:
        return False
    return num_elements(describe(folder)) <= num_elements(facts) // 2


def num_elements(facts: ModelFacts) -> int:
    """Weights of a model; of a quantised one whose form is not understood, elements of its file."""
    return facts.parameters.total if facts.parameters is not None else sum(facts.stored.values())
