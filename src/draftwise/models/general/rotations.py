"""Rotations by position, found in the numbers of a trace.

A model may rotate halves or neighbours, all of a head or a part of it. Our operations rotate column i of a head with
column i + D / 2. Queries and keys only meet in products over all columns of a head, so that any order of the columns
will do, if both have it: the projections' rows are put into the order that our operations expect.

Worked example: D = 4, neighbours are rotated: pairs (0, 1) and (2, 3). Order [0, 2, 1, 3]: rows 0 and 2 of a head's
projection come first, rows 1 and 3 behind, and column 0 is rotated with column 2, which was row 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from draftwise.models.general.nodes import CannotAssemble, Turn


@dataclass(frozen=True, eq=False)
class Rotation:
    """``order`` [D]: which column of the model's head stands where; ``inv_freq`` [D / 2] float32, 0 where nothing is
    rotated; ``scaling``: of cosines and sines."""

    order: Tensor
    inv_freq: Tensor
    scaling: float

    def same(self, other: Rotation) -> bool:
        return (
            torch.equal(self.order, other.order)
            and torch.equal(self.inv_freq, other.inv_freq)
            and self.scaling == other.scaling
        )


def no_rotation(head_dim: int) -> Rotation:
    return Rotation(torch.arange(head_dim), torch.zeros(head_dim // 2), 1.0)


def frequencies(model: nn.Module) -> list[tuple[Tensor, float]]:
    """Every table of frequencies that the model keeps, float32, with the factor on its cosines. They are taken as they
    are: angles of a trace are too coarse for positions far out."""
    found = []
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if "inv_freq" in name and buffer.ndim == 1 and "original" not in name:
                prefix = name.removesuffix("inv_freq")
                scaling = getattr(
                    module, prefix + "attention_scaling", getattr(module, "attention_scaling", 1.0)
                )
                found.append((buffer.detach().float().cpu(), float(scaling)))
    return found


def rotation_of(
    turn: Turn, head_dim: int, positions: Tensor, known: Sequence[tuple[Tensor, float]]
) -> Rotation:
    """The rotation that all heads of ``turn`` go through.

    Raises:
        CannotAssemble: heads differ, or it is not a rotation by frequencies that the model keeps.
    """
    heads = turn.width // head_dim
    partner = turn.partner.view(heads, head_dim) - torch.arange(heads)[:, None] * head_dim
    cos, sin = (table.view(-1, heads, head_dim) for table in (turn.cos, turn.sin))
    if not (
        bool((partner == partner[0]).all()) and bool((cos == cos[:, :1]).all() & (sin == sin[:, :1]).all())
    ):
        raise CannotAssemble("heads are rotated differently")
    pairs, still = _pairs(partner[0].tolist(), cos[:, 0], sin[:, 0], positions)
    if len(still) % 2:
        raise CannotAssemble("an odd number of columns is left as it is")
    first = torch.tensor([i for i, _ in pairs], dtype=torch.int64)
    inv_freq, scaling = _known(cos[:, 0, first], -sin[:, 0, first], positions.cpu(), known)
    if still and scaling != 1.0:
        raise CannotAssemble("a part of a head is rotated and scaled")
    half = len(still) // 2
    order = [*(i for i, _ in pairs), *still[:half], *(j for _, j in pairs), *still[half:]]
    return Rotation(torch.tensor(order), torch.cat([inv_freq, torch.zeros(half)]), scaling)


def _pairs(
    partner: list[int], cos: Tensor, sin: Tensor, positions: Tensor
) -> tuple[list[tuple[int, int]], list[int]]:
    """Columns that are rotated together, the one whose partner is taken away first; and those that stay."""
    pairs, still = [], []
    near = int((positions == 1).nonzero()[0, 0])  # where no angle has gone round
    for i, j in enumerate(partner):
        if i == j or bool((sin[:, i] == 0).all()):
            if not bool((cos[:, i] == 1).all()):
                raise CannotAssemble("columns are scaled by position")
            still.append(i)
            continue
        if partner[j] != i or not torch.equal(sin[:, i], -sin[:, j]) or not torch.equal(cos[:, i], cos[:, j]):
            raise CannotAssemble("it mixes columns in a way that is not a rotation")
        if sin[near, i] < 0:
            pairs.append((i, j))
    if 2 * len(pairs) + len(still) != len(partner):
        raise CannotAssemble("it mixes columns in a way that is not a rotation")
    return pairs, still


def _known(
    cos: Tensor, sin: Tensor, positions: Tensor, known: Sequence[tuple[Tensor, float]]
) -> tuple[Tensor, float]:
    """The frequencies whose cosines and sines [T, pairs] these are. Models of few bits round them."""
    for inv_freq, scaling in known:
        if inv_freq.shape[0] < cos.shape[1]:
            continue
        angles = positions.float()[:, None] * inv_freq[: cos.shape[1]]
        off = torch.maximum((angles.cos() * scaling - cos).abs(), (angles.sin() * scaling - sin).abs())
        if float(off.max()) < 0.01 * max(scaling, 1.0):
            return inv_freq[: cos.shape[1]], scaling
    raise CannotAssemble("it rotates by angles that no frequency of the model gives")
