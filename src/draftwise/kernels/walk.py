"""Answers of verification kernels."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Walk(NamedTuple):
    """The committed tokens of requests: ``packed`` [R, 2 N + 2] int32. Entries behind a path's length, or behind the
    last token,
    mean nothing."""

    packed: Tensor
    num_nodes: int

    @property
    def accepted(self) -> Tensor:
        """[R] lengths of the accepted paths."""
        return self.packed[:, 0]

    @property
    def paths(self) -> Tensor:
        """[R, N] their nodes."""
        return self.packed[:, 1 : 1 + self.num_nodes]

    @property
    def tokens(self) -> Tensor:
        """[R, N + 1] their tokens, then the one that follows; -1: the target's distribution has no weight."""
        return self.packed[:, 1 + self.num_nodes :]
