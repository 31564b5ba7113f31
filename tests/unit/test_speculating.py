"""What a request says of its drafts, beside what the engine says."""

from __future__ import annotations

from typing import Any

import pytest

from draftwise import SamplingParams
from draftwise.config import SpeculativeConfig
from draftwise.engine.facts import Traits
from draftwise.engine.speculating import SpeculationChoice
from draftwise.errors import RequestError

TREE = [[0], [1], [0, 0], [0, 0, 0]]


def test_a_number_of_tokens_beside_a_static_tree() -> None:
    """Of the engine's tree a request may have the first nodes; one of its own has as many as it has."""
    configured = SpeculativeConfig.from_dict({"method": "synthetic", "speculative_token_tree": TREE})
    choice = SpeculationChoice([configured], {"synthetic": Traits(drafts_trees=True)}, "synthetic", None)

    def resolved(**speculation: Any) -> tuple[int, ...] | None:
        found = choice.resolve(SamplingParams(temperature=0, speculation=speculation))
        assert found.tree is None or found.num_speculative_tokens == len(found.tree)
        return found.tree

    assert resolved() == resolved(num_speculative_tokens=4) == (-1, -1, 0, 2)
    assert resolved(num_speculative_tokens=2) == (-1, -1)
    assert resolved(num_speculative_tokens=9) == (-1, -1, 0, 2)
    assert resolved(num_speculative_tokens=2, speculative_token_tree=None) is None
    own = [[0]]
    assert resolved(speculative_token_tree=own) == (-1,)
    assert resolved(speculative_token_tree=own, num_speculative_tokens=1) == (-1,)
    with pytest.raises(RequestError, match="2 contradicts a speculative_token_tree of 1 node"):
        resolved(speculative_token_tree=own, num_speculative_tokens=2)
