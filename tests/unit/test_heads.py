"""EAGLE heads against the papers' formulas in plain float32: whole texts at once there, in chunks and pages here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from tests.fakes.heads import HeadShape, ReferenceHead, random_weights
from tests.native import native_or_skip
from torch import Tensor

from draftwise.errors import ModelLoadError
from draftwise.kernels.base import Ops
from draftwise.kernels.cpu.ops import NativeOps
from draftwise.kernels.cpu.pool import ThreadPool
from draftwise.kernels.torch_ops import TorchOps
from draftwise.kv.storage import KVStorage
from draftwise.models.config import dense_config
from draftwise.models.heads.base import HeadModel, TargetLink
from draftwise.models.heads.eagle import EagleHead, EagleOptions
from draftwise.models.heads.eagle3 import Eagle3Head, Eagle3Options, default_feature_layers
from draftwise.models.heads.recorded import recorded_head
from draftwise.models.inputs import RowInput, build_step_input
from draftwise.models.weights import WeightPlan
from draftwise.types import TargetOutput

CPU = torch.device("cpu")
VOCAB, HIDDEN, LAYERS, TOKENS = 53, 24, 6, 23

VARIANTS: dict[str, HeadShape] = {
    "eagle": HeadShape("eagle", HIDDEN, HIDDEN, VOCAB),
    "eagle bias": HeadShape("eagle", HIDDEN, HIDDEN, VOCAB, fc_bias=True, own_embedding=True),
    "eagle layers": HeadShape("eagle", HIDDEN, HIDDEN, VOCAB, layers=2),
    "eagle3": HeadShape("eagle3", HIDDEN, HIDDEN, VOCAB, feature_layers=(1, 3, 5)),
    "norm before residual": HeadShape("eagle3", HIDDEN, HIDDEN, VOCAB, norm_before_residual=True),
    "norm before fc": HeadShape("eagle3", HIDDEN, HIDDEN, VOCAB, norm_before_fc=True),
    "3.1": HeadShape("eagle3", HIDDEN, HIDDEN, VOCAB, fc_norm=True, norm_output=True),
    "draft vocabulary": HeadShape("eagle3", HIDDEN, HIDDEN, VOCAB, draft_vocab=17),
    "another size": HeadShape("eagle3", 16, HIDDEN, VOCAB, own_embedding=True, heads=2, kv_heads=1),
    "layers": HeadShape("eagle3", HIDDEN, HIDDEN, VOCAB, layers=3, fc_bias=True),
    "two features, the target's head": HeadShape(
        "eagle3", HIDDEN, HIDDEN, VOCAB, feature_layers=(0, 6), own_head=False
    ),
    "last hidden state": HeadShape("eagle3", HIDDEN, HIDDEN, VOCAB, feature_layers=None),
}


class World:
    """A head of both kinds over one random text."""

    def __init__(self, shape: HeadShape, ops: Ops, seed: int = 1) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.embedding = torch.randn(VOCAB, HIDDEN, generator=generator)
        self.output = torch.randn(VOCAB, HIDDEN, generator=generator)
        self.tokens = torch.randint(0, VOCAB, (TOKENS,), generator=generator).tolist()
        states = [torch.randn(TOKENS, HIDDEN, generator=generator) for _ in range(LAYERS + 2)]
        self.hidden = TargetOutput(states[-1], dict(enumerate(states[:-1])))
        weights = random_weights(shape, seed)
        self.reference = ReferenceHead(shape, weights, self.embedding, self.output)
        self.head = make_head(shape, weights, self.embedding, self.output, ops)
        self.features = self.reference.combine(states)


def make_head(
    shape: HeadShape, weights: dict[str, Tensor], embedding: Tensor, output: Tensor, ops: Ops
) -> HeadModel:
    link = TargetLink(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        num_layers=LAYERS,
        max_model_len=64,
        embedding=embedding,
        head=ops.pack_head(output.clone()),
    )
    config = dense_config(
        {
            "hidden_size": shape.hidden,
            "intermediate_size": shape.inner,
            "num_hidden_layers": shape.layers,
            "num_attention_heads": shape.heads,
            "num_key_value_heads": shape.kv_heads,
            "head_dim": shape.head_dim,
            "vocab_size": VOCAB,
            "rms_norm_eps": shape.eps,
            "rope_theta": shape.theta,
        },
        architecture="head",
    )
    plan = WeightPlan(ops.dtype, ops.device)
    head: HeadModel
    if shape.kind == "eagle":
        options = EagleOptions(fc_bias=shape.fc_bias, own_embedding=shape.own_embedding)
        head = EagleHead(config, options, link, ops, plan)
    else:
        d2t = weights.get("d2t")
        head = Eagle3Head(
            config,
            Eagle3Options(
                feature_layers=shape.feature_layers,
                norm_before_residual=shape.norm_before_residual,
                norm_before_fc=shape.norm_before_fc,
                fc_norm=shape.fc_norm,
                norm_output=shape.norm_output,
                fc_bias=shape.fc_bias,
                own_embedding=shape.own_embedding,
                own_head=shape.own_head,
                draft_vocab_size=shape.draft_vocab,
            ),
            link,
            ops,
            plan,
            None if d2t is None else d2t + torch.arange(len(d2t)),
        )
    named = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in weights.items()}
    assert plan.targets.keys() == {name for name in named if name not in ("d2t", "t2d")}

    def read(targets: Any) -> None:
        for name, target in targets.items():
            target.copy_(named[name])

    plan.fill_with(read)
    head.finish()
    assert not plan.targets
    return recorded_head(head, ops)


def native_ops() -> NativeOps:
    return NativeOps(native_or_skip(), ThreadPool(native_or_skip(), 2), torch.float32)


def all_ops() -> list[Any]:
    return [
        pytest.param(lambda: TorchOps(torch.float32, CPU), id="torch"),
        pytest.param(native_ops, id="native"),
    ]


@pytest.fixture(autouse=True)
def _inference() -> Any:
    with torch.inference_mode():
        yield


@pytest.mark.parametrize("make_ops", all_ops())
@pytest.mark.parametrize("name", VARIANTS)
def test_features_logits_and_next_features_are_those_of_the_paper(name: str, make_ops: Any) -> None:
    world = World(VARIANTS[name], make_ops())
    combined = world.head.combine(world.hidden, torch.arange(TOKENS))
    torch.testing.assert_close(combined, world.features, rtol=1e-4, atol=1e-4)
    rows = TOKENS - 1
    logits, given = world.reference.rows(
        torch.tensor(world.tokens[1:]),
        world.features[:-1],
        torch.arange(rows),
        torch.ones(rows, rows).tril().bool(),
    )
    got_logits, got_features, _ = in_pieces(world, [rows])
    torch.testing.assert_close(got_logits, logits, rtol=2e-4, atol=2e-4)
    torch.testing.assert_close(got_features, given, rtol=2e-4, atol=2e-4)
    pieces_logits, pieces_features, _ = in_pieces(world, [1, 5, 1, 9, 2, rows - 18])
    torch.testing.assert_close(pieces_logits, logits, rtol=2e-4, atol=2e-4)
    torch.testing.assert_close(pieces_features, given, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("make_ops", all_ops())
@pytest.mark.parametrize("name", VARIANTS)
def test_drafts_go_on_from_the_heads_own_features(name: str, make_ops: Any) -> None:
    world = World(VARIANTS[name], make_ops())
    known, count = TOKENS - 4, 5
    wanted = world.reference.draft(world.tokens[:known], world.features[: known - 1], count)
    table = np.array([3, 1, 4, 2, 0, 5, 6, 7], np.int32)
    kv = KVStorage(world.head.kv_layout(), 8, 4, torch.float32, CPU)
    batch = step(world.tokens[1:known], 1, table)
    output, logits = world.head.forward_logits(batch, world.features[: known - 1], kv, [known - 2])
    feature = output.features[-1:]
    target_ids = world.head.target_ids if world.head.target_ids is not None else torch.arange(VOCAB)
    drafts = [int(target_ids[logits.argmax()])]
    while len(drafts) < count:
        batch = step([drafts[-1]], known + len(drafts) - 1, table)
        output, logits = world.head.forward_logits(batch, feature, kv)
        feature = output.features
        drafts.append(int(target_ids[logits.argmax()]))
    assert drafts == wanted


def step(tokens: Sequence[int], first: int, table: Any) -> Any:
    return build_step_input([RowInput(tokens, first, table, first_key=1)], 4, CPU, position_offset=-1)


def in_pieces(world: World, sizes: Sequence[int]) -> tuple[Tensor, Tensor, KVStorage]:
    """Rows 1.. of the text in passes of these sizes."""
    table = np.array([5, 3, 0, 2, 1, 4, 6, 7], np.int32)
    kv = KVStorage(world.head.kv_layout(), 8, 4, torch.float32, CPU)
    kv.layer(0)[0].fill_(float("nan"))  # slots that nobody wrote must not be read
    logits, features = [], []
    first = 1
    for size in sizes:
        batch = step(world.tokens[first : first + size], first, table)
        output, part = world.head.forward_logits(batch, world.features[first - 1 : first - 1 + size], kv)
        logits.append(part)
        features.append(output.features.clone())
        first += size
    return torch.cat(logits), torch.cat(features), kv


def test_native_rows_are_the_same_bits_in_any_pieces() -> None:
    world = World(VARIANTS["eagle3"], native_ops())
    rows = TOKENS - 1
    one, two = in_pieces(world, [rows]), in_pieces(world, [3, 1, 1, 7, rows - 12])
    assert torch.equal(one[0], two[0]) and torch.equal(one[1], two[1])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"feature_layers": (1, 9, 5)},
            r"eagle_aux_hidden_state_layer_ids \[1, 9, 5\].*0 to 6.*another target",
        ),
        ({"feature_layers": (3, 1)}, "must rise"),
        ({"feature_layers": ()}, "empty"),
        ({"hidden": 16}, "hidden_size 16 is not the target's 24, and the head has no embedding"),
        ({"hidden": 16, "own_embedding": True, "own_head": False}, "has no output layer"),
        ({"draft_vocab": 17, "own_head": False}, "draft_vocab_size 17 needs an lm_head"),
    ],
)
def test_heads_for_another_target_are_refused_by_name(changes: dict[str, Any], message: str) -> None:
    from dataclasses import replace

    shape = replace(VARIANTS["eagle3"], **changes)
    ops = TorchOps(torch.float32, CPU)
    weights = random_weights(shape)
    with pytest.raises(ModelLoadError, match=message):
        make_head(shape, weights, torch.zeros(VOCAB, HIDDEN), torch.zeros(VOCAB, HIDDEN), ops)


def test_eagle_of_another_size_is_refused() -> None:
    shape = HeadShape("eagle", 16, HIDDEN, VOCAB)
    with pytest.raises(ModelLoadError, match="hidden_size 16 is not the target's 24"):
        make_head(
            shape,
            random_weights(shape),
            torch.zeros(VOCAB, HIDDEN),
            torch.zeros(VOCAB, HIDDEN),
            TorchOps(torch.float32, CPU),
        )


def test_default_feature_layers() -> None:
    assert default_feature_layers(32) == (2, 16, 29)
    assert default_feature_layers(12) == (2, 6, 9)
