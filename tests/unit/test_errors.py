"""What messages say of what was given: enough, and never much."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest

from draftwise.errors import LimitError, shown, suggest


@pytest.mark.parametrize("value", [0, -1.5, True, None, "a", b"a", [1, 2], ("x",), {"a": 1}, {1}])
def test_small_values_are_shown_as_they_are(value: Any) -> None:
    assert shown(value) == repr(value)


class Large:
    def __repr__(self) -> str:
        return "x" * 10**6


@pytest.mark.parametrize(
    "make",
    [
        lambda: "x" * 10**7,
        lambda: ["x" * 10**6] * 10,
        lambda: list(range(10**6)),
        lambda: {str(i): "x" * 1000 for i in range(1000)},
        lambda: 10**5000,
        lambda: [10**5000],
        lambda: {"a": {"b": {"c": {"d": ["x" * 1000] * 1000}}}},
        lambda: Large(),
    ],
)
def test_large_values_are_shown_in_short(make: Any) -> None:
    assert len(shown(make())) <= 200


def test_suggestions_are_for_misspellings() -> None:
    names = ["temperature", "top_p"]
    assert suggest("temprature", names) == "; did you mean 'temperature'?"
    assert suggest("zzz", names) == ""
    assert suggest("temperature" * 100_000, names) == ""


@pytest.mark.parametrize("carry", [lambda error: pickle.loads(pickle.dumps(error)), copy.copy, copy.deepcopy])
def test_errors_travel_between_processes(carry: Any) -> None:
    """`concurrent.futures` breaks its whole pool at an exception that cannot be unpickled."""
    found = carry(LimitError("stop: more", "65 strings", "max_stop_strings", 64))
    assert type(found) is LimitError
    assert str(found) == "stop: more: 65 strings; at most 64 (max_stop_strings)"
    assert (found.field, found.limit) == ("stop", "max_stop_strings")
