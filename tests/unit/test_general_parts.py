"""Parts of Transformers' models, and what a refusal says of them."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from draftwise.models.general.parts import other_inputs


class Reading(nn.Module):
    def forward(
        self,
        pixel_values: Any,
        input_ids: Any = None,
        image_embeds: Any = None,
        bbox: Any = None,
        labels: Any = None,
    ) -> None:
        raise NotImplementedError


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ("TypeError: forward() missing 1 required positional argument: 'pixel_values'", ["pixel_values"]),
        ("You have to specify either `pixel_values` or `image_embeds`.", ["pixel_values", "image_embeds"]),
        ("ValueError: Bbox is required for horizontal relative position bias", ["bbox"]),
        ("topk(): argument 'k' must be int, not NoneType", []),
        ("labels and input_ids are of unlike length", []),
    ],
)
def test_inputs_that_an_error_names(words: str, wanted: list[str]) -> None:
    assert other_inputs(Reading(), words) == wanted
