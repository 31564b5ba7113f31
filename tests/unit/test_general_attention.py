"""How a layer's attention is read off its call: windows from masks, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from draftwise.errors import ModelLoadError
from draftwise.models.general.attention import Probe

T, H, D = 6, 4, 8


def sees(window: int | None = None, chunk: int | None = None, ahead: int = 0) -> Any:
    def mask(batch: Any, head: Any, row: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        seen = key <= row + ahead
        if window is not None:
            seen = seen & (row - key < window)
        if chunk is not None:
            seen = seen & (row // chunk == key // chunk)
        return seen

    return mask


def call(mask_function: Any, change: Any = lambda mask: mask, **options: Any) -> Probe:
    probe = Probe()
    mask = probe.mask(mask_function, T, T)
    q, k, v = (torch.randn(1, h, T, D) for h in (H, 2, 2))
    probe.take(nn.Identity(), q, k, v, change(mask), {"scaling": 0.5, **options})
    return probe


@pytest.mark.parametrize("window", [None, 1, 8, 1024, 4096, 131_072])
def test_a_window_is_what_the_mask_says(window: int | None) -> None:
    (found,) = call(sees(window)).calls
    assert found.window == window and found.scale == 0.5 and not found.sinks
    assert (found.heads.num_heads, found.heads.num_kv_heads, found.heads.head_dim) == (H, 2, D)


@pytest.mark.parametrize(
    ("mask", "options", "words"),
    [
        (sees(chunk=8192), {}, "cut into chunks"),
        (sees(ahead=1), {}, "tokens behind them"),
        (sees(None), {"sliding_window": 64}, "window of 64"),
        (sees(8), {"position_bias": torch.zeros(1)}, "position_bias, which is not supported"),
        (sees(8), {"is_causal": False}, "not causal"),
        (sees(8), {"dropout": 0.1}, "not causal"),
    ],
)
def test_what_is_not_understood_is_refused(mask: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelLoadError, match=words):
        call(mask, **options)


def test_a_mask_that_nobody_wants_may_be_anything() -> None:
    """Decoders of pairs also make one for their encoder."""
    probe = Probe()
    probe.mask(sees(ahead=9), T, T)
    mask = probe.mask(sees(4), T, T)
    x = torch.randn(1, H, T, D)
    probe.take(nn.Identity(), x, x, x, mask, {})
    assert probe.calls[0].window == 4 and probe.calls[0].scale == D**-0.5


def test_a_bias_on_top_of_the_mask_is_found() -> None:
    with pytest.raises(ModelLoadError, match="bias of its own"):
        call(sees(None), lambda mask: mask + torch.arange(T))
    with pytest.raises(ModelLoadError, match="bias of its own"):
        call(sees(None), lambda mask: mask + 1)
    with pytest.raises(ModelLoadError, match="without a mask"):
        call(sees(None), lambda mask: None)


def test_keys_of_other_tokens_are_refused() -> None:
    probe = Probe()
    mask = probe.mask(sees(None), T, T)
    q = torch.randn(1, H, T, D)
    longer = torch.randn(1, H, T + 2, D)
    with pytest.raises(ModelLoadError, match="something else than the tokens"):
        probe.take(nn.Identity(), q, longer, longer, mask, {})


def test_sinks_and_values_of_another_size() -> None:
    probe = Probe()
    mask = probe.mask(sees(3), T, T)
    q, k, v = torch.randn(1, H, T, 12), torch.randn(1, H, T, 12), torch.randn(1, H, T, 7)
    sinks = torch.randn(H)
    found = probe.take(nn.Identity(), q, k, v, mask, {"s_aux": sinks, "softcap": 5.0, "scaling": 0.3})
    assert found.shape == (1, T, H, 7)
    (one,) = probe.calls
    assert (
        one.sinks and one.softcap == 5.0 and (one.key_dim, one.value_dim, one.heads.head_dim) == (12, 7, 12)
    )
    scores = 5.0 * torch.tanh(q[0, 1] @ k[0, 1].T * 0.3 / 5.0)
    row = scores[4, 2:5]  # row 4 of head 1 sees keys 2..4
    weights = row.exp() / (row.exp().sum() + sinks[1].exp())
    torch.testing.assert_close(found[0, 4, 1], weights @ v[0, 1, 2:5], rtol=1e-4, atol=1e-5)
