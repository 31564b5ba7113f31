"""What native code is told of chains that it drafts with a recorded pass, and where it writes them."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from draftwise.kernels.cpu.attention import address
from draftwise.kernels.cpu.checks import require
from draftwise.kernels.cpu.draws import STREAMS, pack_keys
from draftwise.types import ChainDraws

_PTR, _I32, _I64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64


class ChainOutput(ctypes.Structure):
    """``dw::ChainOutput``."""

    _fields_ = (
        ("steps", _I64),
        ("vocab", _I64),
        ("tokens", _PTR),
        ("positions", _PTR),
        ("keys", ctypes.c_char_p),
        ("q", _PTR),
        ("target_ids", _PTR),
        ("key_offset", _I64),
        ("feature_bytes", _I64),
        ("feature_in", _I32),
        ("feature_out", _I32),
        ("stream", _I32),
        ("lengths", _PTR),
    )


_NO_NOISE = -1


def fill_draws(out: ChainOutput, draws: ChainDraws | None, requests: int) -> Tensor | None:
    """Say how tokens are drawn. Returns what their distributions will stand in, float32 [requests, steps, V], if they
    are sampled."""
    out.stream = _NO_NOISE
    if draws is None:
        return None
    require(len(draws.keys) == requests, "a key per request")
    out.stream = STREAMS[draws.stream]
    out.keys = pack_keys(draws)
    if draws.stream != "draft":
        return None
    q = torch.empty((requests, out.steps, out.vocab), dtype=torch.float32)
    out.q = q.data_ptr()
    return q


def target_ids_at(ids_np: npt.NDArray[np.int64] | None, vocab: int) -> int | None:
    """Where it lies which token each of ``vocab`` drawn ids stands for; None: itself. The caller keeps the array."""
    if ids_np is None:
        return None
    require(
        len(ids_np) == vocab and ids_np.dtype == np.int64 and ids_np.flags.c_contiguous,
        "an int64 id for each that can be drawn",
    )
    return address(ids_np)


@dataclass(frozen=True, slots=True)
class Feedback:
    """The further inputs of a draft head's chains, beyond a decoder's.

    ``layer``: which of the captured results goes into the row of the next token; None: the hidden states do.
    ``target_ids_np``: int64 [V], contiguous: the token that each drawn id stands for; None: itself.
    """

    layer: int | None
    target_ids_np: npt.NDArray[np.int64] | None = None
