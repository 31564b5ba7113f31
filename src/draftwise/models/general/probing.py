"""What a Transformers model says of itself when it runs once: how its layers attend, where positions begin, what its
cache holds, and which modules carry a state."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from draftwise.errors import ModelLoadError
from draftwise.kv.storage import KVLayerSpec
from draftwise.models.config import ModelConfig
from draftwise.models.general.attention import PROBED, LayerCall, NotCausal, Probe, taking
from draftwise.models.general.carried import Unit, running
from draftwise.models.general.check import Reference, sample
from draftwise.models.general.finding import Afresh, find_units
from draftwise.models.general.modules import LinearUse

logger = logging.getLogger("draftwise")


def units_of(model: Any, vocab_size: int) -> list[Unit]:
    """The modules that carry a state from token to token beside keys and values. An empty list also if the
    model wants to know more of its cache than such modules do: the check will tell whether it has a state."""
    tokens = torch.tensor([sample(vocab_size, 13, seed=6)], device=model.device)
    if hasattr(model.config, "max_inference_chunksize"):
        model.config.max_inference_chunksize = 1 << 30  # xLSTM: a pass of many rows is cut by us, by request
    try:
        units = find_units(model, lambda: model(input_ids=tokens, use_cache=False))
        # Some hand states on from layer to layer, if they are asked to.
        return units or find_units(model, lambda: model(input_ids=tokens, use_cache=True))
    except ModelLoadError:
        raise
    except Exception as error:  # whatever a model's code raises
        logger.debug("no recurrent state is looked for: %s: %s", type(error).__name__, error)
        return []


def first_position(model: Any, reference: Reference) -> int:
    """The model's position of a first token: 0, or one more than the id of padding (RoBERTa)."""
    padding = getattr(model.config, "pad_token_id", None)
    tokens = torch.tensor([reference.short], device=model.device)
    places = torch.arange(tokens.shape[1], device=model.device)[None]
    for first in dict.fromkeys((0, (padding or 0) + 1, 2)):
        with contextlib.suppress(IndexError), explained():
            found = model(input_ids=tokens, position_ids=places + first, use_cache=False).logits[0].float()
            if torch.allclose(found, reference.of_short, rtol=1e-3, atol=1e-3):
                return first
    return 0  # they count for themselves; or the check will tell


def probed(model: Any, vocab_size: int) -> tuple[list[LayerCall], list[nn.Linear]]:
    """How each layer attends, and which linear layers are called as such."""
    attend_with(model, PROBED)
    probe = Probe()
    tokens = torch.tensor([sample(vocab_size, 12, seed=5)], device=model.device)
    positions = torch.arange(tokens.shape[1], device=model.device)[None]
    with taking(probe), LinearUse(model) as use, explained():
        model(input_ids=tokens, position_ids=positions, use_cache=False)
    if probe.not_causal and getattr(model, "_supports_sdpa", False):
        _check_causal(model, tokens, probe.not_causal)
    return probe.calls, use.exchangeable


def _check_causal(model: Any, tokens: Tensor, names: set[str]) -> None:
    """Layers say that they are not causal. Masks of plain attention may be so all the same; but a model that means it
    reads a prompt in both directions on Transformers' default kernels, which are handed no mask.

    Raises:
        NotCausal: a first token's logits depend on the tokens behind it.
    """
    attend_with(model, "sdpa")
    with explained():
        whole = model(input_ids=tokens, use_cache=False).logits[0, 0].float()
        alone = model(input_ids=tokens[:, :1], use_cache=False).logits[0, 0].float()
    if not torch.allclose(whole, alone, rtol=1e-2, atol=1e-2 * float(whole.std())):
        raise NotCausal(
            f"{', '.join(sorted(names))} reads a prompt in both directions: it is not a causal model"
        )


def probed_cache(model: Any, config: ModelConfig) -> tuple[tuple[KVLayerSpec, ...], list[nn.Linear]]:
    """The storage of each layer, and the linear layers that are called as such."""
    from draftwise.models.general.cached import layout_of, probe_cache

    attend_with(model, "eager")
    tokens = torch.tensor([sample(config.vocab_size, 12, seed=5)], device=model.device)
    cache = probe_cache(config.num_layers)
    with LinearUse(model) as use, explained(), running(Afresh()):
        model(input_ids=tokens, past_key_values=cache, use_cache=True)
    return layout_of(cache, tokens.shape[1]), use.exchangeable


@contextlib.contextmanager
def explained() -> Iterator[None]:
    """Turns an exception of a model's code into the reason why it cannot be served."""
    try:
        yield
    except ModelLoadError:
        raise
    except Exception as error:
        raise ModelLoadError(f"its code fails: {type(error).__name__}: {error}") from error


def attend_with(model: Any, name: str) -> None:
    """Configurations of parts of a model are objects of their own."""
    for module in model.modules():
        own = getattr(module, "config", None)
        if own is not None and hasattr(own, "_attn_implementation"):
            own._attn_implementation = name
