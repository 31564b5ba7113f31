"""The comparison with other engines: what it does with answers, good and bad, and with engines that are not there."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

PEERS = Path(__file__).parents[2] / "benchmarks" / "peers"
MODULES = ("channel", "compare", "jobs", "processes", "report")


@pytest.fixture(scope="module")
def peers() -> Iterator[Any]:
    """The modules of benchmarks/peers, which are scripts and no package."""
    sys.path.insert(0, str(PEERS))
    try:
        yield SimpleNamespace(**{name: importlib.import_module(name) for name in MODULES})
    finally:
        sys.path.remove(str(PEERS))
        for name in MODULES:
            sys.modules.pop(name, None)


# ---------------------------------------------------------------------------------------- medians and tables


def test_medians_ratios_and_the_table(peers: Any) -> None:
    samples = peers.report.Samples()
    for value in (0.050, 0.040, 0.090):
        samples.add("draftwise bf16", "1 @ 64", value)
    samples.add("openvino bf16", "1 @ 64", 0.080)
    samples.add("llamacpp bf16", "1 @ 64", 0.060)
    samples.add("openvino bf16", "8 @ 64", 0.100)
    samples.note("vllm bf16", "1 @ 64", "no such thing")
    own = ["draftwise bf16"]
    found = peers.report.compare(samples, own, lower=True)
    assert found == {
        "1 @ 64": {"ours": "draftwise bf16", "peer": "llamacpp bf16", "ratio": pytest.approx(1.2)}
    }
    text = peers.report.table(samples, own, lower=True, unit="ms", scale=1000.0)
    assert text.splitlines() == [
        "| ms | 1 @ 64 | 8 @ 64 |",
        "|---|---|---|",
        "| draftwise bf16 | 50.0 | – |",
        "| openvino bf16 | 80.0 | 100 |",
        "| llamacpp bf16 | 60.0 | – |",
        "| vllm bf16 | – | – |",
        "| best of ours against the best peer | 1.20 (llamacpp bf16) |  |",
        "",
        "vllm bf16: 1 @ 64: no such thing",
    ]


def test_rates_are_better_when_higher(peers: Any) -> None:
    samples = peers.report.Samples()
    samples.add("draftwise, plain", "T=0", 3000.0)
    samples.add("draftwise, suffix", "T=0", 9000.0)
    samples.add("openvino, plain", "T=0", 600.0)
    samples.add("openvino, ngram", "T=0", 1000.0)
    own = ["draftwise, plain", "draftwise, suffix"]
    assert peers.report.compare(samples, own, lower=False)["T=0"] == {
        "ours": "draftwise, suffix",
        "peer": "openvino, ngram",
        "ratio": pytest.approx(9.0),
    }


def test_common_prefix_and_idle_shares(peers: Any) -> None:
    assert peers.report.common_prefix([1, 2, 3], [1, 2, 4]) == 2
    assert peers.report.common_prefix([1, 2], [1, 2, 4]) == 2
    assert peers.report.common_prefix([], [1]) == 0
    assert peers.report.idle_shares({"a": 0.5, "b": 1.0}, {"a": 10.0}) == {"a": 0.05}


# ------------------------------------------------------------------------------------------------- the cells


def test_cells_and_places_of_models(peers: Any, tmp_path: Path) -> None:
    cells = peers.jobs.step_cells((64,), (1, 8), (512,))
    assert [cell.name for cell in cells] == ["1 @ 64", "8 @ 64", "prefill 512"]
    assert cells[1].question == {"do": "step", "context": 64, "rows": 8, "repeat": peers.jobs.REPEAT}
    one = peers.jobs.generate_cell("plain", 0.8, [[1, 2], [3]], 16)
    assert one.name == "plain, T=0.8, 2 at once" and one.tokens == 32
    assert peers.compare.picked([[0], [1], [2]], 1, 4) == [[1], [2], [0], [1]]
    alone = peers.compare.Runner("llamacpp", None, ("plain",))
    in_turn = peers.jobs.generate_cell("plain", 0.8, [[1, 2], [3]], 16, at_once=False)
    assert in_turn.name == "plain, T=0.8" and in_turn.tokens == 32 and alone.serves(in_turn)
    assert not alone.serves(one) and alone.serves(peers.jobs.generate_cell("plain", 0.8, [[1, 2]], 16))
    assert alone.serves(cells[0]) and peers.compare.Runner("vllm", None, ("plain",), True).serves(one)
    path = peers.jobs.model_path
    assert (
        path(tmp_path, "llamacpp", "llama-1b", "int8-weight-only") == tmp_path / "gguf" / "llama-1b-q8_0.gguf"
    )
    assert path(tmp_path, "openvino", "target") == tmp_path / "openvino" / "target-bf16"
    assert path(tmp_path, "vllm", "llama-1b") == tmp_path / "llama-1b"
    for peer in peers.jobs.PEERS.values():
        assert (PEERS / peer.adapter).is_file()


# ------------------------------------------------------------------------------------- engines that are absent


def test_a_peer_that_is_not_installed_is_skipped_with_the_reason(peers: Any, tmp_path: Path) -> None:
    find, unavailable = peers.processes.interpreter, peers.processes.Unavailable
    with pytest.raises(unavailable, match="neither --peers nor --python"):
        find("vllm", {}, None)
    with pytest.raises(unavailable, match=r"vllm is not installed .*env-vllm"):
        find("vllm", {}, str(tmp_path))
    with pytest.raises(unavailable, match="nowhere"):
        find("transformers", {"transformers": str(tmp_path / "nowhere")}, None, sys.executable)
    assert find("transformers", {}, str(tmp_path), sys.executable) == sys.executable
    assert find("vllm", {"vllm": sys.executable}, None) == sys.executable
    (tmp_path / "env-vllm" / "bin").mkdir(parents=True)
    (tmp_path / "env-vllm" / "bin" / "python").symlink_to(sys.executable)
    assert find("vllm", {}, str(tmp_path)) == str(tmp_path / "env-vllm" / "bin" / "python")
    peers.processes.check_imports(sys.executable, ["json"])
    with pytest.raises(unavailable, match="lacks no_such_engine"):
        peers.processes.check_imports(sys.executable, ["json", "no_such_engine"])


def test_a_run_without_any_peer_says_so(
    peers: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = peers.compare.parse(["passes", "--work", str(tmp_path), "--peers", str(tmp_path)])
    run = peers.compare.Run()
    load = {"model": str(tmp_path / "no-model"), "methods": ["plain"]}
    peers.compare.start(run, given, peers.jobs.PEERS["vllm"], "vllm bf16", load)
    peers.compare.start(run, given, peers.jobs.PEERS["draftwise"], "draftwise bf16", load)
    assert run.runners == [] and set(run.skipped) == {"vllm bf16", "draftwise bf16"}
    assert "prepare.py" in run.skipped["draftwise bf16"]
    peers.compare.rounds(run, given, [peers.jobs.step_cells()])
    capsys.readouterr()


# --------------------------------------------------------------------------------------------- bad answers

WORKER = """
import json, sys, time
sys.path.insert(0, {peers!r})
from channel import Engine, Generated, Unsupported, serve
class Fake(Engine):
    def load(self, load):
        print("a library's chatter")  # goes to the log, not into the answers
        return {{"fake": "1", "methods": list(load.methods)}}
    def step(self, context, rows, repeat):
        if rows == 13:
            raise RuntimeError("thirteen")
        if rows == 14:
            raise SystemExit(3)
        return [0.001 * rows] * repeat
    def generate(self, prompts, tokens, method, temperature):
        return Generated(0.5, [[7] * (tokens - (method == "short")) for _ in prompts])
serve(Fake())
"""


def worker(peers: Any, tmp_path: Path, code: str) -> Any:
    return peers.processes.Worker("fake", [sys.executable, "-c", code], tmp_path / "fake.log")


def test_a_worker_answers_fails_and_dies(peers: Any, tmp_path: Path) -> None:
    fake = worker(peers, tmp_path, WORKER.format(peers=str(PEERS)))
    try:
        assert fake.ask({"do": "load", "model": "x", "methods": ["plain"]}) == {
            "fake": "1",
            "methods": ["plain"],
        }
        assert fake.ask({"do": "step", "context": 64, "rows": 8, "repeat": 2}) == [0.008, 0.008]
        with pytest.raises(peers.channel.Unsupported, match="prefill"):
            fake.ask({"do": "prefill", "tokens": 512})
        with pytest.raises(peers.processes.AnswerError, match="RuntimeError: thirteen"):
            fake.ask({"do": "step", "context": 64, "rows": 13, "repeat": 2})
        with pytest.raises(peers.processes.PeerError, match="unknown question"):
            fake.ask({"do": "dance"})
        assert fake.ask({"do": "step", "context": 64, "rows": 1, "repeat": 1}) == [0.001]
        assert fake.cpu_seconds() > 0
        with pytest.raises(peers.processes.PeerError, match="has died") as death:
            fake.ask({"do": "step", "context": 64, "rows": 14, "repeat": 2})
        assert not isinstance(death.value, peers.processes.AnswerError)
        with pytest.raises(peers.processes.PeerError, match="has died"):
            fake.ask({"do": "step", "context": 64, "rows": 1, "repeat": 2})
    finally:
        fake.close()
    assert "a library's chatter" in (tmp_path / "fake.log").read_text()


@pytest.mark.parametrize("answer", ["garbage", "[1, 2]", '{"neither": 1}'])
def test_nonsense_is_an_error_that_quotes_it(peers: Any, tmp_path: Path, answer: str) -> None:
    fake = worker(
        peers, tmp_path, f"import sys; sys.stdin.readline(); print({answer!r}, flush=True); sys.stdin.read()"
    )
    try:
        with pytest.raises(peers.processes.PeerError, match="no answer"):
            fake.ask({"do": "load"})
    finally:
        fake.close()


def test_a_worker_that_does_not_answer_is_given_up(peers: Any, tmp_path: Path) -> None:
    fake = worker(peers, tmp_path, "import sys; sys.stdin.read()")
    try:
        with pytest.raises(peers.processes.PeerError, match=r"did not answer within 0\.05 s"):
            fake.ask({"do": "load"}, timeout=0.05)
    finally:
        fake.close()


def test_an_idle_worker_uses_no_processor(peers: Any, tmp_path: Path) -> None:
    spinning = (
        "import sys, threading\n"
        "threading.Thread(target=lambda: [0 for _ in iter(int, 1)], daemon=True).start()\n"
        "for line in sys.stdin: print('{\"ok\": 1}', flush=True)"
    )
    fake = worker(peers, tmp_path, spinning)
    try:
        assert fake.ask({"do": "load"}) == 1
        tasks = list(Path(f"/proc/{fake.pid}/task").glob("*/stat"))
        while {task.read_text().rpartition(")")[2].split()[0] for task in tasks} != {"T"}:
            pass  # the signal is on its way
        before = fake.cpu_seconds()
        for _ in range(20):
            sum(range(100_000))
        assert len(tasks) == 2 and fake.cpu_seconds() == before, "it is stopped"
        assert fake.ask({"do": "load"}) == 1, "and goes on when it is asked"
    finally:
        fake.close()


def test_a_round_takes_in_values_and_leaves_out_what_failed(
    peers: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = peers.compare.parse(["generate", "--work", str(tmp_path), "--rounds", "2"])
    run = peers.compare.Run()
    fake = worker(peers, tmp_path, WORKER.format(peers=str(PEERS)))
    run.runners.append(peers.compare.Runner("fake", fake, ("plain", "short")))
    try:
        peers.compare.rounds(run, given, [[peers.jobs.generate_cell("plain", 0.0, [[1, 2]], 10)]])
        assert run.samples.values == {"fake, plain": {"T=0": [20.0, 20.0]}}
        assert run.greedy == {("fake", "plain", 0): [7] * 10}
        two = peers.jobs.generate_cell("plain", 0.0, [[1], [2]], 10, at_once=False)
        peers.compare.ask(run, run.runners[0], two, keep=True)  # 20 tokens in twice the time
        assert run.samples.values["fake, plain"]["T=0"].pop() == 20.0
        given.seconds = 0.0  # the first round is measured all the same
        peers.compare.rounds(run, given, [[peers.jobs.generate_cell("plain", 0.0, [[1, 2]], 10)]])
        assert run.samples.values == {"fake, plain": {"T=0": [20.0] * 3}}
        with pytest.raises(peers.processes.PeerError, match=r"10 tokens were asked for, \[9\] came"):
            peers.compare.rounds(run, given, [[peers.jobs.generate_cell("short", 0.0, [[1, 2]], 10)]])
    finally:
        run.close()
    assert "round 2 of 2" in capsys.readouterr().err
