"""Training of block drafters: what is trained is what the engine drafts from; several processes and parts of a batch
learn what one learns; a text known by heart is accepted."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests.fakes.head_target import TOKENS, Target
from tests.unit.test_train_head_runs import options, quietly, target, text, write_shard
from tests.unit.test_train_heads import CPU, SHAPE, TARGET_CONFIG, batch_of, captured, shaken
from torch import Tensor

from draftwise import LLM, SamplingParams
from draftwise.errors import ConfigError
from draftwise.kernels.torch_ops import TorchOps
from draftwise.kv.storage import KVStorage
from draftwise.models.heads.base import HeadModel
from draftwise.models.heads.block import BLOCK, CONTEXT, BlockHead
from draftwise.models.heads.loading import load_block
from draftwise.models.inputs import RowInput, build_step_input
from draftwise.train.heads.batch import random_rows
from draftwise.train.heads.block import BlockDrafter, BlockForm
from draftwise.train.heads.build import choose_mask_token, least_used
from draftwise.train.heads.export import export_head
from draftwise.train.heads.losses import Distillation
from draftwise.train.heads.parallel import choose_device
from draftwise.train.heads.run import train_head
from draftwise.train.heads.teacher import default_block_layers
from draftwise.train.heads.text import Tokens

__all__ = ["target", "text"]
LAYERS = (1, 2, 5)
K = 4
FORMS = {
    "dflash": BlockForm(2, K, 60),
    "jetspec": BlockForm(1, K, 60, causal=True),
    "dspark": BlockForm(2, K, 60, from_root=True, markov_rank=6, confidence=True),
    "gated": BlockForm(1, K, 60, from_root=True, markov_kind="gated", markov_rank=6),
    "rnn": BlockForm(1, K, 60, from_root=True, markov_kind="rnn", markov_rank=6, confidence=True),
}


@pytest.fixture(autouse=True)
def _plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTWISE_KERNELS", "torch")
    torch.set_num_threads(1)


def make(form: BlockForm, own: Target, draft_ids: Tensor | None = None) -> Any:
    generator = torch.Generator().manual_seed(5)
    matrices = own.embedding, own.output
    return shaken(BlockDrafter(SHAPE, form, *matrices, generator, num_features=3, draft_ids=draft_ids))


def engine_logits(head: HeadModel, own: Target, row: int) -> list[Tensor]:
    """What the engine computes for the drafts behind tokens 0..row+1, along the text."""
    assert isinstance(head, BlockHead)
    table = np.arange(8, dtype=np.int32)
    kv = KVStorage(head.kv_layout(), 8, 4, torch.float32, CPU)
    known = row + 2
    output: Any = SimpleNamespace(captured=dict(zip(LAYERS, captured(own), strict=True)))
    features = head.combine(output, slice(0, known - 1))
    tokens = own.tokens[1:known]
    batch = build_step_input([RowInput(tokens, 1, table, first_key=1)], 4, CPU, position_offset=-1)
    head.forward(batch, features, kv, CONTEXT)
    masks = K - 1 if head.from_root else K
    block = [own.tokens[known - 1], *(head.options.mask_token,) * masks]
    batch = build_step_input([RowInput(block, known, table, first_key=1)], 4, CPU, position_offset=-1)
    rows = list(range(K)) if head.from_root else list(range(1, K + 1))
    nothing = features.new_empty((len(block), head.feature_size))
    out, logits = head.forward_logits(batch, nothing, kv, rows, BLOCK)
    state, found = None, []
    for i, at in enumerate(rows):
        part = logits[i : i + 1]
        if head.correction is not None:
            before = torch.tensor([own.tokens[known - 1 + i]])
            part, state = head.correction.correct(part, before, out.hidden[at : at + 1], state, i)
        found.append(part[0])
    return found


@pytest.mark.parametrize("name", [*FORMS, "draft vocabulary"])
def test_training_computes_what_the_engine_drafts(name: str, tmp_path: Path) -> None:
    own = Target(TorchOps(torch.float32, CPU), layers=5)
    ids = torch.arange(0, 61, 3) if name == "draft vocabulary" else None
    form = FORMS.get(name, FORMS["dspark"])
    trained = make(form, own, ids)
    export_head(trained, tmp_path, TARGET_CONFIG, feature_layers=LAYERS, dtype=torch.float32)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["speculators_model_type"] == ("dspark" if form.markov_rank else "dflash")
    with torch.inference_mode():
        head = load_block(own.context("dflash", str(tmp_path)))
        assert isinstance(head, BlockHead) and head.max_drafts == K and head.feature_layers == LAYERS
        if ids is not None:
            assert head.target_ids is not None and head.target_ids.tolist() == ids.tolist()
        rows = torch.tensor([0, 1, 7, 13])
        ours = list(trained.predictions(batch_of(own), rows, K))
        for m, row in enumerate(rows.tolist()):
            for i, logits in enumerate(engine_logits(head, own, row)):
                torch.testing.assert_close(ours[i][0, m], logits, rtol=2e-4, atol=2e-4)


def test_what_comes_behind_is_not_seen() -> None:
    """Neither features from the anchor on nor, but for the Markov head's own token, tokens behind it."""
    own = Target(TorchOps(torch.float32, CPU), layers=5)
    trained, batch = make(FORMS["dflash"], own), batch_of(own)
    rows = torch.tensor([6])
    before = torch.stack(list(trained.predictions(batch, rows, K)))
    features, ids = batch.features.clone(), batch.ids.clone()
    features[:, 7:] += 1.0
    ids[:, 8:] = 3
    after = torch.stack(list(trained.predictions(replace(batch, features=features, ids=ids), rows, K)))
    assert torch.equal(before, after)
    features[:, 6] += 1.0
    seen = torch.stack(list(trained.predictions(replace(batch, features=features), rows, K)))
    assert not torch.equal(before, seen)


def test_the_confidence_head_learns_beside() -> None:
    """It has a gradient, and that of everything else is what it is without it."""
    own = Target(TorchOps(torch.float32, CPU), layers=5)
    batch, rows = batch_of(own), torch.tensor([[2, 5, 11]])
    gradients = []
    for form in (FORMS["dspark"], replace(FORMS["dspark"], confidence=False)):
        head = make(FORMS["dspark"], own)
        head.form = form
        head.loss(batch, rows, K, 0.8, 1.0, Distillation()).loss.backward()
        gradients.append({name: p.grad for name, p in head.named_parameters()})
    with_it, without = gradients
    assert with_it["confidence_head.proj.weight"].abs().sum() > 0
    for name, gradient in without.items():
        assert gradient is None or torch.equal(gradient, with_it[name]), name


def test_anchors_are_where_a_prediction_counts() -> None:
    own = Target(TorchOps(torch.float32, CPU), layers=5)
    batch = batch_of(own)
    counted = torch.zeros(1, TOKENS, dtype=torch.bool)
    counted[0, 9:15] = True  # row r counts if what is predicted behind token r + 1 does
    batch = replace(batch, counted=counted)
    rows = random_rows(batch, K, 4, (1, 2))
    assert rows.shape == (1, 4) and all(8 <= r <= 13 for r in rows[0].tolist())
    assert torch.equal(rows, random_rows(batch, K, 4, (1, 2)))
    assert not torch.equal(rows, random_rows(batch, K, 4, (1, 3)))
    # a text's rows hang on its number, not on how texts are dealt out
    two = replace(
        batch, ids=batch.ids.repeat(2, 1), segments=batch.segments.repeat(2, 1), counted=counted.repeat(2, 1)
    )
    assert torch.equal(random_rows(two, K, 4, (1, 2))[1:], random_rows(batch, K, 4, (1, 2), part=1, parts=2))


def test_defaults_of_layers_and_masks() -> None:
    assert default_block_layers(12) == (3, 6, 9, 12) and default_block_layers(36) == (7, 14, 22, 29, 36)
    assert default_block_layers(2) == (2,)
    assert least_used([[0, 2, 0, 1]], 4) == 3 and least_used([[0, 2, 3, 0]], 4) == 1
    pieces = [Tokens([0, 1, 3], [True] * 3)]

    class Tokenizer:
        def __init__(self, size: int, mask: int | None) -> None:
            self.size, self.mask_token_id = size, mask

        def __len__(self) -> int:
            return self.size

    assert choose_mask_token(pieces, 4, Tokenizer(4, None)) == 2
    assert choose_mask_token(pieces, 6, Tokenizer(4, None)) == 4
    assert choose_mask_token(pieces, 6, Tokenizer(4, 1)) == 1


# ------------------------------------------------------------------------------------------------- whole runs


def weights_of(folder: Path) -> Tensor:
    weights = load_file(folder / "model.safetensors")
    return torch.cat([weights[name].flatten() for name in sorted(weights)])


@pytest.mark.parametrize("how", ["accumulate", "two processes"])
def test_parts_learn_what_the_whole_batch_teaches(how: str, target: Path, text: Path, tmp_path: Path) -> None:
    """Four texts at once, two and two, or two in each of two processes: the same weights to rounding, for a head with
    unrolls and one with random anchors. The control learns from half of the texts."""
    kind = "dspark" if how == "two processes" else "mtp"
    more = {"data_parallel_size": 2} if how == "two processes" else {"accumulate": 2}
    base = options(
        kind, target, text, tmp_path / "whole", steps=2, batch_size=4, draft_vocab_size=0, evaluate_every=9
    )
    train_head(base, quietly())
    record = train_head(replace(base, out=tmp_path / "parts", batch_size=2, **more), quietly())
    train_head(replace(base, out=tmp_path / "half", batch_size=2), quietly())
    whole, parts, half = (weights_of(tmp_path / name) for name in ("whole", "parts", "half"))
    assert (parts - whole).abs().mean() < 0.02 * (half - whole).abs().mean()
    counts = json.loads((tmp_path / "whole" / "provenance.json").read_text())
    assert record["tokens_trained"] == counts["tokens_trained"]


def test_a_text_known_by_heart_is_accepted(target: Path, tmp_path: Path) -> None:
    """What the target says behind a prompt, learned from its hidden states: 95% of the drafts are accepted."""
    settings: dict[str, Any] = {"dtype": "float32", "max_model_len": 96, "num_kv_blocks": 32}
    prompt = [7 * i % 300 + 5 for i in range(12)]
    params = SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True)
    with LLM(str(target), skip_tokenizer_init=True, **settings) as llm:
        said = list(llm.generate([{"prompt_token_ids": prompt}], params)[0].outputs[0].token_ids)
    write_shard(target, tmp_path / "shards" / "a.safetensors", prompt + said, layers=(2, 4))
    asked = options(
        "dspark",
        target,
        None,
        tmp_path / "out",
        shards=tmp_path / "shards",
        feature_layers=(2, 4),
        steps=250,
        evaluate_every=250,
        anchors=40,
        block_size=K,
        draft_vocab_size=0,
        mask_token=3,
    )
    train_head(asked, quietly())
    with LLM(
        str(target),
        skip_tokenizer_init=True,
        speculative_config={"model": str(tmp_path / "out")},
        speculation_control="static",
        **settings,
    ) as llm:
        (answer,) = llm.generate([{"prompt_token_ids": prompt}], params)
    assert list(answer.outputs[0].token_ids) == said
    seen = answer.metrics.speculation
    assert seen.num_drafts <= 13 and seen.num_accepted_tokens >= 0.95 * (seen.num_draft_tokens - K)


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"block_size": 1}, "--block-size"),
        ({"block_size": 40}, "--block-size"),
        ({"markov_head": "odd"}, "--markov-head"),
        ({"mask_token": 999}, "--mask-token 999"),
        ({"device": "tpu9"}, "--device"),
        ({"device": "meta"}, "cpu or cuda"),
        ({"accumulate": 0}, "--accumulate"),
        ({"accumulate": 500}, "too few"),
        ({"feature_layers": (1, 9)}, "--feature-layers"),
    ],
)
def test_bad_options_are_named(
    more: dict[str, Any], says: str, target: Path, text: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=says):
        train_head(replace(options("dspark", target, text, tmp_path), **more), quietly())


def test_devices() -> None:
    assert choose_device("cpu") == torch.device("cpu")
    with pytest.raises(ConfigError, match="CUDA devices"):
        choose_device(f"cuda:{torch.cuda.device_count()}")
