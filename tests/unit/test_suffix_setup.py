"""The suffix proposer's settings, what it does without its native part, and what a step costs."""

from __future__ import annotations

import logging
import time
from typing import Any

import numpy as np
import pytest
from tests.fakes.suffix_rows import TEXT, row, run
from tests.native import native_or_skip

from draftwise.config import SpeculativeConfig
from draftwise.errors import ConfigError
from draftwise.propose.lookup import suffix as suffix_module
from draftwise.propose.lookup.suffix import SuffixProposer

# ------------------------------------------------------------------------------------------- configuration


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"max_tree_depth": 1}, "max_tree_depth"),
        ({"max_tree_depth": 5000}, "max_tree_depth"),
        ({"max_cached_requests": -1}, "max_cached_requests"),
        ({"max_spec_factor": -0.5}, "max_spec_factor"),
        ({"min_token_prob": 1.5}, "min_token_prob"),
    ],
)
def test_values_out_of_range(options: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError, match=f"suffix_decoding_{field}"):
        SuffixProposer(**options)


def test_create_takes_the_settings() -> None:
    class Context:
        speculative = SpeculativeConfig.from_dict(
            {
                "method": "suffix",
                "suffix_decoding_max_tree_depth": 30,
                "suffix_decoding_max_cached_requests": 0,
                "suffix_decoding_max_spec_factor": 2.5,
                "suffix_decoding_min_token_prob": 0.25,
            }
        )

    proposer = SuffixProposer.create(Context())  # type: ignore[arg-type]
    assert (proposer.max_tree_depth, proposer.max_cached_requests) == (30, 0)
    assert (proposer.limits.factor, proposer.limits.min_prob) == (2.5, 0.25)
    Context.speculative = SpeculativeConfig(method="suffix")
    proposer = SuffixProposer.create(Context())  # type: ignore[arg-type]
    assert (proposer.max_tree_depth, proposer.max_cached_requests) == (24, 10_000)
    assert (proposer.limits.factor, proposer.limits.min_prob) == (1.0, 0.1)
    assert Context.speculative.num_speculative_tokens == 16


def test_without_a_library(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(suffix_module, "native_library", lambda: None)
    monkeypatch.setattr(suffix_module, "why_not_native", lambda: "there is no compiler")
    with caplog.at_level(logging.INFO, "draftwise"):
        proposer = SuffixProposer()
    assert "there is no compiler" in caplog.text
    run(proposer, 1, [1], TEXT)
    assert proposer.propose([row([99, *TEXT[:5]], 2)])[0].tokens == tuple(TEXT[5:10])
    with pytest.raises(ConfigError, match="there is no compiler"):
        SuffixProposer(native=True)


def test_with_an_old_library(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that was built before the tree was in it."""
    library = native_or_skip()

    class Old:
        path = library.path

        def function(self, name: str, result: Any, arguments: Any) -> Any:
            raise AttributeError(name)

    old = Old()
    monkeypatch.setattr(suffix_module, "native_library", lambda: old)
    with caplog.at_level(logging.INFO, "draftwise"):
        proposer = SuffixProposer()
    assert "was built without it" in caplog.text
    assert proposer.propose([row([1, 2, 3, 1, 2])])[0].tokens == (3, 1)


# -------------------------------------------------------------------------------------------------- speed


def test_the_cost_of_a_step_does_not_grow_with_the_cache() -> None:
    """Medians: 50 times the cached tokens may cost a few cache misses more; 100 us even on a busy machine."""
    native_or_skip()
    stream = np.random.default_rng(0).integers(0, 300, 240_000).astype(np.int32)

    def median(cached: int) -> float:
        proposer = SuffixProposer(native=True)
        for rid, start in enumerate(range(0, cached, 1000)):
            proposer.propose([row(stream[start : start + 1000], rid)])
            proposer.remove(rid)
        times = []
        for n in range(3, 903, 3):
            request = row(stream[-1000 : -1000 + n], 10_000)
            start_time = time.perf_counter()
            proposer.propose([request])
            times.append(time.perf_counter() - start_time)
        return float(np.median(times))

    small, large = median(4_000), median(200_000)
    assert large < 5 * small
    assert large < 100e-6
