"""Implements Transformers' attention interface: takes every layer's call.

A model computes the rows of a ragged batch as one sequence of T tokens. What tells requests apart, the keys of earlier
passes and trees, is all in attention; so the calls of the layers are the only place where a pass differs from
Transformers'. They are looked at once, at load (`Probe`), and then computed over the paged cache (`Paged`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from draftwise.errors import ModelLoadError
from draftwise.kernels.base import HeadShape, Ops
from draftwise.kv.storage import KVLayerSpec, KVStorage, write_entries
from draftwise.types import StepInput

PAGED, PROBED = "draftwise", "draftwise_probe"
"""Names of our attention in Transformers' registry: in passes, where no masks are made, and at load, where they are."""

_HARMLESS = frozenset({
    "position_ids", "cache_position", "use_cache", "output_attentions", "output_hidden_states", "is_causal", "dropout",
    "return_dict", "output_router_logits", "logits_to_keep", "position_embeddings", "target_dtype", "head_mask",
})  # fmt: skip
"""Arguments of a call that change nothing for causal self-attention, or are checked otherwise."""


class NotCausal(ModelLoadError):
    """A row's numbers depend on rows behind it: no way of serving it is right."""


@dataclass(frozen=True, slots=True)
class LayerCall:
    """One layer's attention, as its call says it.

    ``key_dim`` and ``value_dim`` may differ (latent attention); an entry of the cache is as wide as the wider one.
    """

    module: nn.Module
    heads: HeadShape  # head_dim: of an entry
    key_dim: int
    value_dim: int
    scale: float
    window: int | None
    softcap: float | None
    sinks: bool = False  # each head has a score of its own that takes weight and gives nothing
    latent: bool = False  # one head of keys that are their own values: see `models.latent`

    @property
    def spec(self) -> KVLayerSpec:
        if self.latent:
            return KVLayerSpec((("latent", (1, self.heads.head_dim)),))
        return KVLayerSpec.dense(self.heads.num_kv_heads, self.heads.head_dim)


class Taker(Protocol):
    """The receiver of a pass's attention calls."""

    def take(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Any,
        options: Mapping[str, Any],
    ) -> Tensor:
        """``query`` [1, Hq, T, Dk], ``key`` [1, Hkv, T, Dk], ``value`` [1, Hkv, T, Dv] -> [1, T, Hq, Dv]."""


_taker: ContextVar[Taker] = ContextVar("draftwise_attention")


@contextmanager
def taking(taker: Taker) -> Iterator[None]:
    """Calls of the attention interface go to ``taker`` meanwhile."""
    token = _taker.set(taker)
    try:
        yield
    finally:
        _taker.reset(token)


def register() -> None:
    """Make our attention known to Transformers. May be called often."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    for name in (PAGED, PROBED):
        ALL_ATTENTION_FUNCTIONS.register(name, _attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(PROBED, _mask)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any = None,
    *rest: Any,
    **options: Any,
) -> tuple[Tensor, None]:
    if rest:
        raise ModelLoadError(f"{type(module).__name__} hands attention arguments without names")
    return _taker.get().take(module, query, key, value, attention_mask, options), None


def _mask(**arguments: Any) -> Tensor:
    taker = _taker.get()
    assert isinstance(taker, Probe), "masks are asked for at load alone"
    return taker.mask(**arguments)


# ------------------------------------------------------------------------------------------------------ at load


class Probe:
    """Notes every attention call of one pass over a few tokens, and computes it in plain torch."""

    def __init__(self) -> None:
        self.calls: list[LayerCall] = []
        self.not_causal: set[str] = set()
        """Classes of layers that say so themselves, whatever their masks are: Transformers' kernels may go by it."""
        self._windows: list[int | ModelLoadError | None] = []  # of masks, by number; what is wrong with one

    def mask(self, mask_function: Callable[..., Any], q_length: int, kv_length: int, **others: Any) -> Tensor:
        """A stand-in for a mask, made of the number that it is known by here: layers that change it are found out."""
        try:
            self._windows.append(_window_of(mask_function, others.get("device")))
        except ModelLoadError as error:  # a mask that no layer may want
            self._windows.append(error)
        return torch.full((1, 1, q_length, kv_length), float(_MARK + len(self._windows) - 1))

    def take(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Any,
        options: Mapping[str, Any],
    ) -> Tensor:
        name = type(module).__name__
        if query.ndim != 4 or query.shape[0] != 1 or key.shape[2] != query.shape[2]:
            raise ModelLoadError(f"{name} attends to something else than the tokens of the pass")
        _refuse_unknown(name, options)
        if getattr(module, "is_causal", True) is False:
            self.not_causal.add(name)
        heads, kv_heads = query.shape[1], key.shape[1]
        if heads % kv_heads or value.shape[1] != kv_heads or key.shape[3] != query.shape[3]:
            raise ModelLoadError(f"{name} has {heads} heads of queries over {kv_heads} and {value.shape[1]}")
        key_dim, value_dim = key.shape[3], value.shape[3]
        width = max(key_dim, value_dim)
        call = LayerCall(
            module=module,
            heads=HeadShape(heads, kv_heads, width + width % 2),
            key_dim=key_dim,
            value_dim=value_dim,
            scale=_scale(options, key_dim),
            window=self._window(name, mask, options),
            softcap=options.get("softcap"),
            sinks=options.get("s_aux") is not None,
        )
        self.calls.append(call)
        return plain_attention(call, query, key, value, options.get("s_aux"))

    def _window(self, name: str, mask: Any, options: Mapping[str, Any]) -> int | None:
        if not isinstance(mask, Tensor):
            raise ModelLoadError(f"{name} attends without a mask that says what it sees")
        number = mask.flatten()[0].item() - _MARK
        if not bool((mask == mask.flatten()[0]).all()) or number not in range(len(self._windows)):
            raise ModelLoadError(f"{name} adds a bias of its own to attention scores")
        window, said = self._windows[int(number)], options.get("sliding_window")
        if isinstance(window, ModelLoadError):
            raise window
        if said is not None and window != said:
            raise ModelLoadError(f"{name} says a window of {said}, and its mask one of {window}")
        return window


_MARK = 1 << 16
_FAR = (5, 1023, 65_537, 1_000_003)


def _window_of(mask_function: Callable[..., Any], device: Any) -> int | None:
    """How many keys back a mask lets a row see: found by asking it for rows far apart. None: all.

    Raises:
        ModelLoadError: it is neither causal nor a window that slides with the row.
    """
    windows: list[int] = []
    zero = torch.zeros((), dtype=torch.int64, device=device)
    for row in _FAR:
        keys = torch.arange(row + 3, device=device)
        seen = mask_function(zero, zero, torch.tensor(row, device=device), keys)
        seen = torch.as_tensor(seen, device=device).expand(row + 3)
        if bool(seen[row + 1 :].any()) or not bool(seen[row]):
            raise NotCausal("its rows see tokens behind them, or not themselves: it is not a causal model")
        count = int(seen.sum())
        if not bool(seen[row + 1 - count : row + 1].all()):
            raise ModelLoadError("what its rows see is not a window of the tokens before them")
        windows.append(count)
    if windows == [row + 1 for row in _FAR]:
        return None
    window = windows[-1]
    if windows != [min(window, row + 1) for row in _FAR]:
        raise ModelLoadError("its attention is cut into chunks, not into windows that slide")
    return window


def _refuse_unknown(name: str, options: Mapping[str, Any]) -> None:
    known = _HARMLESS | {"scaling", "softcap", "sliding_window", "s_aux"}
    unknown = [key for key, value in options.items() if key not in known and value is not None]
    if unknown:
        raise ModelLoadError(f"{name} hands attention {', '.join(sorted(unknown))}, which is not supported")
    if options.get("is_causal") is False or options.get("dropout") or options.get("head_mask") is not None:
        raise ModelLoadError(f"{name} asks for attention that is not causal, or drops some of it")


def _scale(options: Mapping[str, Any], key_dim: int) -> float:
    scale = options.get("scaling")
    return key_dim**-0.5 if scale is None else float(scale)


def plain_attention(
    call: LayerCall, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None
) -> Tensor:
    """One sequence by itself: -> [1, T, Hq, Dv]."""
    group = call.heads.num_heads // call.heads.num_kv_heads
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scores = query.float() @ key.float().transpose(2, 3) * call.scale
    if call.softcap is not None:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    rows = torch.arange(query.shape[2], device=query.device)
    away = rows[:, None] - rows
    seen = away >= 0 if call.window is None else (away >= 0) & (away < call.window)
    scores = scores.masked_fill(~seen, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.float().view(1, -1, 1, 1).expand(1, -1, scores.shape[2], 1)], -1)
    weights = scores.softmax(-1)[..., : key.shape[2]]
    return (weights @ value.float()).to(query.dtype).transpose(1, 2).contiguous()


# ----------------------------------------------------------------------------------------------------- in passes


class Paged:
    """Attention of one pass over the paged cache: call i of the pass is that of layer i."""

    def __init__(self, calls: Sequence[LayerCall], ops: Ops, batch: StepInput, kv: KVStorage) -> None:
        self._calls, self._ops, self._batch, self._kv = calls, ops, batch, kv
        self._next = 0

    def take(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Any,
        options: Mapping[str, Any],
    ) -> Tensor:
        call = self._calls[self._next]
        layer = self._kv.layer(self._next)
        self._next += 1
        # What was read at load must hold in every pass.
        assert module is call.module and _scale(options, call.key_dim) == call.scale, (
            "calls come in another order"
        )
        assert options.get("softcap") == call.softcap
        width = call.heads.head_dim
        # [1, H, T, D] -> [T, H, width], keys and values side by side as the cache has them
        entries = torch.cat([_widened(key[0], width), _widened(value[0], width)]).transpose(0, 1)
        slots = self._batch.slots
        write_entries(layer, slots, entries)
        queries = _widened(query[0], width).transpose(0, 1).contiguous()
        sinks = options["s_aux"].float().contiguous() if call.sinks else None
        attended = self._ops.attention(
            queries, layer, self._batch.attention, call.heads, call.scale, call.window, call.softcap, sinks
        )
        return attended.view(1, -1, call.heads.num_heads, width)[..., : call.value_dim].contiguous()


def _widened(x: Tensor, width: int) -> Tensor:
    """[..., D] with zeros up to ``width``: they add nothing to a score, and nobody reads them of a value."""
    return x if x.shape[-1] == width else pad(x, (0, width - x.shape[-1]))
