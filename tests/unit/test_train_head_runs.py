"""Training runs of heads from the command line's options to folders that the engine serves, on a target of seconds."""

from __future__ import annotations

import argparse
import json
import os
import signal
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file

from draftwise import LLM, SamplingParams
from draftwise.errors import ConfigError, DraftwiseError
from draftwise.train.demo_data import train_tokenizer
from draftwise.train.demo_export import export_model
from draftwise.train.demo_model import DemoLlama
from draftwise.train.demo_recipe import LlamaShape
from draftwise.train.heads import run as head_run
from draftwise.train.heads.args import KINDS, TrainOptions, add_arguments, options_from
from draftwise.train.heads.data import coverage, cut, draft_vocabulary, plan_epoch, split
from draftwise.train.heads.parallel import Ranks, with_ranks
from draftwise.train.heads.plot import panels_of, svg, ticks
from draftwise.train.heads.run import train_head
from draftwise.train.heads.teacher import EngineTeacher, default_feature_layers
from draftwise.train.heads.text import Document, Tokens, read_documents, tokenize

SHAPE = LlamaShape(
    vocab_size=320,
    hidden_size=32,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    intermediate_size=48,
    max_positions=128,
)
TEXT = "".join(
    f"def name_{i}(self, value):\n    if value is None:\n        return {i}\n    return self.items[{i * 7 % 13}]\n\n"
    for i in range(60)
)


@pytest.fixture(autouse=True)
def _plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTWISE_KERNELS", "torch")
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    model = DemoLlama(SHAPE, seed=0)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():  # output projections start at zero: give every layer something to say
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.15)
    export_model(model, train_tokenizer([TEXT], 320), folder, dtype="float32")
    return folder


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("text") / "code.txt"
    file.write_text(TEXT, encoding="utf-8")
    return file


def options(kind: str, target: Path, text: Path | None, out: Path, **more: Any) -> TrainOptions:
    base = TrainOptions(
        kind=kind,
        target=str(target),
        out=out,
        data=(text,) if text is not None else (),
        steps=4,
        batch_size=2,
        max_length=64,
        dtype="float32",
        evaluate_every=2,
        draft_vocab_size=200,
    )
    return replace(base, **more)


def quietly() -> Console:
    return Console(file=StringIO())


def greedy(target: Path, out: Path | None, method: str) -> list[int]:
    spec: dict[str, Any] = {"method": "ngram"}
    if out is not None:
        spec = {"method": method, "model": str(out), "num_speculative_tokens": 3}
    with LLM(
        str(target),
        dtype="float32",
        max_model_len=96,
        num_kv_blocks=32,
        speculative_config=spec,
        speculation_control="static",
    ) as llm:
        (answer,) = llm.generate([TEXT[:60]], SamplingParams(temperature=0, max_tokens=16))
        if out is not None:
            assert answer.metrics.speculation.num_draft_tokens > 0
        return list(answer.outputs[0].token_ids)


@pytest.mark.parametrize("kind", list(KINDS))
def test_every_kind_trains_and_serves(kind: str, target: Path, text: Path, tmp_path: Path) -> None:
    record = train_head(options(kind, target, text, tmp_path / "out"), quietly())
    out = tmp_path / "out"
    assert json.loads((out / "provenance.json").read_text())["recipe"] == json.loads(
        json.dumps(record["recipe"])
    )
    measured = record["measured"]["text"][kind]
    assert 1 <= measured["greedy_length"] <= 1 + len(measured["greedy"])
    ElementTree.parse(out / "training.svg") if (out / "training.svg").exists() else (
        out / "training.png"
    ).stat()
    method = "draft_model" if kind == "draft" else kind
    assert greedy(target, out, method) == greedy(target, None, method)


def test_an_interrupted_run_ends_in_the_same_bits(
    target: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train_head(options("eagle3", target, text, tmp_path / "whole"), quietly())

    def interrupt(self: Any, trainer: Any, seen: Any) -> None:
        if trainer.state.step == 2:
            os.kill(os.getpid(), signal.SIGINT)

    again = options("eagle3", target, text, tmp_path / "parts")
    with monkeypatch.context() as patch:
        patch.setattr(head_run.Monitor, "report", interrupt)
        with pytest.raises(KeyboardInterrupt):
            train_head(again, quietly())
    with pytest.raises(ConfigError, match="--resume"):
        train_head(again, quietly())
    train_head(replace(again, resume=True), quietly())
    whole, parts = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "parts"))
    assert whole.keys() == parts.keys()
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    for more, says in (
        ({"steps": 5}, "steps 4, not 5"),
        ({"steps": 0, "budget_minutes": 1.0}, "budget-minutes 0.0, not 1.0"),
        ({"muon_lr": 0.1}, "muon-lr 0.02, not 0.1"),
        ({"seed": 3, "stride": 2}, "seed 0, not 3; stride 1, not 2"),
        ({"batch_size": 1}, "texts per step 2, not 1"),
    ):
        with pytest.raises(ConfigError, match=says):
            train_head(replace(again, resume=True, **more), quietly())  # type: ignore[arg-type]
    train_head(replace(again, resume=True, batch_size=1, accumulate=2), quietly())
    other = tmp_path / "other.txt"
    other.write_text(TEXT[200:], encoding="utf-8")
    with pytest.raises(ConfigError, match="data"):
        train_head(replace(again, resume=True, data=(other,)), quietly())


def test_a_run_that_came_apart_is_no_head(target: Path, text: Path, tmp_path: Path) -> None:
    with pytest.raises(DraftwiseError, match="muon-lr"):
        train_head(options("mtp", target, text, tmp_path / "out", muon_lr=1e30, adam_lr=1e30), quietly())
    assert not list((tmp_path / "out").glob("*.safetensors"))


def _fails(rank: int, address: str) -> None:
    os._exit(3)


def test_a_process_that_ends_before_it_joins_is_named() -> None:
    """Not waited for: for a day, deaf to Ctrl-C."""
    with pytest.raises(DraftwiseError, match="training process 1 of 2 failed"):
        with_ranks(2, "cpu", lambda ranks: None, _fails)


@pytest.mark.parametrize(("name", "value"), [("WORLD_SIZE", "foo"), ("WORLD_SIZE", "0"), ("RANK", "-1")])
def test_an_environment_that_torchrun_never_sets(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    for variable, good in (("WORLD_SIZE", "2"), ("RANK", "0")):
        monkeypatch.setenv(variable, good)
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=f"{name}={value}: expected an integer"):
        with_ranks(1, "cpu", lambda ranks: None, _fails)


def test_a_memorised_text_is_accepted(target: Path, tmp_path: Path) -> None:
    short = tmp_path / "short.txt"
    short.write_text(TEXT[:160], encoding="utf-8")
    asked = options("mtp", target, short, tmp_path / "out", steps=150, evaluate_every=150, unrolls=3)
    record = train_head(asked, quietly())
    assert record["measured"]["text"]["mtp"]["greedy"][0] >= 0.95


def test_own_text_is_made_once_and_learned(target: Path, text: Path, tmp_path: Path) -> None:
    asked = options("medusa", target, text, tmp_path / "out", own_text=3, steps=2)
    record = train_head(asked, quietly())
    file = tmp_path / "out" / "work" / "own-text.json"
    rows = json.loads(file.read_text())["rows"]
    assert len(rows) == 3 and all(len(row) == 64 for row in rows)
    plain = train_head(replace(asked, own_text=0, out=tmp_path / "plain"), quietly())
    assert record["text_tokens"]["train"] == plain["text_tokens"]["train"] + 3 * 64

    written = file.stat().st_mtime_ns
    again = replace(asked, out=tmp_path / "again", work=tmp_path / "out" / "work", resume=True)
    train_head(again, quietly())
    assert file.stat().st_mtime_ns == written
    # Less is asked for: what lies there is no answer to that.
    less = replace(asked, own_text=2, out=tmp_path / "less", work=tmp_path / "out" / "work")
    for stale in file.parent.glob("*"):
        if stale != file:
            stale.unlink()
    assert train_head(less, quietly())["text_tokens"]["train"] == plain["text_tokens"]["train"] + 2 * 64


def write_shard(target: Path, file: Path, ids: list[int], layers: tuple[int, ...] = (1, 2, 4)) -> None:
    teacher = EngineTeacher(target, layers, torch.float32, torch.device("cpu"))
    states = teacher.teach([ids]).features.view(len(ids), len(layers), -1)
    file.parent.mkdir(exist_ok=True)
    tensors = {"token_ids": torch.tensor(ids), "hidden_states": states.contiguous()}
    save_file(tensors, file, metadata={"layers": json.dumps(list(layers))})


def test_shards_teach_what_the_target_would(target: Path, tmp_path: Path) -> None:
    ids = [3 * i % 300 + 5 for i in range(120)]
    write_shard(target, tmp_path / "shards" / "a.safetensors", ids)
    document = tmp_path / "none.txt"
    layers = (1, 2)
    from_shards = options(
        "eagle3", target, None, tmp_path / "s", shards=tmp_path / "shards", feature_layers=layers
    )
    record = train_head(from_shards, quietly())
    teacher = EngineTeacher(target, layers, torch.float32, torch.device("cpu"))
    pieces = split(cut([Tokens(ids, [True] * len(ids))], 64), 0.05)
    shards = head_run._source(from_shards, teacher, Ranks())[0]
    direct = head_run.TextSource(pieces, teacher, 2, 8)
    recipe = head_run.recipe_of(from_shards)
    one, two = shards.batch(0, recipe), direct.batch(0, recipe)
    assert torch.equal(one.ids, two.ids)
    torch.testing.assert_close(one.hidden, two.hidden, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(one.features, two.features)
    torch.testing.assert_close(one.probs, two.probs, rtol=1e-3, atol=1e-6)
    assert record["feature_layers"] == [1, 2] and not document.exists()


def damage(file: Path, what: str, target: Path) -> None:
    if what == "empty":
        file.write_bytes(b"")
    elif what == "truncated":
        file.write_bytes(file.read_bytes()[:-200])
    elif what == "missing":
        save_file({"token_ids": torch.arange(20)}, file, metadata={"layers": "[1, 2, 4]"})
    elif what == "no tokens":
        states = torch.zeros(0, 3, 32)
        save_file({"token_ids": torch.zeros(0, dtype=torch.int64), "hidden_states": states}, file)
    elif what == "another target":
        save_file({"token_ids": torch.arange(20), "hidden_states": torch.zeros(20, 3, 48)}, file)
    elif what == "layers":
        write_shard(target, file, list(range(20)), (1, 2, 3))


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("empty", "empty"),
        ("truncated", "truncated"),
        ("missing", "hidden_states is missing"),
        ("no tokens", "no tokens"),
        ("another target", "hidden size 48"),
        ("layers", "training needs"),
    ],
)
def test_a_bad_shard_is_named(what: str, says: str, target: Path, tmp_path: Path) -> None:
    folder = tmp_path / "shards"
    write_shard(target, folder / "a.safetensors", list(range(40)))
    write_shard(target, folder / "b.safetensors", list(range(40)))
    damage(folder / "b.safetensors", what, target)
    asked = options("eagle3", target, None, tmp_path / "out", shards=folder, feature_layers=(1, 2))
    with pytest.raises(ConfigError, match=says) as error:
        train_head(asked, quietly())
    assert "b.safetensors" in str(error.value)


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"data": ()}, "--data"),
        ({"shards": Path("x")}, "--data"),
        ({"steps": 0}, "--steps"),
        ({"budget_minutes": 1.0}, "--steps"),
        ({"batch_size": 0}, "--batch-size"),
        ({"decay": 0.0}, "--decay"),
        ({"heldout_share": 1.0}, "--heldout-share"),
        ({"feature_layers": (1, 9)}, "--feature-layers"),
        ({"data": (Path("nowhere.txt"),)}, "nowhere.txt"),
        ({"steps": 0, "budget_minutes": -3.0}, "--budget-minutes"),
        ({"steps": 0, "budget_minutes": float("nan")}, "--budget-minutes"),
        ({"muon_lr": float("nan")}, "--muon-lr"),
        ({"weight_decay": -1.0}, "--weight-decay"),
        ({"seed": -1}, "--seed"),
        ({"threads": -1}, "--threads"),
        ({"own_text": -4}, "--own-text"),
        ({"intermediate_size": -5}, "--intermediate-size"),
        ({"hidden_size": -64}, "--hidden-size"),
        ({"out": Path(__file__)}, "--out"),
        ({"out": Path(__file__, "below")}, "--out"),
        ({"work": Path("/dev/null/work")}, "--work"),
    ],
)
def test_bad_options_are_named(
    more: dict[str, Any], says: str, target: Path, text: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=says):
        train_head(replace(options("eagle3", target, text, tmp_path), **more), quietly())


def test_text_files(tmp_path: Path) -> None:
    lines = [
        {"text": "plain"},
        {"prompt": "ask", "completion": "answer"},
        {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
    ]
    file = tmp_path / "all.jsonl"
    # A line of JSON may hold separators of lines that are not "\n", as they are.
    written = [json.dumps(line) for line in lines] + ['{"text": "a\u2028b\x85c"}']
    file.write_text("\n".join(written) + "\n", encoding="utf-8")
    found = list(read_documents([file]))
    assert [d.parts for d in found] == [
        (("plain", True),),
        (("ask", False), ("answer", True)),
        (),
        (("a\u2028b\x85c", True),),
    ]
    assert [m["role"] for m in found[2].messages] == ["user", "assistant"]
    for name, content, says in (
        ("a.jsonl", '{"text": "x"}\n{"texts": 1}\n', "a.jsonl:2"),
        ("b.jsonl", "{", "not JSON"),
        ("c.txt", " \n", "empty"),
    ):
        (tmp_path / name).write_text(content)
        with pytest.raises(ConfigError, match=says):
            list(read_documents([tmp_path / name]))


class _Words:
    """A tokenizer of words, with a chat template."""

    chat_template = "yes"

    def __call__(self, text: str, add_special_tokens: bool) -> dict[str, list[int]]:
        words = [sum(map(ord, word)) % 97 for word in text.split()]
        return {"input_ids": [99, *words] if add_special_tokens else words}

    def apply_chat_template(self, messages: Any, tokenize: bool, add_generation_prompt: bool) -> str:
        shown = " ".join(f"<{m['role']}> {m['content']} </>" for m in messages)
        return shown + (" <assistant>" if add_generation_prompt else "")


class _Pairs:
    """A tokenizer of letters, of which ":\n" is one token; its template adds nothing."""

    chat_template = "yes"

    def __call__(self, text: str, add_special_tokens: bool) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) for letter in text.replace(":\n", "_")]}

    def apply_chat_template(self, messages: Any, tokenize: bool, add_generation_prompt: bool) -> str:
        return "".join(m["content"] for m in messages)


def test_answers_count_and_questions_do_not() -> None:
    words = _Words()
    tokens = tokenize(Document((("a b", False), ("c", True)), "x"), words)
    assert tokens.ids[0] == 99 and tokens.counted == [False, False, False, True]
    chat = tuple(
        {"role": role, "content": said}
        for role, said in (("user", "q r"), ("assistant", "s"), ("user", "t"), ("assistant", "u v"))
    )
    tokens = tokenize(Document((), "x", chat), words)
    # <user> q r </> <assistant> | s </> | <user> t </> <assistant> | u v </>
    assert tokens.counted == [False] * 5 + [True] * 2 + [False] * 4 + [True] * 3
    pairs = _Pairs()  # "a:" and "\nb" are two tokens, and three where they touch: "a", ":\n", "b"
    chat = ({"role": "user", "content": "a:"}, {"role": "assistant", "content": "\nb"})
    tokens = tokenize(Document((), "x", (*chat, *chat)), pairs)
    assert tokens.ids == [*map(ord, "a:"), *map(ord, "\nba:"), *map(ord, "\nb")]
    assert tokens.counted == [False, False, True, True, False, False, True, True]
    words.chat_template = ""
    with pytest.raises(ConfigError, match="chat template"):
        tokenize(Document((), "x", chat), words)


def test_pieces_and_their_order() -> None:
    pieces = cut([Tokens(list(range(1300)), [True] * 1300), Tokens([1, 2], [True] * 2)], 512)
    assert [len(p.ids) for p in pieces] == [512, 512, 276]
    parts = split(pieces, 0.2)
    assert len(parts.train) + len(parts.heldout) == 3 and parts.heldout
    one = split(pieces[:1], 0.2)
    assert one.train == one.heldout == pieces[:1]
    with pytest.raises(ConfigError, match="no text"):
        split([], 0.1)
    batches = plan_epoch([5, 9, 5, 9, 7], 2, seed=1, epoch=0)
    assert sorted(i for b in batches for i in b) == [0, 1, 2, 3, 4]
    assert batches == plan_epoch([5, 9, 5, 9, 7], 2, seed=1, epoch=0)
    said = [Tokens([5, 5, 3, 9], [True, True, True, False])]
    assert draft_vocabulary(said, 10, 2).tolist() == [3, 5]
    assert coverage(said, torch.tensor([5])) == pytest.approx(2 / 3)
    assert default_feature_layers(12) == (2, 6, 9) and default_feature_layers(4) == (1, 2)


def test_command_line_and_plot() -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser, "eagle3")
    more = ["--unrolls", "2"]
    args = parser.parse_args(
        ["--data", "a.txt", "--out", "o", "--steps", "5", "--feature-layers", "1,2", *more]
    )
    asked = options_from(args, "eagle3")
    assert asked.data == (Path("a.txt"),) and asked.feature_layers == (1, 2) and asked.unrolls == 2
    numbers = {"loss": 2.0, "greedy_length": 1.5, "sampled_length": 1.2}
    history = [{"step": s, "text": {"mtp": numbers}} for s in (10, 20)]
    ElementTree.fromstring(svg(panels_of(history)))
    assert ticks(0.13, 0.92) == [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
