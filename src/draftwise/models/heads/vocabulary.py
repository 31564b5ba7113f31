"""Draft vocabularies: a head that speaks only the target's most frequent tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from draftwise.errors import ModelLoadError


def target_ids_of(d2t: Tensor) -> Tensor:
    """From the published offsets to ids: draft id i stands for the target's i + d2t[i]. int64 [Vd].

    Example: d2t (0, 2, 2) says that draft ids 0, 1, 2 are the target's 0, 3 and 4.
    """
    offsets = d2t.to(torch.int64)
    return offsets + torch.arange(offsets.shape[0])


def check_target_ids(
    target_ids: Tensor | None, draft_vocab: int, target_vocab: int, what: str, name: str
) -> None:
    """Whether a draft vocabulary of ``draft_vocab`` tokens fits the target's; ``name``: the tensor that maps it.

    Raises:
        ModelLoadError: the sizes differ and nothing maps one to the other, or the map has another length, leaves the
            target's vocabulary, or names a token twice.
    """
    if target_ids is None:
        if draft_vocab != target_vocab:
            raise ModelLoadError(
                f"{what} has a vocabulary of {draft_vocab} tokens, the target one of {target_vocab}, and there is no "
                f"{name} that maps one to the other"
            )
        return
    if target_ids.shape != (draft_vocab,):
        raise ModelLoadError(
            f"{what}: {name} has shape {list(target_ids.shape)} for {draft_vocab} draft tokens"
        )
    if int(target_ids.min()) < 0 or int(target_ids.max()) >= target_vocab:
        raise ModelLoadError(
            f"{what}: {name} leads to tokens {int(target_ids.min())} to {int(target_ids.max())}, but the target's "
            f"vocabulary has {target_vocab}: it is for another target"
        )
    if len(set(target_ids.tolist())) != draft_vocab:
        raise ModelLoadError(f"{what}: {name} names a token of the target twice")
