"""What an engine leaves behind: nothing, without the garbage collector, which may not come for a long time."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from draftwise import LLM, AsyncLLM, SamplingParams, StructuredOutputsParams
from draftwise.attention.torch_static import TorchStaticAttention
from draftwise.errors import EngineDeadError
from draftwise.kernels.handles import Linear
from draftwise.kernels.torch_ops import TorchOps
from draftwise.kv.storage import KVStorage
from draftwise.models.base import DecoderModel
from draftwise.models.heads.base import HeadModel
from draftwise.propose.base import Proposer
from tests.fakes.every_method import make_families, make_target
from tests.fakes.fake_graphs import FakeGraphs

HEAVY = (Linear, KVStorage, DecoderModel, HeadModel, Proposer)
"""What has weights, or keys and values."""


def alive() -> Counter[str]:
    # by type: isinstance asks some objects of torch for their class, and they warn; and there are a million objects,
    # but only some thousand types to ask
    kinds = Counter(map(type, gc.get_objects()))
    return Counter({kind.__name__: count for kind, count in kinds.items() if issubclass(kind, HEAVY)})


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


@pytest.mark.usefixtures("no_collector")
def test_captured_passes_and_seats_are_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU this is the memory of graphs, models and caches."""

    def ops(dtype: torch.dtype, device: torch.device, *args: object, **options: object) -> TorchOps:
        return TorchOps(dtype, device, TorchStaticAttention())

    monkeypatch.setattr("draftwise.models.self_test.default_ops", ops)
    monkeypatch.setattr("draftwise.engine.device.backend_for", lambda device: FakeGraphs())
    target, families = make_target(tmp_path), make_families(tmp_path)
    names = ("draft_model", "eagle3", "mtp", "medusa", "early_exit", "ngram")
    chosen = [config for config in families["methods"] if config["method"] in names]
    options: dict[str, Any] = {
        "dtype": "float32",
        "skip_tokenizer_init": True,
        "block_size": 4,
        "num_kv_blocks": 64,
        "max_num_seqs": 2,
        "max_model_len": 32,
        "speculation_control": "static",
        "speculative_config": chosen,
        "compilation_config": {"cudagraph_mode": "FULL"},
        "async_scheduling": True,
    }
    prompts = [{"prompt_token_ids": [1, 2, 3]} for _ in names]
    params = [
        SamplingParams(temperature=0.8, seed=1, max_tokens=8, speculation={"method": name}) for name in names
    ]
    gc.collect()
    before = alive()
    with LLM(target, **options) as llm:
        assert len(llm.generate(prompts, params)) == len(names)
    del llm
    assert alive() - before == Counter()


def engine_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("draftwise-")}


@pytest.mark.parametrize("close", [True, False], ids=["closed", "dropped"])
@pytest.mark.usefixtures("no_collector")
def test_an_asynchronous_engine_that_nobody_has_is_gone(close: bool) -> None:
    """A cell of a notebook that makes one is run again and again."""

    async def generate() -> None:
        llm = AsyncLLM(num_kv_blocks=40)
        structured = StructuredOutputsParams(choice=["a", "b"])  # prepared in a thread of its own
        params = SamplingParams(max_tokens=4, structured_outputs=structured)
        async for _ in llm.generate("def f(x):", params):
            pass
        if close:
            llm.close()

    asyncio.run(generate())  # what is made once per process
    gc.collect()
    before, threads = alive(), engine_threads()
    asyncio.run(generate())
    for thread in engine_threads() - threads:
        thread.join(30)
    assert alive() - before == Counter()
    assert engine_threads() <= threads


@pytest.mark.parametrize("make", [LLM, AsyncLLM])
@pytest.mark.usefixtures("no_collector")
def test_a_closed_engine_that_is_still_held_keeps_no_models(make: Any) -> None:
    """As the attribute of an object, or the variable of a notebook, holds it."""
    make(num_kv_blocks=40).close()  # what is made once per process
    gc.collect()
    before = alive()
    llm = make(num_kv_blocks=40, speculative_config={"method": "mtp"})
    assert alive() - before != Counter()
    llm.close()
    assert alive() - before == Counter()
    with pytest.raises(EngineDeadError, match="closed"):
        llm.generate("def f(x):") if make is LLM else asyncio.run(last_of(llm))
    llm.close()


async def last_of(llm: AsyncLLM) -> None:
    async for _ in llm.generate("def f(x):"):
        pass
