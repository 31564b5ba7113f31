"""Counter-based noise: every draw is a pure function of its key. No generator, no state, no order of calls.

A draw is named by (seed, sample index, stream, position, node, base):

- ``position``: index, in the request's token sequence, of the token that is drawn (or judged).
- ``node``: index of a draft node in the step's proposal, -1 for the root.
- ``base``: number of committed tokens when the step began. Rules that look ahead draw at positions that a
  later step draws again; the base makes those draws independent. (A position's noise used again in the next
  step visibly biases block verification; tests/statistical holds that as a negative control.)

Two draws that must be independent differ in their key. Only the SHARED stream, which the coupled rule
(Daliri, Musco, Suresh, arXiv:2408.07978) reads on both the drafter's and the target's side, leaves node and
base out: its noise belongs to (seed, sample index, position, token) whatever the step looks like.

The integer part is splitmix64 (Steele, Lea, Flood 2014): a finaliser folds the key's words into one row key,
then the noise of token v is output number v of the generator seeded with the row key. It is exact integer
arithmetic, the same on every device; the logarithms after it are correct to the last bits of float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from draftwise.names import SHARED

_MASK: Final = (1 << 64) - 1
_GOLDEN: Final = 0x9E3779B97F4A7C15  # 2^64 / golden ratio, splitmix64's increment
_MUL1: Final = 0xBF58476D1CE4E5B9
_MUL2: Final = 0x94D049BB133111EB

# numpy wants operands of its own unsigned type; made once
_S30, _S27, _S31, _S24 = (np.uint64(s) for s in (30, 27, 31, 24))
_S32, _S11, _S8 = (np.uint64(s) for s in (32, 11, 8))
_M1, _M2, _G = np.uint64(_MUL1), np.uint64(_MUL2), np.uint64(_GOLDEN)

_BLOCK: Final = 1 << 14
"""Elements hashed at a time: the two 64-bit buffers (256 KiB) stay in a core's second-level cache."""


class NoiseKey(NamedTuple):
    """The key of one draw; see the module's docstring. The SHARED stream ignores node and base."""

    seed: int
    sample_index: int
    stream: int
    position: int
    node: int = -1
    base: int = 0


def _finalise(z: int) -> int:
    z = ((z ^ (z >> 30)) * _MUL1) & _MASK
    z = ((z ^ (z >> 27)) * _MUL2) & _MASK
    return z ^ (z >> 31)


def row_key(seed: int, sample_index: int, stream: int, position: int, node: int, base: int) -> int:
    """The 64-bit key of one draw. Different draws of one seed get different keys except by chance (2^-64).

    The fields are packed without overlap into two words, each folded in by one round:
    word 1 = position (32 bits) | base (32 bits); word 2 = sample index (32) | node + 1 (16) | stream (8).
    """
    if stream == SHARED:
        node, base = -1, 0
    h = _finalise((seed + _GOLDEN) & _MASK)
    h = _finalise(h ^ (position << 32 | base))
    return _finalise(h ^ (sample_index << 24 | (node + 1) << 8 | stream))


def uniform(seed: int, sample_index: int, stream: int, position: int, node: int = -1, base: int = 0) -> float:
    """One draw from [0, 1), a multiple of 2^-53. Host only; about 2 us."""
    return (
        _finalise((row_key(seed, sample_index, stream, position, node, base) + _GOLDEN) & _MASK) >> 11
    ) * 2.0**-53


def many_uniforms(
    stream: int,
    seeds: Sequence[int],
    sample_indices: Sequence[int],
    positions: Sequence[int],
    nodes: Sequence[int],
    bases: Sequence[int],
) -> list[float]:
    """`uniform` for many draws of one stream, with the same values; for a few, a loop takes less time."""
    if stream == SHARED:
        nodes, bases = [-1] * len(seeds), [0] * len(seeds)
    h = _words(np.array([(seed + _GOLDEN) & _MASK for seed in seeds], np.uint64))
    h = _words(h ^ (np.array(positions, np.uint64) << _S32 | np.array(bases, np.uint64)))
    last = np.array(sample_indices, np.uint64) << _S24
    last |= (np.array(nodes, np.int64) + 1).astype(np.uint64) << _S8
    h = _words(_words(h ^ (last | np.uint64(stream))) + _G)
    values: list[float] = ((h >> _S11) * 2.0**-53).tolist()
    return values


def _words(z: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """`_finalise` for each element; uint64 arrays wrap around by themselves."""
    z = (z ^ (z >> _S30)) * _M1
    z = (z ^ (z >> _S27)) * _M2
    return z ^ (z >> _S31)


def gumbel(
    keys: Sequence[NoiseKey],
    vocab: int,
    device: torch.device | str = "cpu",
    token_ids: torch.Tensor | None = None,
) -> torch.Tensor:
    """Standard Gumbel noise, float32 [M, V], one row per key.

    ``token_ids`` (int64 [V']): the target's token ids that the columns stand for; the result is then
    [M, V'], and a column's noise is that of its token, so that a drafter with a reduced vocabulary draws
    the noise the target draws. Without it column v is token v.

    Noise is -log(E), E = -log(1 - U) exponential, with U a multiple of 2^-41 kept at float32's *relative*
    precision near 0: the largest values, which decide an argmax, are resolved to the last bit up to 28.4
    (of 10^12 draws one is larger).
    """
    device = torch.device(device)
    rows = [row_key(*key) for key in keys]
    if device.type == "cpu":
        u = torch.from_numpy(_bits_numpy(rows, _tokens_numpy(vocab, token_ids)))
    else:
        u = _bits_torch(rows, _tokens_torch(vocab, token_ids, device)).to(torch.float32)
    return _gumbel_of_bits(u)


def token_counters(vocab: int, device: torch.device, token_ids: torch.Tensor | None = None) -> torch.Tensor:
    """The columns' constants for `gumbel_of_keys`, int64 [V]; made once. ``token_ids`` as in `gumbel`."""
    return _tokens_torch(vocab, token_ids, device)


def gumbel_of_keys(keys: torch.Tensor, counters: torch.Tensor) -> torch.Tensor:
    """`gumbel` without the host: ``keys`` int64 [M] are `row_key` of each row as a signed word (`signed_word`).
    float32 [M, V]."""
    return _gumbel_of_bits(_hashed(keys, counters).to(torch.float32))


def device_keys(
    stream: int,
    seeds: torch.Tensor,
    sample_indices: torch.Tensor,
    positions: torch.Tensor,
    nodes: torch.Tensor,
    bases: torch.Tensor,
) -> torch.Tensor:
    """`row_key` of many draws without the host, as signed words: int64 of the shape that the arguments (int64,
    ``seeds`` as signed words) have together."""
    h = _finalised(seeds + _signed(_GOLDEN))
    if stream == SHARED:
        h = _finalised(h ^ (positions << 32))
        return _finalised(h ^ (sample_indices << 24 | stream))
    h = _finalised(h ^ (positions << 32 | bases))
    return _finalised(h ^ (sample_indices << 24 | (nodes + 1) << 8 | stream))


def uniforms_of_keys(keys: torch.Tensor) -> torch.Tensor:
    """`uniform` of each of `device_keys`, float64, the same bits."""
    return ((_finalised(keys + _signed(_GOLDEN)) >> 11) & ((1 << 53) - 1)).to(torch.float64) * 2.0**-53


def signed_word(x: int) -> int:
    """64 bits as int64 has them."""
    return _signed(x)


def _gumbel_of_bits(u: torch.Tensor) -> torch.Tensor:
    """Integers in [0, 2^40) as float32 -> Gumbel, in place. 1 - 2^-24 is the largest float32 below 1."""
    u.add_(0.5).mul_(2.0**-40).clamp_(max=1.0 - 2.0**-24)
    return u.neg_().log1p_().neg_().log_().neg_()


def _tokens_numpy(vocab: int, token_ids: torch.Tensor | None) -> npt.NDArray[np.uint64]:
    """(v + 1) * golden for each column: what splitmix64 adds to its seed before output v."""
    if token_ids is None:
        counters = _COUNTERS.get(vocab)
        if counters is None:
            counters = np.arange(1, vocab + 1, dtype=np.uint64) * np.uint64(_GOLDEN)
            _COUNTERS[vocab] = counters
        return counters
    ids: npt.NDArray[np.int64] = token_ids.detach().cpu().numpy()
    counters = (ids + 1).astype(np.uint64)
    counters *= np.uint64(_GOLDEN)
    return counters


_COUNTERS: dict[int, npt.NDArray[np.uint64]] = {}  # a process sees a handful of vocabulary sizes


def _bits_numpy(rows: Sequence[int], counters: npt.NDArray[np.uint64]) -> npt.NDArray[np.float32]:
    """40 hashed bits per element as float32 [M, V]. numpy's 64-bit multiply is vectorised, torch's is not
    (8 against 50 us for 4096 elements)."""
    width = counters.shape[0]
    out = np.empty((len(rows), width), dtype=np.float32)
    z_buffer = np.empty(min(_BLOCK, width), dtype=np.uint64)
    t_buffer = np.empty_like(z_buffer)
    for i, row in enumerate(rows):
        key = np.uint64(row)
        for start in range(0, width, _BLOCK):
            stop = min(start + _BLOCK, width)
            z, t = z_buffer[: stop - start], t_buffer[: stop - start]
            np.add(counters[start:stop], key, out=z)
            np.right_shift(z, _S30, out=t)
            np.bitwise_xor(z, t, out=z)
            np.multiply(z, _M1, out=z)
            np.right_shift(z, _S27, out=t)
            np.bitwise_xor(z, t, out=z)
            np.multiply(z, _M2, out=z)
            np.right_shift(z, _S31, out=t)
            np.bitwise_xor(z, t, out=z)
            np.right_shift(z, _S24, out=z)
            # as signed integers: their conversion to float is one instruction
            np.copyto(out[i, start:stop], z.view(np.int64), casting="unsafe")
    return out


def _signed(x: int) -> int:
    return x - (1 << 64) if x >> 63 else x


def _tokens_torch(vocab: int, token_ids: torch.Tensor | None, device: torch.device) -> torch.Tensor:
    ids = torch.arange(vocab, device=device) if token_ids is None else token_ids.to(device)
    return (ids + 1) * _signed(_GOLDEN)


def _bits_torch(rows: Sequence[int], counters: torch.Tensor) -> torch.Tensor:
    """The same 40 bits on any device, int64 [M, V]."""
    keys = torch.tensor([_signed(row) for row in rows], dtype=torch.int64, device=counters.device)
    return _hashed(keys, counters)


def _hashed(keys: torch.Tensor, counters: torch.Tensor) -> torch.Tensor:
    """int64 wraps around like uint64; its right shift copies the sign, so the shifted-in bits are masked off."""
    return (_finalised(keys[:, None] + counters) >> 24).bitwise_and_((1 << 40) - 1)


def _finalised(z: torch.Tensor) -> torch.Tensor:
    z = _folded(z, 30).mul_(_signed(_MUL1))
    z = _folded(z, 27).mul_(_signed(_MUL2))
    return _folded(z, 31)


def _folded(z: torch.Tensor, bits: int) -> torch.Tensor:
    """``z`` exclusive-or its own upper bits, in one new tensor."""
    return (z >> bits).bitwise_and_((1 << (64 - bits)) - 1).bitwise_xor_(z)
