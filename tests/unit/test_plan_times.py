"""What steps take: formulas, curves, rooflines, and the best setting under limits."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest

from draftwise.errors import ConfigError
from draftwise.plan.acceptance import AcceptanceModel
from draftwise.plan.devices import DEVICES, device
from draftwise.plan.operating import OperatingPoint, Sla, best_point, operating_point, pareto, points
from draftwise.plan.roofline import Roofline
from draftwise.plan.sizes import SHAPES, ModelSizes, model_sizes
from draftwise.plan.times import Curve, Infeasible, Polynomial

LLAMA = SHAPES["llama-8b"]


def test_the_polynomials_of_the_mocker() -> None:
    times = Polynomial(10_000)
    n = 3000
    assert times.prompt_time(0, n, True) == pytest.approx((4.21e-7 * n * n + 1.518e-2 * n + 16.5) / 1000)
    u = 0.25
    assert times.target_time(2, 2, 2500) == pytest.approx((-25.74 * u * u + 54.01 * u + 5.74) / 1000)


def test_chunks_of_a_prompt_add_up() -> None:
    for times in (Polynomial(10_000), Roofline(device("h100"), LLAMA)):
        whole = times.prompt_time(0, 4000, False)
        parts = times.prompt_time(0, 1500, False) + times.prompt_time(1500, 4000, False)
        assert parts == pytest.approx(whole, rel=0.02)


def test_a_curve_between_and_beyond_its_points() -> None:
    curve = Curve([(0, 1.0), (10, 3.0)])
    assert (curve.at(5), curve.at(15), Curve([(4, 2.0)]).at(100)) == (2.0, 4.0, 2.0)


@pytest.mark.parametrize("points", [[], [(0, 1), (0, 2)], [(0, math.nan)], [(0, 1), (5, -1)]])
def test_a_curve_of_nonsense_is_refused(points: list[tuple[float, float]]) -> None:
    with pytest.raises(ConfigError):
        Curve(points)


def test_sizes_of_the_embedded_model_agree_with_its_weights() -> None:
    from safetensors import safe_open

    from draftwise.config.embedded import embedded_path

    folder = embedded_path("target")
    sizes = model_sizes(str(folder))
    total = 0
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as weights:
            shapes = [weights.get_slice(name).get_shape() for name in weights.keys()]  # noqa: SIM118
        total += sum(math.prod(shape) for shape in shapes if len(shape) == 2)  # all but norms
    assert sizes.weights == total
    assert sizes.kv_values == 12 * 2 * 2 * 64


def test_the_known_shapes_have_the_sizes_that_their_names_say() -> None:
    for name, billions in (("llama-1b", 1.24), ("llama-8b", 8.03), ("llama-70b", 70.6)):
        assert SHAPES[name].weights / 1e9 == pytest.approx(billions, rel=0.01)


def test_experts_that_are_read_grow_with_the_rows() -> None:
    sizes = ModelSizes("moe", 2, 8, 100, 8, 8, expert=10, expert_layers=2, num_experts=8, top_k=2)
    assert sizes.read(1) == pytest.approx(100 + 2 * 10 * 2)
    assert sizes.read(2) == pytest.approx(100 + 2 * 10 * 3.5)
    assert sizes.read(1000) == pytest.approx(100 + 2 * 10 * 8)
    assert sizes.active == 100 + 2 * 10 * 2


def test_a_roofline_reads_weights_once_and_computes_per_row() -> None:
    h100 = device("H100")
    times = Roofline(h100, LLAMA)
    one = times.target_time(1, 1, 0)
    assert one == pytest.approx(2 * LLAMA.dense / (3.35e12 * 0.8) + h100.overhead, rel=1e-6)
    assert times.target_time(1, 8, 0) == pytest.approx(one)  # still reading
    many = times.target_time(1000, 1000, 0)
    assert many == pytest.approx(2 * LLAMA.active * 1000 / (989e12 * 0.6) + h100.overhead, rel=1e-6)
    assert times.target_time(8, 8, 8 * 4000) > times.target_time(8, 8, 8 * 100)


def test_two_devices_are_quicker_than_one_and_hold_more() -> None:
    one, two = (Roofline(device("h100"), LLAMA, parallel=n) for n in (1, 2))
    assert two.target_time(8, 8, 8000) < one.target_time(8, 8, 8000)
    assert two.kv_tokens is not None and one.kv_tokens is not None and two.kv_tokens > 2 * one.kv_tokens


def test_what_a_device_cannot_do_is_said() -> None:
    with pytest.raises(ConfigError, match="did you mean 'h100'"):
        device("h10")
    with pytest.raises(ConfigError, match="does not compute in 'fp8'"):
        Roofline(device("a100"), LLAMA, weights="fp8")
    with pytest.raises(ConfigError, match="too little room"):
        Roofline(device("h100"), SHAPES["llama-70b"])


def test_every_device_of_the_table_decodes_a_small_model() -> None:
    for found in DEVICES.values():
        times = Roofline(found, SHAPES["llama-1b"])
        assert 0 < times.target_time(1, 1, 100) < times.target_time(1, 1, 100_000)


def test_an_operating_point_divides_the_step_by_what_is_accepted() -> None:
    times = Polynomial(100_000, draft_ms=1.0)
    acceptance = AcceptanceModel.constant((0.7, 0.5, 0.2))
    found = operating_point(times, acceptance, "model", 3, 4, 1000)
    assert found.accepted_length == pytest.approx(2.12)
    assert found.itl == pytest.approx(found.step / 2.12)
    assert found.tokens_per_second == pytest.approx(4 / found.itl)
    plain = operating_point(times, acceptance, "none", 0, 4, 1000)
    assert found.break_even == pytest.approx(found.step / plain.step - 1) and plain.break_even == 0


def test_the_best_point_keeps_to_the_limit_and_no_other_that_does_gives_more() -> None:
    times, acceptance = Polynomial(64_000), AcceptanceModel.constant()
    best = best_point(times, acceptance, Sla(itl=0.008), 1000, 100)
    assert isinstance(best, OperatingPoint) and best.itl <= 0.008
    rivals = [p for p in points(times, acceptance, 1050) if p.itl <= 0.008]
    assert best.tokens_per_second == max(p.tokens_per_second for p in rivals)


def test_impossible_limits_are_answered_with_the_nearest() -> None:
    times, acceptance = Polynomial(64_000), AcceptanceModel.constant()
    slow = best_point(times, acceptance, Sla(itl=1e-6), 1000, 100)
    assert isinstance(slow, Infeasible) and isinstance(slow.nearest, OperatingPoint)
    assert slow.nearest.itl == min(p.itl for p in points(times, acceptance, 1050))
    late = best_point(times, acceptance, Sla(ttft=1e-3), 1000, 100)
    assert isinstance(late, Infeasible) and "alone takes" in late.reason
    huge = best_point(times, acceptance, Sla(), 100_000, 100)
    assert isinstance(huge, Infeasible) and huge.nearest is None


def test_a_pareto_front_rises() -> None:
    front = pareto(list(points(Polynomial(64_000), AcceptanceModel.constant(), 1000)))
    assert len(front) > 3
    for a, b in pairwise(front):
        assert a.itl < b.itl and a.tokens_per_second < b.tokens_per_second


@pytest.mark.parametrize("limit", [0.0, -1.0, math.nan, math.inf])
def test_limits_that_are_none(limit: float) -> None:
    with pytest.raises(ConfigError):
        Sla(itl=limit)
