"""The fuzzer's cases on engines whose steps stay on a device that is pretended (`tests.fakes.fake_graphs`): what a
capture recorded is done again, and nothing of the host is read in between."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from draftwise.attention.torch_static import TorchStaticAttention
from draftwise.kernels.torch_ops import TorchOps
from draftwise.runner.seat_results import Flight
from draftwise.runner.seats import Seats
from draftwise.types import RowPlan
from tests.fakes.every_method import SHAPES
from tests.fakes.fake_graphs import FakeGraphs
from tests.fakes.fuzz.cases import Ask, Case, make_case
from tests.fakes.fuzz.world import World

SEATED = ("draft_model", "eagle", "eagle3", "mtp", "medusa", "early_exit", "ngram", "suffix")
"""Methods that draft for seats; plain decoding has seats, too, and ``dflash`` stands for ``eagle`` at times."""
TREES = frozenset(SEATED[:6])
JOINED = frozenset({*SEATED[:6], "dflash"})
"""Those that have a look-up beside them at times (method ``hybrid``), where they draft chains."""


def make_seated_case(seed: int, world: World) -> Case:
    """A case of the fuzzer with another engine: with graphs, one or two drafters, and trees as their shape at times.
    Most of its requests are such that a seat can be theirs; the others stay as they were."""
    case = make_case(seed, world)
    rng = random.Random(f"seats {seed}")
    entries = {spec["method"]: dict(spec) for spec in world.families["methods"]}
    chosen = rng.sample([m for m in SEATED if m in entries], rng.choice([1, 1, 2]))
    specs = [entries[method] for method in chosen]
    trees = rng.random() < 0.3
    shape = "dynamic" if random.Random(f"shape {seed}").random() < 0.5 else "static"
    for spec in specs:
        if trees and spec["method"] in TREES:
            spec.pop("num_speculative_tokens", None)
            spec |= SHAPES[shape]
        elif spec["method"] in ("draft_model", "eagle3", "ngram"):
            spec["num_speculative_tokens"] = rng.choice([1, 2, 3, 5])
        if spec["method"] in ("draft_model", "eagle3") and rng.random() < 0.15:
            spec["max_model_len"] = rng.randint(12, 40)
    others = random.Random(f"others {seed}")
    for i, method in enumerate(chosen):
        if not trees and method in ("draft_model", "eagle3") and others.random() < 0.3:
            (one_pass,) = (spec for spec in world.families["other forms"] if spec["method"] == method)
            own = ("num_speculative_tokens", "max_model_len")
            specs[i] = one_pass | {name: specs[i][name] for name in own if name in specs[i]}
    blocks = random.Random(f"blocks {seed}")
    for i, method in enumerate(chosen):
        if method == "eagle" and blocks.random() < 0.3:
            family = world.families[blocks.choice(["methods", "other forms"])]
            (block,) = (spec for spec in family if spec["method"] == "dflash")
            chosen[i], specs[i] = "dflash", specs[i] | {"method": "dflash", "model": block["model"]}
        if method == "mtp" and blocks.random() < 0.3:  # three layers that take turns
            (layers,) = (spec for spec in world.families["other forms"] if spec["method"] == method)
            specs[i] = specs[i] | {"model": layers["model"]}
    if not trees and chosen[0] in JOINED and others.random() < 0.4:
        hybrid = entries["hybrid"] | {"hybrid_drafter": specs[0], "hybrid_min_match": 2}
        chosen[0], specs[0] = "hybrid", hybrid | {"hybrid_lookup": others.choice(["suffix", "ngram"])}
    grown = [i for i, method in enumerate(chosen) if method in TREES]
    if trees and shape == "dynamic" and grown and others.random() < 0.3:
        (inner,) = (spec for spec in world.families["methods"] if spec["method"] == chosen[grown[0]])
        hybrid = entries["hybrid"] | {"hybrid_drafter": inner} | SHAPES[shape]
        chosen[grown[0]] = "hybrid"
        specs[grown[0]] = hybrid | {"hybrid_lookup": others.choice(["suffix", "ngram"])}
    options = {k: v for k, v in case.options.items() if k != "quantization"} | {
        "dtype": "float32",
        "kv_cache_dtype": "auto",
        "speculation_control": "static" if rng.random() < 0.85 else "adaptive",
        "max_num_batched_tokens": max(case.options["max_num_batched_tokens"], rng.choice([8, 24, 48])),
        "async_scheduling": rng.random() < 0.9,
        "compilation_config": {"cudagraph_mode": rng.choice(["FULL", "FULL_AND_PIECEWISE"])},
        "speculative_config": specs,
    }
    batches = [[_seatable(ask, rng, chosen) for ask in batch] for batch in case.batches[:2]]
    return replace(case, kernels="torch", family="methods", options=options, batches=batches, drive="steps")


def _seatable(ask: Ask, rng: random.Random, methods: Sequence[str]) -> Ask:
    """The request with a loaded method and no shape of its own, and mostly without what the device cannot do."""
    params = ask.params
    speculation: dict[str, Any] = {"method": rng.choice([*methods, *methods, "none"])}
    if params.temperature:
        speculation["rule"] = rng.choice(["coupled", "coupled", "coupled", "rejection", "block"])
    changes: dict[str, Any] = {"output_kind": "cumulative"}
    if rng.random() < 0.8:
        changes |= {
            "structured_outputs": None,
            "logits_processors": (),
            "bad_words": (),
            "logprobs": params.logprobs if params.logprobs in (0, 1, 3, 5) else None,
        }
    cancel = None if ask.cancel is None else rng.choice(["group", "sample"])
    if speculation.get("rule") == "coupled":
        changes["seed"] = params.seed if params.seed is not None else rng.randint(0, 2**40)
    return replace(ask, params=params.replace(speculation=speculation, **changes), cancel=cancel)


@contextmanager
def pretended_device() -> Iterator[Counter[str]]:
    """Engines that are built inside have graphs. Gives how many rows of steps in seats there were: by method, by rule,
    and by features of requests besides (`graphs.seats.shaping`); and all "launches" and "accepted" drafts."""
    counts: Counter[str] = Counter()
    launch, finish = Seats.launch, Seats.finish

    def ops(dtype: torch.dtype, device: torch.device, *args: object, **options: object) -> TorchOps:
        return TorchOps(dtype, device, TorchStaticAttention())

    def counted(self: Seats, taking: Sequence[RowPlan]) -> Flight | None:
        flight = launch(self, taking)
        if flight is not None:
            counts["launches"] += 1
            for member, _ in flight.members:
                way = member.way
                plan = self._seating.plan_of(way.method)
                kind = "chain" if plan is None else "tree" if plan.shape is not None else "growing"
                seated = self._seating.drafters.get(way.method)
                if seated is not None and seated._drafter._loops[0].masks:
                    kind = "masks"
                counts.update([f"{way.method} {kind}", way.rule, *way.shaped])
        return flight

    def accepted(self: Seats, flight: Flight) -> Any:
        rows = finish(self, flight)
        counts["accepted"] += sum(row.num_accepted for row in rows)
        return rows

    with pytest.MonkeyPatch.context() as patch:
        for name in ("self_test", "lending", "heads.loading"):
            patch.setattr(f"draftwise.models.{name}.default_ops", ops)
        patch.setattr("draftwise.engine.device.backend_for", lambda device: FakeGraphs())
        patch.setattr(Seats, "launch", counted)
        patch.setattr(Seats, "finish", accepted)
        yield counts
