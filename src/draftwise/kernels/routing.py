"""Settings of mixtures of experts and gated MLPs: the choice of a row's experts, and the function that joins gate and
up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["silu", "gelu_tanh", "clamped"]


@dataclass(frozen=True, slots=True)
class Activation:
    """How the halves of a gated MLP become one.

    - ``silu``: silu(gate) * up (SwiGLU, Shazeer 2020, arXiv:2002.05202).
    - ``gelu_tanh``: gelu(gate) * up, gelu with tanh: 0.5 g (1 + tanh(sqrt(2 / pi) (g + 0.044715 g^3))).
    - ``clamped``: g * sigmoid(alpha g) * (u + 1) with g = min(gate, limit), u = up between -limit and limit (GPT-OSS).
    """

    kind: Kind = "silu"
    alpha: float = 1.702
    limit: float = 7.0


SILU = Activation()


@dataclass(frozen=True, slots=True)
class Routing:
    """How a row's experts are chosen from its scores, and what weights they get.

    Shares are the softmax over all scores, or the sigmoid of each. The ``top_k`` experts of the largest shares (plus a
    correction, where the checkpoint has one) are taken, best first, the lower number first of equal ones; their weights
    are their shares without the correction, divided by their sum if ``normalise``, times ``scale``.

    ``groups`` (DeepSeek V2 and V3, arXiv:2405.04434, 2412.19437): experts stand in groups of equal size; a row may take
    experts of the ``top_groups`` best ones alone, and a group is as good as its ``group_rank`` best experts together.

    ``shared``: one more expert behind the others that every row goes through, with the weight 1 (``plain``), or with
    the sigmoid of one more score (``gated``).

    Example: scores (2, 0, 1, 0), top_k 2, softmax, not normalised: experts (0, 2) with weights (0.61, 0.22).
    """

    num_experts: int
    top_k: int
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    normalise: bool = True
    scale: float = 1.0
    groups: int = 1
    top_groups: int = 1
    group_rank: int = 1
    shared: Literal["none", "plain", "gated"] = "none"
    activation: Activation = SILU

    def __post_init__(self) -> None:
        assert 1 <= self.top_k <= self.num_experts and self.num_experts % self.groups == 0
        size = self.num_experts // self.groups
        assert 1 <= self.top_groups <= self.groups and 1 <= self.group_rank <= size
        assert self.top_k <= size * self.top_groups

    @property
    def num_layers(self) -> int:
        """MLPs, the shared one included."""
        return self.num_experts + (self.shared != "none")

    @property
    def num_chosen(self) -> int:
        """MLPs that a row goes through."""
        return self.top_k + (self.shared != "none")

    @property
    def num_scores(self) -> int:
        """Scores of a row."""
        return self.num_experts + (self.shared == "gated")
