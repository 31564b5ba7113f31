"""Is a model that runs on our cache and kernels the model that Transformers runs?

Asked at every load, over a few tokens: a chunk, the next chunk beside another request, one token, and a tree. Whatever
carries something from token to token beside keys and values (recurrent layers, convolutions), positions that are not
those of the rows, or masks that nobody noticed make a difference here.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from draftwise.errors import ModelLoadError
from draftwise.kv.storage import KVStorage
from draftwise.models.general.model import GeneralDecoder
from draftwise.models.inputs import RowInput, build_step_input

_BLOCK = 16
_LONG, _SHORT = 141, 9  # tokens of the two requests; some models begin to do something else behind 128
_CHUNK = 13  # tokens of the long one that come first
_FEW = _CHUNK + 3  # that the long one has at least, whatever positions a model says
_PARENTS = (-1, -1, -1, 0, 1)  # of nodes below the long one's last token: paths of 1, 2 and 2
_LIMITS = {torch.float32: 1e-3, torch.bfloat16: 0.12, torch.float16: 0.03}
"""Mean difference of logits over their deviation. A wrong mask or scale makes tenths; float32 in another order 1e-6."""
_EXCHANGED = {torch.float32: 1e-3, torch.bfloat16: 0.2, torch.float16: 0.05}
_ROUNDED = 0.6
"""With weights of few bits: only what is entirely wrong is found."""


def sample(vocab_size: int, count: int, seed: int) -> list[int]:
    """Tokens by chance, the same for the same seed. Ids near both ends of a vocabulary are left out if it is large:
    special tokens may change how a model computes."""
    low, high = (vocab_size // 8, vocab_size - vocab_size // 8) if vocab_size > 64 else (3, vocab_size)
    return random.Random(seed).choices(range(min(low, high - 1), high), k=count)


@dataclass(frozen=True)
class Reference:
    """Logits that Transformers' own attention gives: [tokens, V] of each sequence by itself."""

    long: list[int]
    short: list[int]
    nodes: list[int]
    of_long: Tensor
    of_short: Tensor
    of_paths: list[Tensor]  # [V] behind each node

    @classmethod
    def of(cls, model: Any, vocab_size: int, positions: int) -> Reference:
        """``model`` attends as Transformers does it. ``positions``: how many it can reach.

        Raises:
            ModelLoadError: its code fails.
        """
        count = max(_FEW, min(_LONG, positions - len(_PARENTS)))
        long, short = sample(vocab_size, count, 1), sample(vocab_size, _SHORT, 2)
        nodes = sample(vocab_size, len(_PARENTS), 3)

        def run(tokens: list[int]) -> Tensor:
            ids = torch.tensor([tokens], device=model.device)
            try:
                return model(input_ids=ids, use_cache=False).logits[0].float()  # type: ignore[no-any-return]
            except Exception as error:  # whatever a model's code raises
                raise ModelLoadError(
                    f"its code fails on a few tokens: {type(error).__name__}: {error}"
                ) from error

        paths = []
        for i in range(len(nodes)):
            path: list[int] = []
            at = i
            while at >= 0:
                path.insert(0, nodes[at])
                at = _PARENTS[at]
            paths.append(run(long + path)[-1])
        return cls(long, short, nodes, run(long), run(short), paths)


def check(
    decoder: GeneralDecoder, reference: Reference, *, exchanged: bool = False, rounded: bool = False
) -> None:
    """Raises ModelLoadError if a ragged, chunked, branching run differs from whole sequences.

    ``exchanged``: linear layers are on our kernels; ``rounded``: with weights of few bits.
    """
    try:
        found = _run(decoder, reference)
    except ModelLoadError:
        raise
    except Exception as error:  # whatever a model's code raises
        raise ModelLoadError(f"its code fails over a paged cache: {type(error).__name__}: {error}") from error
    limit = _ROUNDED if rounded else (_EXCHANGED if exchanged else _LIMITS)[decoder.dtype]
    wanted = {
        "in chunks": reference.of_long,
        "beside another request": reference.of_short,
        "in a tree": torch.stack(reference.of_paths),
    }
    for how, want in wanted.items():
        deviation = float(want.std())
        difference = float((found[how] - want).abs().mean()) / max(deviation, 1e-6)
        if not difference <= limit:
            raise ModelLoadError(
                f"{how}, its logits are not those of whole sequences (off by {difference:.2g} of their deviation): "
                "it carries something from token to token that is not in its keys and values, or kernels err"
            )


def _run(decoder: GeneralDecoder, reference: Reference) -> dict[str, Tensor]:
    long, short = reference.long, reference.short
    blocks = -(-(len(long) + len(_PARENTS)) // _BLOCK)
    kv = KVStorage(decoder.kv_layout(), blocks + 1, _BLOCK, decoder.dtype, decoder.device)
    mine, other = np.arange(1, blocks + 1, dtype=np.int32), np.zeros(1, np.int32)

    def step(*rows: RowInput) -> Tensor:
        return decoder.forward_logits(build_step_input(rows, _BLOCK, decoder.device), kv)[1]

    last = len(long) - 1
    first = step(RowInput(long[:_CHUNK], 0, mine))
    second = step(RowInput(short[:8], 0, other), RowInput(long[_CHUNK:last], _CHUNK, mine))
    third = step(
        RowInput(long[last:] + reference.nodes, last, mine, parents=_PARENTS), RowInput(short[8:], 8, other)
    )
    return {
        "in chunks": torch.cat([first, second[8:], third[:1]]),
        "beside another request": torch.cat([second[:8], third[1 + len(_PARENTS) :]]),
        "in a tree": third[1 : 1 + len(_PARENTS)],
    }
