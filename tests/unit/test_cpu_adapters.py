"""Low-rank additions in recorded passes: each row gets what its adapter's products, called one by one, would add."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.native import forced_isa, native_or_skip
from torch import Tensor

from draftwise.kernels.additions import Addition, AdditionSite, Up
from draftwise.kernels.cpu.adapters import NativeAdditions
from draftwise.kernels.cpu.library import Isa
from draftwise.kernels.cpu.ops import NativeOps
from draftwise.kernels.cpu.pool import ThreadPool
from draftwise.kernels.cpu.program import Program
from draftwise.kernels.cpu.recording import Recording
from draftwise.models.inputs import RowInput, build_step_input
from draftwise.types import StepInput

INPUTS, OUTPUTS = 96, 112  # a half of the outputs is no whole vector of 16
ADAPTERS = {3: 4, 7: 20, 12: 1}
"""Their ranks."""


@pytest.fixture(params=list(Isa), ids=lambda isa: isa.name.lower(), autouse=True)
def isa(request: pytest.FixtureRequest) -> Iterator[Isa]:
    with forced_isa(request.param):
        yield request.param


class World:
    """A layer gate | up, a second one behind it, and adapters of both: 7 adds at the second alone, 12 at the first."""

    def __init__(self, dtype: torch.dtype, threads: int) -> None:
        self.ops = ops = NativeOps(native_or_skip(), ThreadPool(native_or_skip(), threads), dtype)
        self._generator = torch.Generator().manual_seed(7)
        self.first = ops.pack_gate_up(self.random(OUTPUTS, INPUTS))
        self.second = ops.pack_linear(self.random(INPUTS, OUTPUTS // 2))
        self.head = ops.pack_linear(torch.eye(INPUTS).to(dtype))
        halves = slice(0, OUTPUTS // 2), slice(OUTPUTS // 2, OUTPUTS)
        sites = [
            AdditionSite(INPUTS, OUTPUTS, tuple(enumerate(halves))),
            AdditionSite(OUTPUTS // 2, INPUTS, ((0, slice(0, INPUTS)),)),
        ]
        found = ops.pack_additions(sites)
        assert isinstance(found, NativeAdditions)
        self.additions = found
        self.of: dict[int, list[Addition | None]] = {}
        for number, rank in ADAPTERS.items():
            self.of[number] = [
                None if number == 7 else self._addition(INPUTS, halves, rank),
                None if number == 12 else self._addition(OUTPUTS // 2, (slice(16, INPUTS),), rank),
            ]
            found.put(number, self.of[number])

    def random(self, *shape: int) -> Tensor:
        return (torch.randn(*shape, generator=self._generator) / shape[-1] ** 0.5).to(self.ops.dtype)

    def _addition(self, inputs: int, parts: tuple[slice, ...], rank: int) -> Addition:
        ups = [
            Up(i, slice(i * rank, (i + 1) * rank), part, self.random(part.stop - part.start, rank))
            for i, part in enumerate(parts)
        ]
        return Addition(self.random(rank * len(parts), inputs), tuple(ups))

    def program(self, adapted: bool = True) -> Program:
        recording = Recording(self.ops.dtype, feature_size=INPUTS)
        assert recording.features is not None
        ops, x = self.ops, recording.features
        wide = ops.linear(x, self.first)
        if adapted:
            ops.add_low_rank(x, wide, self.additions, 0)
        middle = ops.silu_mul(wide)
        out = ops.linear(middle, self.second)
        if adapted:
            ops.add_low_rank(middle, out, self.additions, 1)
        # a copy is added to what the layer made, as to a residual stream
        hidden = ops.add(out, ops.copy(x))
        logits = ops.logits(recording.pick(hidden), self.head)
        return recording.finish(ops.library, ops.pool, hidden, {}, logits)

    def one_by_one(self, x: Tensor, numbers: list[int], counts: list[int]) -> Tensor:
        """Request by request, and the silu of gate and up from a layer of one, which a plain program fuses."""
        rows = []
        for part, number in zip(x.split(counts), numbers, strict=True):
            wide = self._added(part, self.ops.linear(part, self.first), number, 0)
            middle = self.silu_mul(wide)
            out = self._added(middle, self.ops.linear(middle, self.second), number, 1)
            rows.append(part + out)
        return torch.cat(rows)

    def silu_mul(self, wide: Tensor) -> Tensor:
        """With a fused product by the identity."""
        recording = Recording(self.ops.dtype, feature_size=OUTPUTS)
        assert recording.features is not None
        same = self.ops.pack_gate_up(torch.eye(OUTPUTS).to(self.ops.dtype))
        narrow = self.ops.pack_linear(torch.eye(OUTPUTS // 2).to(self.ops.dtype))
        hidden = self.ops.silu_mul(self.ops.linear(recording.features, same))
        logits = self.ops.logits(recording.pick(hidden), narrow)
        program = recording.finish(self.ops.library, self.ops.pool, hidden, {}, logits)
        return program.run(batch([len(wide)]), 0, wide).hidden

    def _added(self, x: Tensor, out: Tensor, number: int, site: int) -> Tensor:
        addition = None if number == 0 else self.of[number][site]
        if addition is None:
            return out
        pack = self.ops.pack_exact
        low = self.ops.linear(x, pack(addition.down))
        for up in addition.ups:
            out[:, up.outputs] += self.ops.linear(low[:, up.low].contiguous(), pack(up.weight))
        return out


def batch(counts: list[int], adapters: list[int] | None = None) -> StepInput:
    table = np.arange(1, 200, dtype=np.int32)
    found = build_step_input([RowInput([1] * n, 0, table) for n in counts], 4, torch.device("cpu"))
    return found if adapters is None else replace(found, adapters=tuple(adapters))


CASES = [
    ([1], [3]),
    ([5], [7]),
    ([1, 1, 1, 1], [3, 3, 0, 3]),  # neighbours are one product
    ([2, 3, 1, 4, 1], [12, 0, 7, 3, 7]),
    ([40, 1, 70, 2], [3, 7, 3, 0]),  # many rows are cut
    ([1] * 9, [3, 7, 12] * 3),
    # without rows, as a chunk of a prompt is where a pass goes on with the head's rows
    ([2, 0, 3, 1], [3, 12, 12, 12]),
    ([0, 1, 0, 2, 0], [7, 3, 12, 3, 12]),
]


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@torch.inference_mode()
def test_rows_get_what_their_adapters_add(dtype: torch.dtype, threads: int) -> None:
    world = World(dtype, threads)
    adapted, plain = world.program(), world.program(adapted=False)
    for counts, numbers in CASES:
        x = world.random(sum(counts), INPUTS)
        found = adapted.run(batch(counts, numbers), 0, x).hidden
        assert torch.equal(found, world.one_by_one(x, numbers, counts)), (counts, numbers)
        bare = plain.run(batch(counts), 0, x).hidden
        starts = np.cumsum([0, *counts])
        for number, start, end in zip(numbers, starts[:-1], starts[1:], strict=True):
            same = torch.equal(found[start:end], bare[start:end])
            none = number == 0 or start == end
            assert same == none, "rows without an adapter keep their bits, and others do not"
        assert torch.equal(adapted.run(batch(counts), 0, x).hidden, bare), "nobody has one"


@torch.inference_mode()
def test_rows_of_the_head_alone() -> None:
    """Behind the last attention a pass goes on with these; adapters follow them."""
    world = World(torch.bfloat16, 2)
    counts, numbers = [3, 2, 4], [3, 0, 12]
    x = world.random(sum(counts), INPUTS)
    rows = np.array([2, 4, 8])
    whole = world.program().run(batch(counts, numbers), rows, x)
    assert whole.logits is not None
    assert torch.equal(whole.logits, whole.hidden[torch.from_numpy(rows)].float())


@torch.inference_mode()
def test_adapters_that_do_not_fit_or_are_not_there() -> None:
    world = World(torch.float32, 1)
    program, x = world.program(), world.random(2, INPUTS)
    with pytest.raises(ValueError, match="do not fit together"):
        program.run(batch([2], [5]), 0, x)
    with pytest.raises(ValueError, match="do not fit together"):
        world.additions.put(3, world.of[3])
    swapped = [world.of[3][1], world.of[3][0]]
    with pytest.raises(ValueError, match="do not fit together"):
        world.additions.put(5, swapped)
    world.additions.drop(3)
    with pytest.raises(ValueError, match="do not fit together"):
        program.run(batch([2], [3]), 0, x)
    world.additions.put(3, world.of[7])
    assert program.run(batch([2], [3]), 0, x).hidden.shape == x.shape
