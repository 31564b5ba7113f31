"""Operations in plain torch against their formulas, with and without ``out=``, in every dtype."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from draftwise.kernels import onednn, torch_ops
from draftwise.kernels.base import HeadShape
from draftwise.kernels.torch_ops import TorchLinear, TorchOps

CPU = torch.device("cpu")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@pytest.fixture(params=DTYPES.values(), ids=DTYPES.keys())
def ops(request: pytest.FixtureRequest) -> TorchOps:
    return TorchOps(request.param, CPU)


def random(ops: TorchOps, *shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(ops.dtype)


def close(actual: Tensor, expected: Tensor) -> None:
    """Within a few units of the dtype's precision of the float32 formula."""
    limit = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}[actual.dtype]
    torch.testing.assert_close(actual.float(), expected.float(), atol=limit * 2, rtol=limit)


def both(ops: TorchOps, call: object, *shape: int) -> Tensor:
    """Call with and without ``out``; both must agree, and ``out`` must be the very buffer returned."""
    assert callable(call)
    plain = call(None)
    assert isinstance(plain, Tensor)
    buffer = torch.full(shape, 9.0, dtype=plain.dtype)
    assert call(buffer) is buffer
    torch.testing.assert_close(buffer, plain, rtol=0, atol=0)
    assert plain.shape == shape
    return plain


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("bias", [False, True])
def test_linear(ops: TorchOps, rows: int, bias: bool) -> None:
    x, weight = random(ops, rows, 16), random(ops, 24, 16, seed=1)
    offset = random(ops, 24, seed=2) if bias else None
    packed = ops.pack_linear(weight.clone(), offset)
    expected = x.float() @ weight.float().T + (0 if offset is None else offset.float())
    actual = both(ops, lambda out: ops.linear(x, packed, out), rows, 24)
    torch.testing.assert_close(
        actual.float(), expected, atol=6e-2 if ops.dtype != torch.float32 else 1e-5, rtol=2e-2
    )


@pytest.mark.parametrize("rows", [0, 1, 2, 7, 64])
@pytest.mark.parametrize("size", [(24, 16), (1100, 500)], ids=["small", "large"])
def test_packed_linear_for_any_number_of_rows(ops: TorchOps, rows: int, size: tuple[int, int]) -> None:
    x, weight = random(ops, rows, size[1]), random(ops, *size, seed=1)
    expected = x.float() @ weight.float().T
    for packed in (ops.pack_linear(weight.clone()), ops.pack_tied_head(weight)):
        actual = both(ops, lambda out, packed=packed: ops.linear(x, packed, out), rows, size[0])
        scale = 0 if rows == 0 else float(expected.abs().max())
        torch.testing.assert_close(
            actual.float(), expected, atol=scale * (4e-6 if ops.dtype == torch.float32 else 1e-2), rtol=0
        )


def test_a_large_tied_head_shares_the_table(ops: TorchOps, monkeypatch: pytest.MonkeyPatch) -> None:
    table, x = random(ops, 50, 16), random(ops, 3, 16, seed=1)
    monkeypatch.setattr(torch_ops, "_TIED_PACKED", 799)
    head = ops.pack_tied_head(table)
    assert isinstance(head, TorchLinear) and head.weight_t is not None and head.packed is None
    assert head.weight_t.data_ptr() == table.data_ptr()
    torch.testing.assert_close(
        ops.logits(x, head), ops.logits(x, ops.pack_linear(table)), atol=5e-2, rtol=2e-2
    )


def test_without_onednn_plain_products_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onednn, "_works", lambda dtype: False)
    ops = TorchOps(torch.float32, CPU)
    weight = random(ops, 1100, 500)
    packed = ops.pack_linear(weight)
    assert isinstance(packed, TorchLinear) and packed.packed is None
    x = random(ops, 3, 500)
    torch.testing.assert_close(ops.linear(x, packed), x @ weight.T)


@pytest.mark.skipif(not onednn._works(torch.float32), reason="no oneDNN here")
def test_small_layers_are_not_packed() -> None:
    """A call of oneDNN takes longer than the whole product."""
    ops = TorchOps(torch.float32, CPU)
    for size, packed in (((256, 256), False), ((257, 256), True)):
        layer = ops.pack_linear(random(ops, *size))
        assert isinstance(layer, TorchLinear)
        assert (layer.packed is not None) is packed and (layer.weight_t is not None) is not packed


def test_embedding_and_copy(ops: TorchOps) -> None:
    table, ids = random(ops, 10, 6), torch.tensor([3, 0, 9, 3])
    assert torch.equal(both(ops, lambda out: ops.embedding(ids, table, out), 4, 6), table[ids])
    copied = both(ops, lambda out: ops.copy(table, out), 10, 6)
    table.zero_()
    assert copied.any()


@pytest.mark.parametrize("scale", [1.0, 1e-4, 300.0])
def test_rms_norm(ops: TorchOps, scale: float) -> None:
    """Small inputs show epsilon, large ones the overflow of a square in float16."""
    x, weight, eps = random(ops, 5, 32) * scale, random(ops, 32, seed=1), 1e-5
    norm = ops.pack_norm(weight, eps)
    wide = x.float()
    expected = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()
    close(both(ops, lambda out: ops.rms_norm(x, norm, out), 5, 32), expected)


def test_rms_norm_of_zeros_is_zero(ops: TorchOps) -> None:
    norm = ops.pack_norm(random(ops, 32, seed=1), 1e-6)
    assert not ops.rms_norm(torch.zeros(2, 32, dtype=ops.dtype), norm).any()


def test_norm_leaves_its_input_alone(ops: TorchOps) -> None:
    x = random(ops, 3, 8)
    before = x.clone()
    ops.rms_norm(x, ops.pack_norm(random(ops, 8, seed=1), 1e-5))
    assert torch.equal(x, before)


def test_add_rms_norm_adds_in_place(ops: TorchOps) -> None:
    x, residual = random(ops, 4, 16), random(ops, 4, 16, seed=1)
    norm = ops.pack_norm(random(ops, 16, seed=2), 1e-5)
    total, x_before = x + residual, x.clone()

    def call(out: Tensor | None) -> Tensor:
        mine = residual.clone()
        result = ops.add_rms_norm(x, mine, norm, out)
        assert torch.equal(mine, total)
        return result

    torch.testing.assert_close(both(ops, call, 4, 16), ops.rms_norm(total, norm), rtol=0, atol=0)
    assert torch.equal(x, x_before)


def test_silu_mul(ops: TorchOps) -> None:
    packed = random(ops, 5, 24)
    expected = F.silu(packed[:, :12].float()) * packed[:, 12:].float()
    close(both(ops, lambda out: ops.silu_mul(packed.clone(), out), 5, 12), expected)


def test_rope_rows_rotate_pairs_of_halves() -> None:
    ops = TorchOps(torch.float32, CPU)
    inv_freq = torch.tensor([1.0, 0.01])
    rope = ops.pack_rope(inv_freq, 2.0, 5000)  # more than one piece of the table
    positions = torch.tensor([0, 7, 4999])
    rows = both(ops, lambda out: ops.rope_rows(rope, positions, out), 3, 2, 4)
    angles = positions[:, None].float() * inv_freq
    torch.testing.assert_close(rows[:, 0], 2 * torch.cat((angles.cos(), angles.cos()), 1))
    torch.testing.assert_close(rows[:, 1], 2 * torch.cat((-angles.sin(), angles.sin()), 1))


@pytest.mark.parametrize("norms", [False, True])
def test_qkv_rope_write(ops: TorchOps, norms: bool) -> None:
    heads = HeadShape(4, 2, 6)
    qkv = random(ops, 3, 8 * 6)
    rope = ops.pack_rope(torch.tensor([1.0, 0.5, 0.1]), 1.0, 20)
    rows = ops.rope_rows(rope, torch.tensor([4, 5, 19]))
    slots = torch.tensor([7, 2, 3])
    weights = [random(ops, 6, seed=seed) for seed in (5, 6)]
    q_norm, k_norm = (ops.pack_norm(weight, 1e-5) if norms else None for weight in weights)
    caches = []

    def call(out: Tensor | None) -> Tensor:
        cache = torch.full((9, 4, 6), 5.0, dtype=ops.dtype)
        caches.append(cache)
        return ops.qkv_rope_write(qkv.clone(), heads, rows, (cache,), slots, q_norm, k_norm, out).contiguous()

    plain = call(None)
    buffer = torch.empty(3, 4, 6, dtype=ops.dtype)
    assert ops.qkv_rope_write(qkv.clone(), heads, rows, (caches[0],), slots, q_norm, k_norm, buffer) is buffer
    assert torch.equal(buffer, plain)

    q, k, v = qkv.view(3, 8, 6).split((4, 2, 2), 1)
    if norms:
        q, k = ops.rms_norm(q, q_norm), ops.rms_norm(k, k_norm)  # type: ignore[arg-type]

    def rotate(x: Tensor) -> Tensor:
        cos, sin = rows[:, :1].float(), rows[:, 1:].float()
        return x.float() * cos + torch.cat((x[..., 3:], x[..., :3]), -1).float() * sin

    close(plain, rotate(q))
    close(caches[0][slots][:, :2], rotate(k))
    assert torch.equal(caches[0][slots][:, 2:], v)
    others = [slot for slot in range(9) if slot not in slots.tolist()]
    assert (caches[0][others] == 5.0).all(), "a slot that is not ours was written"


def test_logits_are_float32(ops: TorchOps) -> None:
    hidden, weight = random(ops, 2, 16), random(ops, 30, 16, seed=1)
    head = ops.pack_linear(weight.clone())
    logits = both(ops, lambda out: ops.logits(hidden, head, out), 2, 30)
    assert logits.dtype is torch.float32
    torch.testing.assert_close(logits, hidden.float() @ weight.float().T, atol=5e-2, rtol=2e-2)
