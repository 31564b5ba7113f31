"""Engines that wait, and engines that decode in seats on the device, with every method. The graphs here need no GPU,
and refuse to capture whatever would read a value on the host."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property, partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from draftwise import LLM, RequestOutput, SamplingParams
from draftwise.attention.torch_static import TorchStaticAttention
from draftwise.kernels.torch_ops import TorchOps
from draftwise.runner.seating import Seating
from draftwise.runner.seats import Seats
from tests.e2e.conftest import token_ids
from tests.fakes.every_method import SHAPES, VOCAB, make_families, make_target
from tests.fakes.fake_graphs import FakeGraphs

METHODS = [
    "none", "draft_model", "eagle", "eagle3", "mtp", "dflash", "ngram", "suffix", "medusa", "early_exit", "hybrid",
]  # fmt: skip
TREES = ["draft_model", "eagle", "eagle3", "mtp", "medusa", "early_exit"]
RULES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "coupled": {"temperature": 0.9},
    "rejection": {"temperature": 1.0},
    "block": {"temperature": 0.8},
    "typical": {"temperature": 0.7},
}


class Pair:
    """An engine that waits, and one that decodes in seats; each is made when it is needed first."""

    def __init__(self, make: Callable[..., LLM]) -> None:
        """``make``: of an engine, with options besides."""
        self._make = make

    @cached_property
    def waiting(self) -> LLM:
        return self._make()

    @cached_property
    def ahead(self) -> LLM:
        return self._make(async_scheduling=True)

    @cached_property
    def _ordinary(self) -> list[int]:
        return count_ordinary(self.ahead)

    def generate(
        self, prompts: Sequence[Any], params: list[SamplingParams]
    ) -> tuple[list[RequestOutput], list[RequestOutput]]:
        """Of both, in this order: the same text; and in seats nobody ever decodes in an ordinary step."""
        wanted = self.waiting.generate(prompts, params)
        entered = seats(self.ahead).num_entered
        self._ordinary.clear()
        found = self.ahead.generate(prompts, params)
        assert token_ids(found) == token_ids(wanted)
        assert seats(self.ahead).num_entered - entered == len(params)
        assert self._ordinary and not any(self._ordinary)
        assert not self.ahead.stats().drafter_failures
        self.ahead.check_integrity()
        return wanted, found

    def close(self) -> None:
        for name in ("waiting", "ahead"):
            if name in self.__dict__:
                self.__dict__.pop(name).close()


_KEPT = 8


class Engines:
    def __init__(self, root: Path, **shape: Any) -> None:
        """``shape``: of drafts, of all methods in `TREES`; nothing: chains."""
        self.target = make_target(root)
        self.families = make_families(root)
        rng = np.random.default_rng(7)
        prompts = [rng.integers(0, VOCAB, int(rng.integers(3, 30))).tolist() for _ in range(6)]
        prompts += [prompts[2], [*prompts[5], 1]]  # prefix hits
        self.prompts = [{"prompt_token_ids": ids} for ids in prompts]
        self.chosen = [s for s in self.families["methods"] if s["method"] in METHODS]
        (hybrid,) = (s for s in self.chosen if s["method"] == "hybrid")
        # a suffix look-up is another one on the device
        hybrid |= {"hybrid_lookup": "ngram", "hybrid_min_match": 2}
        hybrid |= {"prompt_lookup_min": 1, "prompt_lookup_max": 5}
        if shape:
            self.chosen = [
                {k: v for k, v in s.items() if k != "num_speculative_tokens"} | shape
                for s in self.chosen
                if s["method"] in TREES
            ]
        self.pairs: dict[str, Pair] = {}

    @cached_property
    def waiting(self) -> LLM:
        return self.make()

    @cached_property
    def ahead(self) -> LLM:
        return LLM(self.target, **self.options(async_scheduling=True))

    def make(self, **options: Any) -> LLM:
        """Another one, with passes and loops for two numbers of requests; `ahead` has all. A start, with
        all that is captured, takes longer than to generate."""
        with pytest.MonkeyPatch.context() as patch:
            for place in ("sizes", "setup"):
                patch.setattr(f"draftwise.graphs.{place}.request_counts", lambda most: (2, most))
            return LLM(self.target, **self.options(**options))

    def pair(self, entry: dict[str, Any]) -> Pair:
        """Of one drafter, with room for all prompts, and no prefixes that are shared: a drafter that did not see one
        drafts something else, which is accepted as often as not. The last ones are kept: other tests come back to them.
        """
        options: dict[str, Any] = {
            "enable_prefix_caching": False,
            "max_num_seqs": 8,
            "max_num_batched_tokens": 96,
            "num_kv_blocks": 192,
            "keep_trace": True,
            "speculative_config": entry,
        }
        name = repr(entry)
        if name not in self.pairs:
            if len(self.pairs) == _KEPT:
                self.pairs.pop(next(iter(self.pairs))).close()
            self.pairs[name] = Pair(partial(self.make, **options))
        return self.pairs[name]

    def close_pairs(self) -> None:
        while self.pairs:
            self.pairs.popitem()[1].close()

    def close(self) -> None:
        self.close_pairs()
        for name in ("waiting", "ahead"):
            if name in self.__dict__:
                self.__dict__.pop(name).close()

    def options(self, **more: Any) -> dict[str, Any]:
        base: dict[str, Any] = {
            "dtype": "float32",
            "device": "cpu",
            "skip_tokenizer_init": True,
            "block_size": 4,
            "num_kv_blocks": 128,
            "max_num_seqs": 4,
            "max_model_len": 64,
            "max_num_batched_tokens": 48,
            "speculation_control": "static",
            "speculative_config": self.chosen,
            "compilation_config": {"cudagraph_mode": "FULL"},
        }
        return base | more


@pytest.fixture(scope="module")
def graphs() -> Iterator[None]:
    """Graphs that need no GPU."""

    def ops(dtype: torch.dtype, device: torch.device, *args: object, **options: object) -> TorchOps:
        return TorchOps(dtype, device, TorchStaticAttention())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("draftwise.models.self_test.default_ops", ops)
        patch.setattr("draftwise.engine.device.backend_for", lambda device: FakeGraphs())
        yield


def made_of(shape: str, folders: pytest.TempPathFactory) -> Iterator[Engines]:
    """Engines whose drafters draft so, closed behind the tests."""
    made = Engines(folders.mktemp(shape), **({} if shape == "chain" else SHAPES[shape]))
    yield made
    made.close()


@pytest.fixture(scope="module")
def engines(graphs: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    yield from made_of("chain", tmp_path_factory)


@pytest.fixture(scope="module")
def forests(graphs: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    """Engines whose drafters draft static trees."""
    yield from made_of("static", tmp_path_factory)


@pytest.fixture(scope="module")
def growing(graphs: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    """Engines whose drafters draft dynamic trees."""
    yield from made_of("dynamic", tmp_path_factory)


def seats(llm: LLM) -> Seats:
    assert llm._engine is not None
    executor: Any = llm._engine.core.executor
    found: Seats = executor.inner.seats
    assert found is not None
    return found


def params_of(rule: str, method: str, **more: Any) -> list[SamplingParams]:
    speculation = {"method": method} | ({} if rule == "greedy" or method == "none" else {"rule": rule})
    options = {"max_tokens": 14, "ignore_eos": True} | RULES[rule] | more
    return [SamplingParams(seed=5 + i, speculation=speculation, **options) for i in range(8)]


def entry_of(engines: Engines, method: str) -> dict[str, Any]:
    found: dict[str, Any] = next(entry for entry in engines.chosen if entry["method"] == method)
    return found


def three_layers(engines: Engines) -> dict[str, Any]:
    """MTP; of four drafts the last layer makes two."""
    (entry,) = (entry for entry in engines.families["other forms"] if entry["method"] == "mtp")
    return entry | {"num_speculative_tokens": 4}


def stay(
    engines: Engines, entry: dict[str, Any], rule: str, kinds: Sequence[dict[str, Any]] = ({},)
) -> list[RequestOutput]:
    """The text of the engine that waits, by the same drafts of this drafter; and nobody ever waits. ``kinds``: what
    requests want besides, by turns."""
    params = params_of(rule, entry["method"], max_tokens=24)
    params = [one.replace(**kinds[i % len(kinds)]) for i, one in enumerate(params)]
    wanted, found = engines.pair(entry).generate(engines.prompts, params)
    assert [o.metrics.speculation for o in found] == [o.metrics.speculation for o in wanted]
    assert [o.outputs[0].trace for o in found] == [o.outputs[0].trace for o in wanted]
    return found


def count_ordinary(llm: LLM) -> list[int]:
    """Of every ordinary part of a step, from now on: how many requests it decides, which is waited for."""
    executor: Any = llm._engine.core.executor  # type: ignore[union-attr]
    verifying = executor.inner._verifying
    found: list[int] = []
    verify = verifying.verify

    def watched(logits: torch.Tensor, batch: Any, deciding: Any) -> Any:
        found.append(len(batch.owners))
        return verify(logits, batch, deciding)

    verifying.verify = watched
    return found


def sent_away_at_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every seventh time nobody knows how a request could go on in its seat."""
    asked = count()
    goes_on = Seating.goes_on
    monkeypatch.setattr(
        Seating, "goes_on", lambda *args: next(asked) % 7 != 6 and goes_on(*args), raising=True
    )


def some(chosen: Sequence[tuple[Any, ...]], every: Iterable[tuple[Any, ...]]) -> list[Any]:
    """Parameters of a test: those chosen, in which each value has a partner or two; --all: every one."""
    chosen = list(chosen)
    return [*chosen, *(pytest.param(*case, marks=pytest.mark.slow) for case in every if case not in chosen)]


def failing(*_: object, **__: object) -> Any:
    raise RuntimeError("lost")
