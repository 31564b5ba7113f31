"""Recurrent state: snapshots behind tokens that may be taken back, and modules that go on from them."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from tests.fakes.tree_model import draft_row
from torch import Tensor, nn

from draftwise.errors import ModelLoadError
from draftwise.kernels.torch_ops import TorchOps
from draftwise.kv.states import StateLost, StateSpec, StateStore, most_sequences
from draftwise.models.general.carried import (
    ArgumentUnit,
    AttributeUnit,
    CacheUnit,
    StateView,
    running,
)
from draftwise.models.general.finding import find_units
from draftwise.models.general.hoisting import Ends
from draftwise.models.general.modules import exchange
from draftwise.models.general.recurrence import Recurrence
from draftwise.models.inputs import RowInput, build_step_input
from draftwise.propose.models.carried import CarriedStates

CPU = torch.device("cpu")
SPEC = StateSpec((((3,), torch.float32), ((2, 2), torch.bfloat16)))


def store(slots: int = 2, snapshots: int = 3) -> StateStore:
    return StateStore(SPEC, slots, snapshots, CPU)


def test_a_request_goes_on_behind_any_token_that_could_be_taken_back() -> None:
    states = store()
    assert states.begin(0, 0, 8, 8) == (None, (0,))
    assert states.begin(0, 8, 9, 11) == (
        0,
        (0, 1, 2),
    )  # the root's state takes the place of what it came from
    assert [states.holds(0, n) for n in (8, 9, 10, 11)] == [False, True, True, True]
    assert states.begin(0, 10, 11, 11) == (1, (0,))
    assert not states.holds(0, 9) and not states.holds(0, 10)
    with pytest.raises(StateLost, match=r"behind 9 tokens is kept, only behind \[11\]"):
        states.begin(0, 9, 10, 10)
    assert states.holds(0, 11)  # nothing has changed


def test_a_drafter_reads_its_drafts_one_by_one() -> None:
    states = store()
    assert states.begin(1, 0, 8, 8) == (None, (3,))
    assert states.begin(1, 8, 8, 9) == (3, (4,))
    assert states.begin(1, 9, 8, 10) == (4, (5,))
    assert all(states.holds(1, n) for n in (8, 9, 10))
    with pytest.raises(StateLost, match="3 tokens may be taken back; there is room for 2"):
        states.begin(1, 10, 8, 11)
    assert states.begin(1, 8, 9, 9) == (3, (3,))


def test_who_begins_takes_over_the_slot() -> None:
    states = store()
    states.begin(0, 0, 8, 8)
    assert states.begin(0, 0, 4, 4) == (None, (0,))
    assert not states.holds(0, 8) and states.holds(0, 4) and states.holds(0, 0)


def test_a_drafter_does_not_go_on_from_the_state_of_a_request_that_left() -> None:
    carried = CarriedStates(SPEC, 1, 2, CPU)
    carried.store.begin(carried.slot(0), context=0, final=32, end=32)
    rows = [draft_row(8, rid=rid, tokens=range(33)) for rid in (0, 1)]
    for row in rows:
        row.filled = 32  # of the second: another request's blocks
    assert carried.known(rows[0]) == 32
    carried.remove(0)
    assert carried.known(rows[1]) == 0


def test_memory() -> None:
    assert SPEC.num_bytes == 12 + 8
    assert store().nbytes == StateStore.bytes_of(SPEC, 2, 3) == 6 * 20
    assert sum(t.numel() * t.element_size() for t in store().tensors) == 120
    assert most_sequences(SPEC, 3, 59, 64) == 1 and most_sequences(SPEC, 3, 180, 64) == 3
    assert most_sequences(SPEC, 3, 10**9, 64) == 64


class Adds(nn.Module):
    """Its state is the sum of all rows so far, and it answers with that, as Transformers' modules do it."""

    def __init__(self, goes_on: bool = True) -> None:
        super().__init__()
        self.goes_on = goes_on
        self.calls: list[tuple[int, int]] = []

    def forward(self, x: Tensor, cache_params: Any = None, scale: float = 1.0) -> tuple[Tensor, Tensor]:
        self.calls.append((x.shape[0], x.shape[1]))
        before = None if cache_params is None else cache_params.get_recurrent_state(0)
        sums = x.cumsum(1)
        if before is not None and (self.goes_on or x.shape[1] == 1):
            sums = sums + before[:, None]
        if cache_params is not None:
            if before is not None and x.shape[1] == 1:
                before += x[:, 0]  # in place, without a word, as fused kernels do
            else:
                cache_params.update_recurrent_state(sums[:, -1].clone(), 0)
        return sums * scale, x.new_zeros(x.shape[0], 7)


class Holder(nn.Module):
    def __init__(self, inner: Adds) -> None:
        super().__init__()
        self.inner, self.other = inner, nn.Linear(3, 3)

    def forward(self, x: Tensor, past_key_values: Any = None) -> Tensor:
        """Hands its cache on and does not look into it."""
        out: Tensor = self.inner(x, past_key_values, scale=2.0)[0]
        return out


def found(goes_on: bool = True) -> tuple[Holder, CacheUnit]:
    model = Holder(Adds(goes_on))
    (unit,) = find_units(model, lambda: model(torch.randn(1, 13, 3)))
    assert isinstance(unit, CacheUnit)
    model.inner.calls.clear()
    return model, unit


def test_units_are_found_by_what_they_do() -> None:
    model, unit = found()
    assert unit.module is model.inner and unit.keys == (("recurrent", 0, 0),) and unit.chunks
    assert unit.tensors == (((3,), torch.float32),) and unit.answers == ((0,), 2)
    assert not found(goes_on=False)[1].chunks
    x = torch.randn(1, 5, 3)
    torch.testing.assert_close(model(x), x.cumsum(1) * 2)  # by itself it is as it was
    torch.testing.assert_close(Holder(Adds())(x), x.cumsum(1) * 2)


class Odd(Adds):
    """``looks``: whether it looks at an argument that has no row per token."""

    def __init__(self, looks: bool) -> None:
        super().__init__()
        self.looks = looks

    def forward(self, x: Tensor, cache_params: Any = None, scale: Any = 1.0) -> Any:
        return super().forward(x, cache_params, float(scale.sum()) if self.looks else 3.0)


def test_a_tensor_without_rows_is_refused_if_it_is_looked_at() -> None:
    """Masks of attention are handed to all layers alike."""
    mask = torch.ones(1, 1, 13, 13)
    with pytest.raises(ModelLoadError, match=r"given a tensor \(1, 1, 13, 13\), not a row per token"):
        find_units(odd := Odd(True), lambda: odd(torch.randn(1, 13, 3), scale=mask))
    (unit,) = find_units(model := Odd(False), lambda: model(torch.randn(1, 13, 3), scale=mask))
    assert unit.ignored == {"scale"}
    batch = build_step_input([RowInput([0] * 13, 0, np.arange(4, dtype=np.int32), state_slot=0)], 16, CPU)
    x = torch.randn(1, 13, 3)
    with running(Recurrence(batch, StateStore(StateSpec(unit.tensors), 1, 2, CPU)).part(None)):
        torch.testing.assert_close(model(x, scale=mask)[0], x.cumsum(1) * 3)


class Keeps(nn.Module):
    """Keeps its state to itself, and can compute tokens of one request alone."""

    def __init__(self) -> None:
        super().__init__()
        self.sums: Tensor | None = None

    def forward(self, x: Tensor, use_cache: bool = False) -> Tensor:
        before = x.new_zeros(x.shape[0], x.shape[2]) if self.sums is None else self.sums[:1]
        sums = x.cumsum(1) + before[:, None]
        self.sums = sums[:, -1] if use_cache else None
        return sums


class Hands(nn.Module):
    """Hands its state on; all layers' stand in one tensor, as those of RWKV."""

    def __init__(self, layer: int) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, state: Any = None, use_cache: bool = False) -> tuple[Tensor, Any]:
        before = x.new_zeros(x.shape[0], x.shape[2]) if state is None else state[0][..., self.layer] - 1
        sums = x.cumsum(1) + before[:, None]
        if use_cache:
            state[0][..., self.layer] = sums[:, -1] + 1
        return sums, state


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.keeps = Keeps()
        self.layers = nn.ModuleList(Hands(i) for i in range(2))

    def forward(self, x: Tensor, begin: bool = False) -> Tensor:
        x = self.keeps(x)
        state = [torch.ones(1, 3, 2)] if begin else None
        for layer in self.layers:
            x, state = layer(x, state, use_cache=begin)
        return x


def test_states_in_attributes_and_in_arguments() -> None:
    model = Stack()
    units = find_units(model, lambda: model(torch.randn(1, 13, 3), begin=True))
    assert [type(unit) for unit in units] == [AttributeUnit, ArgumentUnit, ArgumentUnit]
    assert [unit.batches for unit in units] == [False, True, True]
    assert [unit.first for unit in units] == [0, 1, 2]
    assert model.keeps.sums is None
    states = StateStore(StateSpec(tuple(t for unit in units for t in unit.tensors)), 2, 3, CPU)
    table = np.arange(4, dtype=np.int32)
    whole = [torch.randn(9, 3), torch.randn(9, 3)]
    wanted = [x.cumsum(0).cumsum(0).cumsum(0) for x in whole]
    places = [0, 0]
    for counts, drafts in (((4, 3), 0), ((2, 3), 2), ((1, 1), 0), ((2, 3), 0)):
        rows, fed = [], []
        for slot, count in enumerate(counts):
            at = places[slot]
            rows.append(RowInput([0] * count, at, table, state_slot=slot, revocable=min(drafts, count)))
            fed.append(whole[slot][at : at + count])
        with running(Recurrence(build_step_input(rows, 16, CPU), states).part(None)):
            found = model(torch.cat(fed)[None])[0].split(counts)
        for slot, count in enumerate(counts):
            at = places[slot]
            torch.testing.assert_close(found[slot], wanted[slot][at : at + count], rtol=1e-4, atol=1e-4)
            places[slot] += count - min(drafts, count)


@pytest.mark.parametrize("goes_on", [True, False])
def test_ragged_passes_equal_whole_sequences(goes_on: bool) -> None:
    """Requests in chunks, with drafts of which some stay: each row answers with the sum of its own request's tokens."""
    model, unit = found(goes_on)
    states = StateStore(StateSpec(unit.tensors), 3, 5, CPU)
    rng = random.Random(0)
    kept: list[list[Tensor]] = [[], [], []]
    for _ in range(60):
        rows, fed, wanted = [], [], []
        for slot in sorted(rng.sample(range(3), rng.randint(1, 3))):
            if rng.random() < 0.1:
                kept[slot].clear()  # another request takes over
            drafts = rng.randint(0, 4)
            new = [torch.randn(3) for _ in range(rng.randint(1, 4) + drafts)]
            table = np.arange(40, dtype=np.int32)
            context = len(kept[slot])
            rows.append(RowInput([0] * len(new), context, table, state_slot=slot, revocable=drafts))
            fed += new
            wanted.append(torch.stack(kept[slot] + new).cumsum(0)[context:] * 2)
            kept[slot] += new[: len(new) - rng.randint(0, drafts)]
        batch = build_step_input(rows, 16, CPU)
        with running(Recurrence(batch, states).part(None)):
            answer = model(torch.stack(fed)[None])
        torch.testing.assert_close(answer[0], torch.cat(wanted), rtol=1e-4, atol=1e-4)


def test_what_is_computed_in_one_call() -> None:
    model, unit = found()
    states = StateStore(StateSpec(unit.tensors), 4, 3, CPU)
    table = np.arange(4, dtype=np.int32)

    def calls(*rows: tuple[int, int, int, int]) -> list[tuple[int, int]]:
        model.inner.calls.clear()
        inputs = [RowInput([0] * n, context, table, state_slot=s, revocable=d) for s, n, context, d in rows]
        with running(Recurrence(build_step_input(inputs, 16, CPU), states).part(None)):
            model(torch.randn(1, sum(n for _, n, _, _ in rows), 3))
        return list(model.inner.calls)

    assert calls((0, 6, 0, 0), (1, 1, 0, 0)) == [(1, 6), (1, 1)]  # who begins is alone
    # a chunk by itself; roots and first drafts of two requests together; the second draft of one
    assert calls((0, 4, 6, 0), (1, 3, 1, 2)) == [(1, 4), (1, 1), (1, 1), (1, 1)]
    assert calls((0, 2, 10, 1), (1, 3, 2, 2)) == [(2, 1), (2, 1), (1, 1)]
    assert calls((1, 1, 4, 0)) == [(1, 1)]
    with pytest.raises(AssertionError, match="no trees"):
        tree = RowInput([0] * 3, 5, table, parents=(-1, -1), state_slot=1, revocable=2)
        Recurrence(build_step_input([tree], 16, CPU), states)
    with pytest.raises(StateLost):
        calls((2, 1, 4, 0))


def test_the_state_of_a_convolution_is_its_last_inputs() -> None:
    view = StateView()
    assert view.get_conv_state(0) is None and not view.has_previous_state(0)
    x = torch.arange(1.0, 3).view(1, 1, 2)
    assert view.update_conv_state(x, 0, conv_kernel_size=4).tolist() == [[[0, 0, 1, 2]]]
    again = StateView(view.states)
    assert again.has_previous_state() and not again.is_recording_past(0)
    seen = again.update_conv_state(torch.arange(3.0, 6).view(1, 1, 3), 0, conv_kernel_size=4)
    assert seen.tolist() == [[[0, 0, 1, 2, 3, 4, 5]]]
    assert again.states["conv", 0, 0].tolist() == [[[2, 3, 4, 5]]]
    long = StateView()
    assert long.update_conv_state(torch.arange(5.0).view(1, 1, 5), 0, conv_kernel_size=3).shape[-1] == 5
    assert long.states["conv", 0, 0].tolist() == [[[2, 3, 4]]]


class Mixes(nn.Module):
    """As most modules with a state: linear layers at both ends, and a sum over tokens between them."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8, bias=False)
        self.inner, self.last = nn.Linear(8, 8), nn.Linear(8, 6)

    def forward(self, x: Tensor, cache_params: Any = None) -> Tensor:
        mixed = self.inner(self.one(x) * 0.5) + self.two(x)
        before = None if cache_params is None else cache_params.get_recurrent_state(3)
        sums = mixed.cumsum(1) if before is None else mixed.cumsum(1) + before[:, None]
        if cache_params is not None:
            cache_params.update_recurrent_state(sums[:, -1], 3)
        out: Tensor = self.last(sums.transpose(1, 2).contiguous().transpose(1, 2))
        return out


class CountingOps(TorchOps):
    def __init__(self) -> None:
        super().__init__(torch.float32, CPU)
        self.rows: list[int] = []

    def linear(self, x: Tensor, weight: Any, out: Tensor | None = None) -> Tensor:
        self.rows.append(len(x))
        return super().linear(x, weight, out)


@torch.inference_mode()
def test_linear_layers_at_the_ends_are_computed_for_all_rows_at_once() -> None:
    model = nn.Sequential(mixes := Mixes())
    x = torch.randn(1, 9, 8)
    wanted = model(x)
    (unit,) = find_units(model, lambda: model(torch.randn(1, 13, 8)))
    assert unit.ends == Ends(("one", "two"), "last")
    ops = CountingOps()
    exchange(model, [mixes.one, mixes.two, mixes.inner, mixes.last], ops, None)
    states = StateStore(StateSpec(unit.tensors), 1, 5, CPU)
    found = []
    for at, end, drafts in ((0, 4, 0), (4, 9, 4)):
        row = RowInput([0] * (end - at), at, np.arange(4, dtype=np.int32), state_slot=0, revocable=drafts)
        ops.rows.clear()
        with running(Recurrence(build_step_input([row], 16, CPU), states).part(None)):
            found.append(model(x[:, at:end]))
    torch.testing.assert_close(torch.cat(found, 1), wanted, rtol=1e-4, atol=1e-4)
    assert sorted(ops.rows) == [1] * 5 + [5] * 3  # only the inner one is asked row by row
    torch.testing.assert_close(model(x), wanted, rtol=1e-4, atol=1e-4)  # and is as ever without a runner
