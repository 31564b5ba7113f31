"""Latent attention in a trace (see `models.latent`): tokens store a latent, and what heads make of it goes into the
queries and the results.

Seen by itself, such a layer has as many heads of keys as of queries. Some columns of a head's key are made of a latent
by a linear layer, and the others, which are rotated, all heads share; its values are more columns of the same layer.
That is what is asked for here, and no names.

Worked example: two heads, and a layer over the latent with eight columns. Head 0 has columns 0 and 1 in its key, 2 and
3 as its value, head 1 columns 4 to 7; s is shared. Keys are the columns (0, 1, s) and (4, 5, s).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from draftwise.kernels.base import HeadShape, Ops
from draftwise.kernels.handles import Heads
from draftwise.models.general.attention import LayerCall
from draftwise.models.general.nodes import Attend, CannotAssemble, Concat, Node, Select
from draftwise.models.general.plans import LinearRows, as_linear
from draftwise.models.general.rotations import Rotation


@dataclass(frozen=True, eq=False)
class Latent:
    """A layer of latent attention. Columns of a head's key are ``own``, which it makes of the latent, and ``first`` and
    ``second``, shared by all heads, which are rotated with one another."""

    latent: Node  # [C]
    shared: LinearRows  # the shared columns: first, then second ones
    keys: LinearRows  # [heads * len(own)] of the layer over the latent
    values: LinearRows  # [heads * V]
    own: Tensor
    first: Tensor
    second: Tensor
    heads: int

    def call(self, call: LayerCall) -> LayerCall:
        """The layer's attention over latents."""
        size = self.latent.width + self.shared_width
        return replace(call, heads=HeadShape(self.heads, 1, size), key_dim=size, value_dim=size, latent=True)

    @property
    def shared_width(self) -> int:
        return len(self.first) + len(self.second)

    def rotation(self, rotation: Rotation) -> Rotation:
        """The rotation of stored heads: ``rotation`` of the model's heads, and none of the latent."""
        frequencies = rotation.inv_freq[: len(self.first)]
        still = torch.zeros(self.latent.width // 2)
        size = self.latent.width + self.shared_width
        return Rotation(torch.arange(size), torch.cat([frequencies, still]), rotation.scaling)

    def pack(self, ops: Ops, key_dim: int) -> tuple[Heads, Heads]:
        """The layers for queries of each head [key_dim], and for results. Stored are [first | first half
        of the latent | second | its second half]."""
        width, half = self.latent.width, self.latent.width // 2
        part = len(self.first)
        size = width + 2 * part
        in_latent = torch.arange(half) + part
        places = torch.cat((in_latent, in_latent + size // 2))
        keys = self.keys.weight().to(ops.device).view(self.heads, len(self.own), width)
        values = self.values.weight().to(ops.device).view(self.heads, -1, width)
        absorbed = keys.new_zeros((self.heads, size, key_dim))
        absorbed[:, places[:, None], self.own] = keys.transpose(1, 2)
        absorbed[:, torch.arange(part), self.first] = 1.0
        absorbed[:, torch.arange(part) + size // 2, self.second] = 1.0
        out = values.new_zeros((self.heads, values.shape[1], size))
        out[:, :, places] = values
        return ops.pack_heads(absorbed), ops.pack_heads(out)

    def stored(self, ops: Ops, queries: Tensor, shared: Tensor, latent: Tensor) -> Tensor:
        """Absorbed queries, and what the token stores, in one row."""
        half, part = self.latent.width // 2, len(self.first)
        first = ops.concat(ops.columns(shared, 0, part), ops.columns(latent, 0, half))
        second = ops.concat(ops.columns(shared, part, part), ops.columns(latent, half, half))
        return ops.concat(queries, ops.concat(first, second))


def latent_of(node: Attend, key: Node, rotation: Rotation, call: LayerCall) -> Latent | None:
    """
    Args:
        key: ``node.k`` without its rotation.
        rotation: of a head.

    Returns:
        None: it is no latent attention.

    Raises:
        CannotAssemble: it is, of a kind that is not known.
    """
    heads, dim = call.heads.num_heads, call.key_dim
    if not isinstance(key, Select) or not isinstance(key.x, Concat) or call.heads.num_kv_heads != heads:
        return None
    value = as_linear(node.v)
    starts = list(accumulate((part.width for part in key.x.parts), initial=0))
    found = [(start, as_linear(part)) for start, part in zip(starts, key.x.parts, strict=False)]
    if value is None or len(found) != 2 or any(part is None for _, part in found):
        return None
    columns = key.columns.view(heads, dim)
    kept = [(start, part) for start, part in found if part is not None and part.layer is value.layer]
    rest = [(start, part) for start, part in found if part is not None and part.layer is not value.layer]
    if len(kept) != 1 or len(rest) != 1:
        return None
    (start, expand), (shared_start, shared) = kept[0], rest[0]
    inside = (columns >= start) & (columns < start + key.x.parts[[s for s, _ in found].index(start)].width)
    own, common = inside[0].nonzero()[:, 0], (~inside[0]).nonzero()[:, 0]
    if not bool((inside == inside[0]).all()) or not bool((columns[:, common] == columns[0, common]).all()):
        raise CannotAssemble("heads put their keys together differently")
    if expand.bias() is not None:
        raise CannotAssemble("keys are made of a latent with a bias")
    latent = expand.layer.x
    half = len(common) // 2
    first, second = rotation.order[:half], rotation.order[dim // 2 : dim // 2 + half]
    if (
        len(common) % 2
        or latent.width % 2
        or set(torch.cat([first, second]).tolist()) != set(common.tolist())
    ):
        raise CannotAssemble("heads of latent attention are rotated elsewhere than in what they share")
    return Latent(
        latent,
        shared.ordered(columns[0, torch.cat([first, second])] - shared_start),
        expand.ordered((columns[:, own] - start).flatten()),
        value,
        own, first, second, heads,
    )  # fmt: skip
