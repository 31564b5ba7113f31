"""Simulated engines and clusters: real scheduler, cache, controller; time is a number."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftwise.errors import ConfigError
from draftwise.plan.acceptance import AcceptanceModel, Chances
from draftwise.plan.capacity import ModelCapacity
from draftwise.plan.operating import Sla
from draftwise.plan.planner import Planner, PlannerConfig
from draftwise.plan.times import Polynomial
from draftwise.plan.traces import Trace, make_trace, poisson_trace
from draftwise.simulate.cluster import Cluster
from draftwise.simulate.engine import EngineSettings, Policy, SimulatedEngine, prompt_tokens
from draftwise.simulate.executor import Clock, _Rest
from draftwise.simulate.outcome import Outcome
from draftwise.simulate.settings import ClusterSettings, Failure

ACCEPTANCE = AcceptanceModel.constant((0.7, 0.5, 0.2))


def run(trace: Trace, policy: Policy | None = None, *, tokens: int = 100_000, **more: object) -> Outcome:
    engine = more.pop("engine", EngineSettings())
    settings = more.pop("settings", None)
    cluster = Cluster(
        trace,
        Polynomial(tokens),
        ACCEPTANCE,
        policy or Policy(),
        engine,
        settings,
        **more,  # type: ignore[arg-type]
    )
    return cluster.run()


@pytest.mark.parametrize(
    ("block_size", "drafts"),
    [
        (16, 3),
        (64, 0),
        pytest.param(16, 0, marks=pytest.mark.slow),
        pytest.param(64, 3, marks=pytest.mark.slow),
    ],
)
def test_200_requests_in_500_blocks_give_exactly_20_000_tokens(drafts: int, block_size: int) -> None:
    """planner.md's anchor; then the engine is idle."""
    trace = make_trace([0.0] * 200, [1000] * 200, [100] * 200)
    settings = EngineSettings(num_kv_blocks=500, block_size=block_size)
    policy = Policy("model", drafts) if drafts else Policy()
    found = run(trace, policy, tokens=500 * block_size, engine=settings)
    assert (found.tokens, found.num_ended) == (20_000, 200)
    if drafts:
        assert found.accepted_length == pytest.approx(2.12, abs=0.04)


def test_an_engine_that_is_done_is_idle_and_holds_nothing() -> None:
    engine = SimulatedEngine(
        Polynomial(8000), ACCEPTANCE, Policy("model", 3), EngineSettings(num_kv_blocks=500)
    )
    for rid in range(5):
        engine.add(rid, prompt_tokens(100, rid), 20, 0.0)
    done = 0
    while engine.core.has_work:
        done += sum(u.finished for u in engine.step(engine.clock.now))
        engine.core.check_integrity()
    assert done == 5 and engine.kv.num_used == 0


def test_a_single_request_takes_what_the_times_say() -> None:
    times = Polynomial(100_000)
    found = run(make_trace([2.0], [500], [3]))
    first = times.prompt_time(0, 500, True)
    second = times.target_time(1, 1, 500) + times.target_time(1, 1, 501)
    assert found.ttft_np[0] == pytest.approx(first)
    assert found.e2e_np[0] == pytest.approx(first + second) and found.itl_np[0] == pytest.approx(second / 2)


def test_who_comes_at_the_same_moment_is_read_in_the_same_step() -> None:
    times = Polynomial(100_000)
    found = run(make_trace([2.0] * 3, [500] * 3, [2] * 3))
    step = times.prompt_time(0, 500, True) + 2 * times.prompt_time(0, 500, False)
    assert found.ttft_np == pytest.approx(step) and found.num_steps == 2


def test_the_same_seed_gives_the_same_run_and_another_one_another() -> None:
    trace = poisson_trace(5, 20, 200, 50, spread=0.5)
    a, b, c = (run(trace, Policy("model", 3, adaptive=True), seed=seed) for seed in (1, 1, 2))
    assert a.as_dict() == b.as_dict() and a.as_dict() != c.as_dict()


def test_drafts_make_it_quicker_where_they_are_accepted_and_the_controller_leaves_them_where_not() -> None:
    trace = poisson_trace(3, 40, 200, 100)
    plain, fixed = run(trace), run(trace, Policy("model", 3))
    assert fixed.itl_np.mean() < 0.7 * plain.itl_np.mean()
    hopeless = AcceptanceModel.constant((0.0,))
    times = Polynomial(100_000, draft_ms=5.0)

    def under(policy: Policy) -> float:
        return float(Cluster(trace, times, hopeless, policy, EngineSettings()).run().itl_np.mean())

    slow, adaptive, none = (
        under(Policy("model", 3)),
        under(Policy("model", 3, adaptive=True)),
        under(Policy()),
    )
    assert slow > 1.5 * none and adaptive < 1.1 * none


def test_pools_decode_what_was_read_elsewhere_after_the_transfer() -> None:
    trace = make_trace([0.0], [1000], [10])
    settings = ClusterSettings(prefill=1, decode=1, bandwidth=1e9, kv_bytes=1e6, latency=0.5)
    found = run(trace, settings=settings)
    whole = run(trace)
    assert found.ttft_np[0] == pytest.approx(whole.ttft_np[0])
    # 1000 tokens of 1 MB at 1 GB/s and the latency: 1.5 s; 8 tokens behind the last full block are read again.
    assert found.e2e_np[0] - whole.e2e_np[0] == pytest.approx(1.5, abs=0.05)
    assert found.tokens == 10


def test_everybody_is_served_by_pools_under_load_and_with_little_cache() -> None:
    trace = poisson_trace(10, 20, 300, 60, spread=0.7)
    settings = ClusterSettings(prefill=1, decode=2)
    found = run(trace, Policy("model", 3), tokens=6000, settings=settings)
    assert found.num_ended == len(trace) and found.tokens == int(trace.osl_np.sum())


def test_a_failed_replica_loses_no_request_and_no_token() -> None:
    trace = poisson_trace(6, 30, 200, 80)
    failures = (Failure(5.0, 0, 10.0), Failure(12.0, 1, 3.0), Failure(13.0, 0, 1.0))
    found = run(trace, Policy("model", 3), settings=ClusterSettings(replicas=2, failures=failures))
    assert found.num_ended == len(trace) and found.tokens == int(trace.osl_np.sum())
    assert found.num_moved > 0
    quiet = run(trace, Policy("model", 3), settings=ClusterSettings(replicas=2))
    assert found.e2e_np.mean() > quiet.e2e_np.mean()


@pytest.mark.parametrize("examples", [12, pytest.param(40, marks=pytest.mark.slow)])
def test_whatever_happens_every_token_is_delivered_once(examples: int) -> None:
    given(st.data())(settings(max_examples=examples)(everything_is_delivered))()


def everything_is_delivered(data: st.DataObject) -> None:
    """Little caches, failures, pools, routers, a planner that starts and drains replicas: all requests end with all
    their tokens, or are refused because no engine could ever serve them; times are in order; the same seed does the
    same."""
    draw = data.draw
    count = draw(st.integers(1, 25))
    lengths = st.lists(st.integers(1, 400), min_size=count, max_size=count)
    blocks = draw(
        st.none() | st.lists(st.lists(st.integers(0, 3), max_size=1), min_size=count, max_size=count)
    )
    times = draw(st.lists(st.floats(0, 20), min_size=count, max_size=count))
    trace = make_trace(times, draw(lengths), draw(lengths), blocks=blocks)
    pooled, planned = draw(st.booleans()), draw(st.booleans())
    cluster = ClusterSettings(
        replicas=draw(st.integers(1, 3)),
        prefill=2 if pooled else 0,
        decode=2 if pooled else 0,
        router=draw(st.sampled_from(["load", "prefix", "round_robin"])),
        startup=draw(st.floats(0, 5)),
        bandwidth=1e6,
        kv_bytes=draw(st.floats(0, 1e4)),
        failures=tuple(
            Failure(draw(st.floats(0, 30)), draw(st.integers(0, 3)) if pooled else 0, draw(st.floats(0, 9)))
            for _ in range(draw(st.integers(0, 4)))
        ),
    )
    sizes = EngineSettings(
        max_num_seqs=draw(st.integers(1, 16)),
        max_num_batched_tokens=draw(st.integers(16, 300)),
        num_kv_blocks=draw(st.integers(4, 60)),
        prefix_caching=draw(st.booleans()),
    )
    policy = draw(st.sampled_from([Policy(), Policy("model", 3), Policy("model", 5, adaptive=True)]))

    def once() -> Outcome:
        capacity = ModelCapacity(Polynomial(2000), ACCEPTANCE, Sla(), most_requests=8)
        config = PlannerConfig(interval=3.0, mode="pools" if pooled else "engines", budget=6, hold=1)
        planner = Planner(config, capacity) if planned else None
        found = Cluster(trace, Polynomial(2000), ACCEPTANCE, policy, sizes, cluster, planner=planner, seed=1)
        return found.run()

    found = once()
    assert found.num_ended + found.num_refused == count
    room = sizes.num_kv_blocks * sizes.block_size  # type: ignore[operator]
    assert found.num_refused <= int((trace.isl_np + trace.osl_np - 1 > room).sum())
    served = np.isfinite(found.e2e_np)
    assert (found.ttft_np[served] > 0).all() and (found.ttft_np[served] <= found.e2e_np[served]).all()
    assert found.device_seconds > 0 or not served.any()
    assert once().as_dict() == found.as_dict()


def test_a_failure_of_nobody_is_refused() -> None:
    with pytest.raises(ConfigError, match="no replica 2"):
        run(make_trace([0.0], [10], [10]), settings=ClusterSettings(replicas=2, failures=(Failure(1.0, 2),)))


def test_a_cluster_that_fails_whole_goes_on_when_it_is_back() -> None:
    trace = make_trace([0.0, 1.0], [100, 100], [200, 50])
    found = run(trace, settings=ClusterSettings(failures=(Failure(0.5, 0, 20.0),)))
    assert found.num_ended == 2 and (found.e2e_np > 19).all()
    assert found.ttft_np[0] < 0.5 < 19 < found.ttft_np[1]  # the first one's user had tokens before


def test_a_request_that_fits_nowhere_is_refused_and_said() -> None:
    found = run(make_trace([0.0, 0.0], [5000, 100], [10, 10]), tokens=2000)
    assert (found.num_refused, found.num_ended) == (1, 1) and "KV cache" in (found.refused or "")


def test_the_router_that_knows_prefixes_finds_them() -> None:
    times, isl, osl, blocks = [], [], [], []
    for i in range(60):
        times.append(i * 0.25)
        isl.append(4 * 512 + 40)
        osl.append(20)
        blocks.append([100 * (i % 15) + j for j in range(4)])  # fifteen conversations over four replicas
    trace = make_trace(times, isl, osl, blocks=blocks)
    by = {
        name: run(trace, settings=ClusterSettings(replicas=4, router=name))
        for name in ("prefix", "round_robin")
    }
    assert by["prefix"].ttft_np.mean() < 0.75 * by["round_robin"].ttft_np.mean()


def test_a_planner_follows_the_load_up_and_down() -> None:
    up = poisson_trace(12, 300, 500, 60, shape="peak")
    times, sla = Polynomial(30_000), Sla(ttft=1.0, itl=0.03)
    planner = Planner(
        PlannerConfig(interval=5, budget=6, hold=3), ModelCapacity(times, ACCEPTANCE, sla, most_requests=64)
    )
    settings = ClusterSettings(replicas=1, startup=5, sla=sla)
    found = Cluster(
        up, times, ACCEPTANCE, Policy("model", 3), EngineSettings(max_num_seqs=64), settings, planner=planner
    ).run()
    counts = [m.replicas["engines"] for m in found.moments]
    assert found.num_ended == len(up)
    assert counts[0] == 1 and max(counts) >= 2 and counts[-1] < max(counts) and max(counts) <= 6
    most = max(counts) * found.seconds
    assert found.device_seconds < 0.9 * most


@pytest.mark.parametrize("seconds", [math.nan, math.inf, 1e300, 0.0])
def test_times_that_are_none_end_the_run_with_a_line(seconds: float) -> None:
    class Broken(Polynomial):
        def target_time(self, requests: int, rows: int, context: int, sampled: bool = False) -> float:
            return seconds

    with pytest.raises(ConfigError, match=re.escape(f"a step takes {seconds}")):
        Cluster(make_trace([0.0], [10], [10]), Broken(1000), ACCEPTANCE, Policy(), EngineSettings()).run()


def test_prompts_share_what_their_blocks_say() -> None:
    a, b = prompt_tokens(5, 1, (8, 9), 2), prompt_tokens(5, 2, (8, 9), 2)
    assert a[:4].tolist() == [8, 8, 9, 9] == b[:4].tolist() and a[4] != b[4]
    assert not np.array_equal(prompt_tokens(5, 1), prompt_tokens(5, 2))


@pytest.mark.parametrize(
    "wrong",
    [
        {"prefill": 1},
        {"replicas": 0},
        {"startup": math.nan},
        {"bandwidth": 0.0},
        {"failures": (Failure(-1.0, 0),)},
    ],
)
def test_clusters_that_cannot_be(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        ClusterSettings(**wrong)  # type: ignore[arg-type]


class Scattered(Polynomial):
    """One step in four takes four times as long as the others; drafters read prompts; the step after one is slow."""

    step_factors: Sequence[float] = (4 / 7, 4 / 7, 4 / 7, 16 / 7)
    behind = 0.125

    def reading_time(self, method: str, start: int, end: int) -> float:
        return (end - start) / 1000


def test_single_steps_scatter_and_their_mean_stays() -> None:
    trace = make_trace([0.0], [200], [2001])
    flat = run(trace)
    times = Scattered(100_000)
    found = Cluster(trace, times, ACCEPTANCE, Policy(), EngineSettings()).run()
    assert found.itl_np[0] == pytest.approx(flat.itl_np[0], rel=0.1)
    short = make_trace([60.0 * i for i in range(80)], [200] * 80, [3] * 80)
    spread = Cluster(short, times, ACCEPTANCE, Policy(), EngineSettings()).run().itl_np
    assert spread.max() > 2 * spread.min() and run(short).itl_np.std() < 1e-6


def test_a_drafter_reads_the_prompt_before_its_first_drafts_and_the_step_behind_is_slower() -> None:
    trace = make_trace([0.0], [200], [3])
    times = Scattered(100_000)
    times.step_factors = ()
    plain = Cluster(trace, times, ACCEPTANCE, Policy(), EngineSettings()).run()
    read = Cluster(trace, times, ACCEPTANCE, Policy("model", 1), EngineSettings()).run()
    assert read.ttft_np[0] - plain.ttft_np[0] == pytest.approx(0.2 + times.draft_time("model", 1, 1))
    assert plain.e2e_np[0] - run(trace).e2e_np[0] == pytest.approx(0.125)


class Rested(Polynomial):
    """After a second without work the first step takes twice as long, and the next half second 1.5 times."""

    rests = ((0.0, 2.0), (0.5, 1.5))
    pause = 1.0


def test_an_engine_that_rested_is_slow_at_first() -> None:
    trace = make_trace([0.0, 30.0, 30.1], [200] * 3, [400] * 3)
    plain = run(trace)
    found = Cluster(trace, Rested(100_000), ACCEPTANCE, Policy(), EngineSettings()).run()
    assert found.ttft_np[0] == pytest.approx(plain.ttft_np[0])  # it begins warm
    assert found.itl_np[0] == pytest.approx(plain.itl_np[0])
    assert found.ttft_np[1] == pytest.approx(2 * plain.ttft_np[1])
    # Half a second of work took 1.5 times as long: a third of it is lost.
    later = found.e2e_np[1] - plain.e2e_np[1] - plain.ttft_np[1]
    assert later == pytest.approx(0.5 / 3, rel=0.25)


def test_a_short_rest_counts_for_its_share_and_adds_to_the_one_before() -> None:
    clock = Clock()
    rest = _Rest(Rested.rests, Rested.pause)
    rest.ended(clock(), 10.0)
    assert rest.factor(0.0) == 1.0
    assert rest.factor(0.25) == 1.25  # a quarter of a second
    rest.ended(0.35, 0.1)
    assert rest.factor(0.35) == 1.125  # of the half that is left of it
    rest.ended(0.35, 0.1)
    assert rest.factor(0.60) == pytest.approx(1 + (0.125 + 0.25))  # what was left, and a quarter more
    rest.ended(0.60, 0.6)
    assert rest.factor(0.60) == 1.0
    assert rest.factor(9.0) == 2.0


def test_look_ups_draft_in_their_share_of_the_steps() -> None:
    trace = make_trace([0.0], [200], [3001])
    found, all_steps = (
        Cluster(trace, Polynomial(100_000), model, Policy("model", 3), EngineSettings()).run()
        for model in (AcceptanceModel(ACCEPTANCE.rates, {"": {"model": (0.3, 0.3, 0.1)}}), ACCEPTANCE)
    )
    assert found.num_proposals / found.num_steps == pytest.approx(0.3, abs=0.04)
    assert found.num_drafts / found.num_proposals == pytest.approx(0.7 / 0.3, abs=0.15)
    expected = 1 + 0.3 * 0.7 + 0.3 * 0.35 + 0.1 * 0.07
    assert 3000 / found.num_steps == pytest.approx(expected, abs=0.05)
    assert all_steps.num_proposals > 0.98 * all_steps.num_steps


def test_acceptance_changes_while_a_request_grows() -> None:
    parts = [Chances((0.95,), (), 100.0), Chances((0.0,), (), 1600.0)]
    model = AcceptanceModel({"": {"model": (0.5,)}}, contexts={"": {"model": parts}})
    trace = make_trace([0.0, 900.0], [100, 500], [200, 200])  # 400 tokens are the border
    found = Cluster(trace, Polynomial(100_000), model, Policy("model", 3), EngineSettings()).run()
    assert found.itl_np[1] > 3 * found.itl_np[0]
    both = Cluster(
        make_trace([0.0], [300], [201]), Polynomial(100_000), model, Policy("model", 3), EngineSettings()
    ).run()
    assert found.itl_np[0] < both.itl_np[0] < found.itl_np[1]
