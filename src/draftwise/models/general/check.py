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
from draftwise.kv.states import StateStore
from draftwise.kv.storage import KVStorage
from draftwise.models.base import DecoderModel
from draftwise.models.inputs import RowInput, build_step_input

_BLOCK = 16
_LONG, _SHORT = 141, 9  # tokens of the two requests; some models begin to do something else behind 128
_CHUNK = 13  # tokens of the long one that come first
_FEW = _CHUNK + 3  # that the long one has at least, whatever positions a model says
_PARENTS = (-1, -1, -1, 0, 1)  # of nodes below the long one's last token: paths of 1, 2 and 2
_CHAIN = (-1, 0, 0)  # of models that verify no trees: the second node is taken back before the third comes
_LIMITS = {torch.float32: 1e-3, torch.bfloat16: 0.12, torch.float16: 0.03}
"""Mean difference of logits over their deviation. A wrong mask or scale makes tenths; float32 in another order 1e-6."""
_EXCHANGED = {torch.float32: 1e-3, torch.bfloat16: 0.2, torch.float16: 0.05}
_ROUNDED_ROWS = 0.02
"""At least, where rows are rounded to eight bits: a sum in another order may round to the next code."""
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
    parents: tuple[int, ...]

    @classmethod
    def of(cls, model: Any, vocab_size: int, positions: int, *, chain: bool = False) -> Reference:
        """``model`` attends as Transformers does it. ``positions``: how many it can reach. ``chain``: nodes are a
        chain, of which a part is taken back: for models that verify no trees.

        Raises:
            ModelLoadError: its code fails.
        """
        parents = _CHAIN if chain else _PARENTS
        count = max(_FEW, min(_LONG, positions - len(parents)))
        long, short = sample(vocab_size, count, 1), sample(vocab_size, _SHORT, 2)
        nodes = sample(vocab_size, len(parents), 3)

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
                at = parents[at]
            paths.append(run(long + path)[-1].clone())  # a view would keep all rows
        return cls(long, short, nodes, run(long), run(short), paths, parents)


def check(
    decoder: DecoderModel,
    reference: Reference,
    *,
    exchanged: bool = False,
    rounded: bool = False,
    rounded_rows: bool = False,
) -> None:
    """Raises ModelLoadError if a ragged, chunked, branching run differs from whole sequences.

    ``exchanged``: linear layers are on our kernels; ``rounded``: with weights of few bits; ``rounded_rows``: the
    reference has these weights, too, and rows of some layers are rounded.
    """
    try:
        found = _run(decoder, reference)
    except ModelLoadError:
        raise
    except Exception as error:  # whatever a model's code raises
        raise ModelLoadError(f"its code fails over a paged cache: {type(error).__name__}: {error}") from error
    limit = _ROUNDED if rounded else (_EXCHANGED if exchanged else _LIMITS)[decoder.dtype]
    if rounded_rows:
        limit = max(limit, _ROUNDED_ROWS)
    wanted = {
        "in chunks": reference.of_long,
        "beside another request": reference.of_short,
        _drafted(reference): torch.stack(reference.of_paths),
    }
    for how, want in wanted.items():
        deviation = float(want.std())
        difference = float((found[how] - want).abs().mean()) / max(deviation, 1e-6)
        if not difference <= limit:
            raise ModelLoadError(
                f"{how}, its logits are not those of whole sequences (off by {difference:.2g} of their deviation): "
                "it carries something from token to token that is not in its keys and values, or kernels err"
            )


def _drafted(reference: Reference) -> str:
    return "behind rejected drafts" if reference.parents == _CHAIN else "in a tree"


def _run(decoder: DecoderModel, reference: Reference) -> dict[str, Tensor]:
    long, short, nodes = reference.long, reference.short, reference.nodes
    blocks = -(-(len(long) + len(nodes)) // _BLOCK)
    spec = decoder.state_spec()
    states = None if spec is None else StateStore(spec, 2, len(nodes), decoder.device)
    kv = KVStorage(decoder.kv_layout(), blocks + 1, _BLOCK, decoder.dtype, decoder.device, states=states)
    mine, other = np.arange(1, blocks + 1, dtype=np.int32), np.zeros(1, np.int32)

    def step(*rows: RowInput) -> Tensor:
        return decoder.forward_logits(build_step_input(rows, _BLOCK, decoder.device), kv)[1]

    def of_long(tokens: list[int], context: int, **others: Any) -> RowInput:
        return RowInput(tokens, context, mine, state_slot=-1 if spec is None else 1, **others)

    def of_short(tokens: list[int], context: int) -> RowInput:
        return RowInput(tokens, context, other, state_slot=-1 if spec is None else 0)

    last = len(long) - 1
    first = step(of_long(long[:_CHUNK], 0))
    second = step(of_short(short[:8], 0), of_long(long[_CHUNK:last], _CHUNK))
    if spec is None:
        third = step(of_long(long[last:] + nodes, last, parents=reference.parents), of_short(short[8:], 8))
        drafted, end = third[1:-1], len(nodes) + 1
    else:
        third = step(of_long(long[last:] + nodes[:2], last, revocable=2), of_short(short[8:], 8))
        drafted, end = torch.cat([third[1:3], step(of_long(nodes[2:], last + 2))]), 3
    return {
        "in chunks": torch.cat([first, second[8:], third[:1]]),
        "beside another request": torch.cat([second[:8], third[end:]]),
        _drafted(reference): drafted,
    }
