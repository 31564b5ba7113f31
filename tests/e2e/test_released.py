"""What an engine leaves behind: nothing, without the garbage collector, which may not come for a long time."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator

import pytest

from draftwise import LLM, SamplingParams
from draftwise.kernels.base import Linear
from draftwise.kv.storage import KVStorage
from draftwise.models.base import DecoderModel
from draftwise.models.heads.base import HeadModel
from draftwise.propose.base import Proposer

HEAVY = (Linear, KVStorage, DecoderModel, HeadModel, Proposer)
"""What has weights, or keys and values."""


def alive() -> Counter[str]:
    # by type: isinstance asks some objects of torch for their class, and they warn
    return Counter(kind.__name__ for kind in map(type, gc.get_objects()) if issubclass(kind, HEAVY))


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def run(method: str, temperature: float) -> None:
    params = SamplingParams(temperature=temperature, max_tokens=12, seed=1, speculation={"method": method})
    config = None if method == "none" else {"method": method}
    with LLM(speculative_config=config, num_kv_blocks=40, speculation_control="static") as llm:
        llm.generate(["def f(x):", "class A:"], params)


@pytest.mark.parametrize("method", ["none", "ngram", "suffix", "draft_model", "eagle3", "medusa", "mtp"])
@pytest.mark.usefixtures("no_collector")
def test_a_closed_engine_is_gone(method: str) -> None:
    run(method, 0.0)  # what is made once per process
    gc.collect()
    before = alive()
    run(method, 0.0)
    run(method, 0.8)
    assert alive() - before == Counter()
