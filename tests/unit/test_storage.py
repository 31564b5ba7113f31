from __future__ import annotations

import numpy as np
import pytest
import torch

from draftwise.kv.storage import KVLayerSpec, KVStorage, dequantized, narrowed, quantized, write_entries

CPU = torch.device("cpu")
FP8 = torch.float8_e4m3fn
LATENT = KVLayerSpec((("latent", (5,)), ("rope_key", (2,))))


def filled(layout: tuple[KVLayerSpec, ...], num_blocks: int = 4, block_size: int = 4) -> KVStorage:
    storage = KVStorage(layout, num_blocks, block_size, torch.float32, CPU)
    for i in range(len(layout)):
        for tensor in storage.layer(i):
            tensor.copy_(torch.randn(tensor.shape, generator=torch.Generator().manual_seed(i)))
    return storage


def test_shapes_follow_each_layers_own_declaration() -> None:
    dense = KVLayerSpec.dense(2, 8)
    storage = KVStorage((dense, dense, LATENT, dense), 3, 4, torch.bfloat16, CPU)
    assert [tuple(t.shape) for t in storage.layer(0)] == [(12, 4, 8)]
    assert [tuple(t.shape) for t in storage.layer(2)] == [(12, 5), (12, 2)]
    assert [tuple(t.shape) for t in storage.layer(3)] == [(12, 4, 8)]
    assert storage.layer(1)[0].dtype is torch.bfloat16
    assert not storage.layer(3)[0].any()


def test_layers_do_not_share_memory() -> None:
    storage = KVStorage((KVLayerSpec.dense(1, 2),) * 3, 2, 2, torch.float32, CPU)
    storage.layer(1)[0].fill_(3.0)
    assert not storage.layer(0)[0].any()
    assert not storage.layer(2)[0].any()


def test_separate_key_and_value_tensors_are_a_valid_layout() -> None:
    storage = filled((KVLayerSpec((("k", (2, 3)), ("v", (2, 3)))),) * 2)
    before = [tensor.clone() for tensor in storage.layer(1)]
    storage.move(torch.tensor([7]), torch.tensor([5]))
    for tensor, old in zip(storage.layer(1), before, strict=True):
        assert torch.equal(tensor[5], old[7])


@pytest.mark.parametrize("seed", range(5))
def test_move_reads_before_it_writes_in_every_layer(seed: int) -> None:
    layout = (KVLayerSpec.dense(2, 3), KVLayerSpec.dense(2, 3), LATENT)
    storage = filled(layout)
    rng = np.random.default_rng(seed)
    src = rng.integers(0, 16, 6)
    dst = rng.permutation(16)[:6]  # overlaps src as it falls
    before = [[tensor.clone() for tensor in storage.layer(i)] for i in range(3)]
    storage.move(torch.from_numpy(src), torch.from_numpy(dst))
    for i in range(3):
        for tensor, old in zip(storage.layer(i), before[i], strict=True):
            expected = old.clone()
            for s, d in zip(src, dst, strict=True):
                expected[d] = old[s]
            assert torch.equal(tensor, expected)


def test_moving_nothing_changes_nothing() -> None:
    storage = filled((LATENT,))
    before = storage.layer(0)[0].clone()
    storage.move(torch.tensor([], dtype=torch.int64), torch.tensor([], dtype=torch.int64))
    assert torch.equal(storage.layer(0)[0], before)


def test_bytes_per_block_is_what_is_allocated() -> None:
    layout = (KVLayerSpec.dense(2, 8), LATENT, LATENT)
    for dtype in (torch.float32, torch.float16):
        per_block = KVStorage.bytes_per_block(layout, 16, dtype)
        assert per_block == (32 + 7 + 7) * 16 * dtype.itemsize
        assert KVStorage(layout, 5, 16, dtype, CPU).nbytes == 5 * per_block


def test_int8_entries_have_a_scale_per_token_and_head() -> None:
    """Each number is off by half a step of its own token and head at most; zeros stay zeros."""
    values = torch.randn(7, 4, 16, generator=torch.Generator().manual_seed(1))
    values *= torch.logspace(-6, 6, 7)[:, None, None]
    values[3, 1] = 0.0
    codes, scales = quantized(values)
    assert codes.dtype is torch.int8 and codes.shape == (7, 4, 16)
    assert scales.dtype is torch.float32 and scales.shape == (7, 4)
    assert int(codes.abs().amax()) == 127 and not codes[3, 1].any() and scales[3, 1] == 0.0
    back = dequantized((codes, scales), torch.float32)
    assert bool(((back - values).abs() <= scales[..., None] * 0.5001).all())
    for i in range(7):  # a token's codes depend on nothing else
        assert torch.equal(quantized(values[i : i + 1])[0][0], codes[i])


def test_fp8_entries_have_a_scale_per_token_and_head() -> None:
    """Each number is off by a sixteenth of itself at most, or by half a step of the smallest ones."""
    values = torch.randn(7, 4, 16, generator=torch.Generator().manual_seed(1))
    values *= torch.logspace(-6, 6, 7)[:, None, None]
    values[3, 1] = 0.0
    codes, scales = quantized(values, FP8)
    assert codes.dtype is FP8 and codes.shape == (7, 4, 16) and scales.shape == (7, 4)
    assert float(codes.float().abs().amax()) == 448 and not codes[3, 1].float().any() and scales[3, 1] == 0.0
    back = dequantized((codes, scales), torch.float32)
    limit = torch.maximum(values.abs() / 16, scales[..., None] * 2**-10) * 1.0001
    assert bool(((back - values).abs() <= limit).all())
    for i in range(7):  # a token's codes depend on nothing else
        assert torch.equal(
            quantized(values[i : i + 1], FP8)[0][0].view(torch.uint8), codes[i].view(torch.uint8)
        )


@pytest.mark.parametrize("dtype", [torch.int8, FP8], ids=str)
def test_entries_are_written_as_the_storage_keeps_them(dtype: torch.dtype) -> None:
    storage = KVStorage((KVLayerSpec.dense(2, 8),), 3, 4, dtype, CPU)
    values = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(2))
    write_entries(storage.layer(0), torch.tensor([9, 2]), values)
    found = dequantized(tuple(part[[9, 2]] for part in storage.layer(0)), torch.float32)
    assert torch.equal(found, dequantized(quantized(values, dtype), torch.float32))
    assert not storage.layer(0)[0][[0, 1, 3, 8, 10]].float().any()


@pytest.mark.parametrize("dtype", [torch.int8, FP8], ids=str)
def test_a_storage_of_codes_keeps_scales_beside_them(dtype: torch.dtype) -> None:
    dense = KVLayerSpec.dense(2, 8)
    storage = KVStorage((dense, dense), 3, 4, dtype, CPU)
    codes, scales = storage.layer(1)
    assert codes.shape == (12, 4, 8) and codes.dtype is dtype
    assert scales.shape == (12, 4) and scales.dtype is torch.float32
    assert storage.nbytes == 3 * KVStorage.bytes_per_block((dense, dense), 4, dtype)
    assert KVStorage.bytes_per_block((dense,), 4, dtype) == 4 * (4 * 8 + 4 * 4)
    codes[5].fill_(3)
    scales[5] = 0.5
    storage.move(torch.tensor([5]), torch.tensor([7]))
    assert bool((codes[7].float() == 3).all()) and bool((scales[7] == 0.5).all()), (
        "a moved token keeps its scale"
    )


def test_float16_entries_do_not_overflow() -> None:
    big = torch.tensor([1e6, -1e6, 65504.0, 1.0])
    assert narrowed(big, torch.float16).tolist() == [65504.0, -65504.0, 65504.0, 1.0]
    assert narrowed(big.bfloat16(), torch.float16).isfinite().all(), "bfloat16 has no 65504"
