"""The demo recipe at a size of seconds, and the models that ship."""

from __future__ import annotations

import json
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
import torch
from rich.console import Console

from draftwise.cli import main
from draftwise.train import demo
from draftwise.train.acceptance import measure_acceptance
from draftwise.train.demo_args import options_from
from draftwise.train.demo_export import CHAT_TEMPLATE, export_model
from draftwise.train.demo_model import DemoLlama
from draftwise.train.demo_optim import orthogonalize
from draftwise.train.demo_recipe import (
    DemoRecipe,
    LlamaShape,
    RunOptions,
    Schedule,
    recipe_from_json,
    recipe_to_json,
)
from draftwise.train.demo_trainer import Trainer

transformers = pytest.importorskip("transformers")
ASSETS = Path(__file__).parents[2] / "src/draftwise/assets/demo"
SHAPE = LlamaShape(
    vocab_size=320,
    hidden_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    intermediate_size=48,
    max_positions=64,
)
RECIPE = DemoRecipe(
    target=SHAPE,
    draft=replace(SHAPE, num_layers=1),
    batch_windows=2,
    joint=Schedule(3, 2, 1),
    long_steps=1,
    distil=Schedule(2, 1, 1),
)


@pytest.fixture(autouse=True)
def _few_threads() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("library")
    body = "def f_{i}(self, value):\n    if value is None:\n        return {i}\n    return self.items[value]\n\n\n"
    for i in range(90):
        (root / f"module_{i}.py").write_text(body.replace("{i}", str(i)) * 4)
    return root


def _train(work: Path, library: Path, **options: object) -> Trainer:
    run = RunOptions(work, root=library, compile=False, **options)  # type: ignore[arg-type]
    trainer, _ = demo.train(RECIPE, run, Console(file=StringIO()))
    return trainer


def test_interrupted_run_ends_in_the_same_weights(tmp_path: Path, library: Path) -> None:
    whole = _train(tmp_path / "whole", library)
    assert whole.state.stage == "done"
    _train(tmp_path / "parts", library, stop_after=2)
    _train(tmp_path / "parts", library, stop_after=2, resume=True)
    parts = _train(tmp_path / "parts", library, resume=True)
    assert parts.state.stage == "done"
    assert parts.state.tokens == whole.state.tokens == 3 * 2 * 64
    for model in ("target", "draft"):
        ours, theirs = getattr(whole, model).state_dict(), getattr(parts, model).state_dict()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_time_budget_fixes_a_schedule_that_repeats_as_steps(tmp_path: Path, library: Path) -> None:
    recipe = replace(RECIPE, joint=Schedule(0, 0, 1), long_steps=0, distil=Schedule(0, 0, 1))
    options = RunOptions(
        tmp_path / "timed", root=library, compile=False, joint_minutes=0.01, distil_minutes=0.005
    )
    timed, _ = demo.train(recipe, options, Console(file=StringIO()))
    assert timed.recipe.joint.steps > timed.recipe.joint.decay_steps > 0
    fixed = replace(options, work=tmp_path / "fixed", joint_minutes=0.0, distil_minutes=0.0)
    again, _ = demo.train(recipe_from_json(recipe_to_json(timed.recipe)), fixed, Console(file=StringIO()))
    for name, tensor in timed.draft.state_dict().items():
        assert torch.equal(tensor, again.draft.state_dict()[name])


def test_command_line_runs_and_exports(
    tmp_path: Path, library: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "source.json"
    source.write_text(json.dumps({"recipe": recipe_to_json(RECIPE)}))
    real = demo.measure
    monkeypatch.setattr(demo, "measure", lambda trainer, tokenizer: real(trainer, tokenizer, 2, 4))
    argv = ["--out", str(tmp_path / "out"), "--root", str(library), "--recipe", str(source), "--no-compile"]
    assert demo.main(argv) == 0
    assert "mean_acceptance_length" in capsys.readouterr().out
    record = json.loads((tmp_path / "out/target/provenance.json").read_text())
    assert recipe_from_json(record["recipe"]) == RECIPE
    assert record["target_tokens"] == 3 * 2 * 64
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out/draft")
    assert model.num_parameters() == sum(p.numel() for p in DemoLlama(RECIPE.draft, 0).parameters())


def test_steps_and_budget_become_schedules(tmp_path: Path) -> None:
    import argparse

    parser = argparse.ArgumentParser()
    demo.add_arguments(parser)
    recipe, options = options_from(parser.parse_args(["--out", str(tmp_path), "--steps", "100"]))
    assert recipe.joint.steps == 100
    assert recipe.joint.decay_steps == 45
    assert recipe.distil.steps == 25
    assert options.work == tmp_path / "work"
    recipe, options = options_from(parser.parse_args(["--out", str(tmp_path), "--budget-minutes", "10"]))
    assert recipe.joint.steps == 0
    assert options.joint_minutes + options.distil_minutes < 10


@pytest.mark.parametrize("command", ["demo", "demo-heads"])
@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--steps", "-1"], "--steps"),
        (["--budget-minutes", "nan"], "--budget-minutes"),
        (["--seed", "-1"], "--seed"),
        (["--threads", "-2"], "--threads"),
        (["--root", "/nowhere"], "--root /nowhere"),
        (["--out", "/dev/null/out"], "--out /dev/null/out"),
        (["--work", "/dev/null/work"], "--work /dev/null/work"),
    ],
)
def test_bad_options_are_named(
    command: str, more: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(["train", command, "--out", str(tmp_path / "out"), *more]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("content", [None, "{", "[]", '{"recipe": {}}', '{"recipe": {"target": 1}}'])
def test_a_recipe_that_is_none(
    content: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if content is not None:
        (tmp_path / "recipe.json").write_text(content)
    asked = ["train", "demo", "--out", str(tmp_path / "out"), "--recipe", str(tmp_path / "recipe.json")]
    assert main.main(asked) == 2
    assert "--recipe" in capsys.readouterr().err


def test_exported_logits_equal_transformers(tmp_path: Path, library: Path) -> None:
    trainer = _train(tmp_path / "work", library)
    _, tokenizer = demo.train(RECIPE, replace(trainer.options, resume=True), Console(file=StringIO()))
    export_model(trainer.target, tokenizer, tmp_path / "model", dtype="float32")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert model.dtype == torch.float32
    ids = torch.randint(0, SHAPE.vocab_size, (3, 50), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        ours, theirs = trainer.target(ids, dtype=torch.float32), model(ids).logits
    assert torch.allclose(ours, theirs, atol=1e-4)
    loaded = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")
    text = "def f(self):\n    return  {'é': 1}\n"
    assert loaded.decode(loaded(text)["input_ids"]) == text
    assert loaded.chat_template == CHAT_TEMPLATE
    assert loaded.eos_token_id == 0


def test_schedule_warms_up_holds_and_ends_at_zero() -> None:
    schedule = Schedule(steps=100, decay_steps=40, warmup_steps=10)
    factors = [schedule.factor(step) for step in range(101)]
    assert factors[0] == pytest.approx(0.1)
    assert factors[10:60] == [1.0] * 50
    assert factors[80] == pytest.approx(0.5)
    assert factors[100] == 0.0


@pytest.mark.parametrize("size", [(24, 64), (64, 24), (32, 32)])
def test_orthogonalize_brings_singular_values_near_one(size: tuple[int, int]) -> None:
    stack = torch.randn(3, *size, generator=torch.Generator().manual_seed(1))
    values = torch.linalg.svdvals(orthogonalize(stack))
    assert values.min() > 0.3
    assert values.max() < 1.5


def test_acceptance_of_equal_models_is_full_and_of_strangers_is_low() -> None:
    model = DemoLlama(SHAPE, 0)
    prompts = [[5, 6, 7], [8, 9]]

    def sharp(ids: torch.Tensor) -> torch.Tensor:
        return model(ids, dtype=torch.float32) * 20

    def stranger(ids: torch.Tensor) -> torch.Tensor:
        return sharp(ids).roll(1, -1)

    for temperature in (0.0, 0.8):
        same = measure_acceptance(sharp, sharp, prompts, num_tokens=12, temperature=temperature, eos_id=-1)
        assert same.mean_length == pytest.approx(5)
        other = measure_acceptance(
            sharp, stranger, prompts, num_tokens=12, temperature=temperature, eos_id=-1
        )
        assert other.mean_length < 2


@pytest.mark.parametrize(("name", "limit"), [("target", 20_000_000), ("draft", 4_000_000)])
def test_shipped_models(name: str, limit: int) -> None:
    folder = ASSETS / name
    assert (folder / "model.safetensors").stat().st_size < limit
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert model.dtype == torch.bfloat16
    assert model.config.vocab_size == len(tokenizer) == 4096
    ids = tokenizer("def main(argv=None):\n    parser = argparse.", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        logits = model(ids).logits.float()
    assert torch.isfinite(logits).all()
    assert logits.std() > 0.1
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"]
    assert config["torch_dtype"] == "bfloat16"
    assert "date" in json.loads((folder / "provenance.json").read_text())


def test_shipped_models_share_their_tokenizer() -> None:
    files = [(ASSETS / name / "tokenizer.json").read_bytes() for name in ("target", "draft")]
    assert files[0] == files[1]


def test_the_shipped_chat_template_is_the_recipes_and_writes_code_below_code() -> None:
    messages = [
        {"role": "user", "content": "def add(a, b):\n\n"},
        {"role": "assistant", "content": "    return a + b"},
        {"role": "user", "content": "def sub(a, b):"},
    ]
    for name in ("target", "draft"):
        assert (ASSETS / name / "chat_template.jinja").read_text(encoding="utf-8") == CHAT_TEMPLATE
        tokenizer = transformers.AutoTokenizer.from_pretrained(ASSETS / name)
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert text == "def add(a, b):\n    return a + b\ndef sub(a, b):"
