"""From options to a head with its initial weights, and the recipe it is trained by."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from draftwise.errors import ConfigError
from draftwise.models.tokenizer import load_tokenizer
from draftwise.train.demo_recipe import LlamaShape, Schedule

from .args import BLOCK_KINDS, TrainOptions
from .block import BlockDrafter, BlockForm
from .data import Split, coverage, draft_vocabulary
from .layers import HeadShape
from .medusa import MedusaHeads
from .sequential import Eagle3Head, EagleHead, MtpHead
from .student import DraftStudent
from .teacher import EngineTeacher, default_block_layers, default_feature_layers, head_shape
from .text import Tokens
from .trainer import HeadPlan, HeadRecipe

_UNROLLS = {"eagle3": 7, "mtp": 4, "eagle": 1}
_STUDENT_MEASURED = 4
"""Drafts that evaluation of a draft model looks ahead."""
_DECAY_SHARE = 0.45


def feature_layers(options: TrainOptions, num_layers: int) -> tuple[int, ...]:
    """Return the target's layers whose entering states the head eats beside the last hidden state."""
    if options.kind == "eagle3":
        return options.feature_layers or default_feature_layers(num_layers)
    if options.kind in BLOCK_KINDS:
        return options.feature_layers or default_block_layers(num_layers)
    return ()


def recipe_of(options: TrainOptions) -> HeadRecipe:
    """Return the recipe that the options describe."""
    unrolls = options.unrolls or _UNROLLS.get(options.kind, _STUDENT_MEASURED)
    anchors = 0
    if options.kind == "medusa":
        unrolls = options.heads
    elif options.kind in BLOCK_KINDS:
        unrolls = options.block_size - (options.kind == "dflash")
        anchors = options.anchors or max(1, options.max_length // 4)
    plan = HeadPlan(unrolls, options.decay, options.variation, options.muon_lr, options.adam_lr, anchors)
    recipe = HeadRecipe(
        plans={options.kind: plan},
        seed=options.seed,
        stride=options.stride,
        decay_share=_DECAY_SHARE,
        weight_decay=options.weight_decay,
    )
    if options.steps:
        warm = max(1, min(30, options.steps // 10))
        decay = max(1, round(_DECAY_SHARE * options.steps))
        recipe = replace(recipe, schedule=Schedule(options.steps, decay, warm))
    return recipe


def build_head(
    options: TrainOptions, teacher: EngineTeacher, pieces: Split
) -> tuple[nn.Module, dict[str, Any]]:
    """Return a head with its initial weights, and what was chosen for it.

    Raises:
        ConfigError: sizes that do not fit the target.
    """
    config = teacher.config
    shape = head_shape(config, options.intermediate_size or None)
    matrices = teacher.embedding, teacher.lm_head
    generator = torch.Generator().manual_seed(options.seed)
    if options.kind == "eagle3":
        size = min(options.draft_vocab_size or 32000, config.vocab_size)
        ids = draft_vocabulary(pieces.train, config.vocab_size, size)
        head = Eagle3Head(
            shape, *matrices, generator, num_features=len(teacher.feature_layers), draft_ids=ids
        )
        return head, {
            "draft_vocab_size": size,
            "draft_vocab_coverage": round(coverage(pieces.heldout, ids), 4),
            "feature_layers": list(teacher.feature_layers),
        }
    if options.kind in BLOCK_KINDS:
        return _build_block(options, teacher, pieces, shape, generator)
    if options.kind == "eagle":
        return EagleHead(shape, *matrices, generator), {}
    if options.kind == "mtp":
        return MtpHead(shape, *matrices, generator, normed=True), {}
    if options.kind == "medusa":
        heads = MedusaHeads(options.heads, options.layers or 1, teacher.lm_head)
        return heads, {"heads": options.heads, "layers": options.layers or 1}
    student = _student_shape(options, teacher)
    return DraftStudent(student, options.seed, teacher.dtype), {"shape": asdict(student)}


def _build_block(
    options: TrainOptions,
    teacher: EngineTeacher,
    pieces: Split,
    shape: HeadShape,
    generator: torch.Generator,
) -> tuple[nn.Module, dict[str, Any]]:
    config, spark = teacher.config, options.kind == "dspark"
    if options.mask_token >= config.vocab_size:
        raise ConfigError(
            f"--mask-token {options.mask_token} is not in the vocabulary of {config.vocab_size} tokens"
        )
    mask = options.mask_token
    if mask < 0:
        mask = choose_mask_token(pieces.train, config.vocab_size, load_tokenizer(str(teacher.folder)))
    form = BlockForm(
        layers=options.layers or min(5, max(1, config.num_layers // 6)),
        drafts=options.block_size - (not spark),
        mask_token=mask,
        from_root=spark,
        causal=options.causal,
        markov_kind=options.markov_head,
        markov_rank=(options.markov_rank or min(256, max(1, config.hidden_size // 4))) if spark else 0,
        confidence=spark and not options.no_confidence_head,
    )
    ids: Tensor | None = None
    made: dict[str, Any] = {"form": asdict(form), "feature_layers": list(teacher.feature_layers)}
    if 0 < options.draft_vocab_size < config.vocab_size:
        ids = draft_vocabulary(pieces.train, config.vocab_size, options.draft_vocab_size)
        made["draft_vocab_size"] = options.draft_vocab_size
        made["draft_vocab_coverage"] = round(coverage(pieces.heldout, ids), 4)
    matrices = teacher.embedding, teacher.lm_head
    count = len(teacher.feature_layers)
    return BlockDrafter(shape, form, *matrices, generator, num_features=count, draft_ids=ids), made


def choose_mask_token(pieces: Sequence[Tokens], vocab_size: int, tokenizer: Any) -> int:
    """Return the mask token's id: the tokenizer's mask token, else the first id that it leaves
    unused, else the token that the text has least use for.

    Example: a tokenizer of 151,669 tokens without a mask token, a vocabulary of 151,936: 151669.
    """
    own = getattr(tokenizer, "mask_token_id", None)
    if own is not None and own < vocab_size:
        return int(own)
    if len(tokenizer) < vocab_size:
        return len(tokenizer)
    return least_used([piece.ids for piece in pieces], vocab_size)


def least_used(texts: Iterable[Sequence[int] | npt.NDArray[Any]], vocab_size: int) -> int:
    """Return the token that stands in texts least often, the largest of those. Example: 0 2 0 1, of 4 tokens: 3."""
    counts = np.zeros(vocab_size, np.int64)
    for text in texts:
        counts += np.bincount(np.asarray(text), minlength=vocab_size)
    return int(vocab_size - 1 - np.argmin(counts[::-1]))


def _student_shape(options: TrainOptions, teacher: EngineTeacher) -> LlamaShape:
    config = teacher.config
    hidden = options.hidden_size or min(512, config.hidden_size)
    heads = max(1, hidden // config.head_dim)
    if hidden % config.head_dim:
        raise ConfigError(
            f"--hidden-size {hidden} is not a multiple of the target's head size {config.head_dim}"
        )
    return LlamaShape(
        vocab_size=config.vocab_size,
        hidden_size=hidden,
        num_layers=options.layers or 2,
        num_heads=heads,
        num_kv_heads=heads // 2 if heads % 2 == 0 else heads,
        head_dim=config.head_dim,
        intermediate_size=options.intermediate_size or hidden * 5 // 2,
        max_positions=config.max_model_len,
    )
