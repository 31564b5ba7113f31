"""Parts of a Transformers model: its body, and what reading text takes none of."""

from __future__ import annotations

import re
from inspect import signature
from typing import Any

from torch import Tensor, nn

from draftwise.errors import ModelLoadError

_OF_TEXT = frozenset({
    "input_ids", "attention_mask", "position_ids", "past_key_values", "inputs_embeds", "labels", "use_cache", "kwargs",
    "output_attentions", "output_hidden_states", "return_dict", "cache_position", "logits_to_keep", "self", "args",
})  # fmt: skip


def body_of(model: Any) -> tuple[str, Any]:
    """The part that makes hidden states of tokens, and its name in ``model``, a ``PreTrainedModel``.

    Raises:
        ModelLoadError: it has no such part, or several.
    """
    name = model.base_model_prefix
    if name in model._modules:
        return name, model._modules[name]
    # Some text models have the prefix of the model that they are a part of.
    inner = [name for name, child in model.named_children() if hasattr(child, "base_model_prefix")]
    if len(inner) != 1:
        raise ModelLoadError(
            f"its body is not told apart from its output layer (parts: {', '.join(inner) or 'none'})"
        )
    return inner[0], model._modules[inner[0]]


def other_inputs(model: Any, words: str) -> list[str]:
    """The inputs beside tokens that an error of a model's code names: images, sound, where words stand on a page.

    Example: "forward() missing 1 required positional argument: 'pixel_values'" gives pixel_values.
    """
    named = set(re.findall(r"[a-z_]+", words.lower()))
    own = [name for name in signature(model.forward).parameters if name not in _OF_TEXT]
    return [name for name in own if name in named]


def text_model(model: Any) -> Any:
    """``model``, or the causal model for text inside that is left of it: some models of text and more hold one whole,
    with its output layer."""
    inner = [child for child in model.children() if hasattr(child, "base_model_prefix")]
    if len(inner) == 1 and model.base_model_prefix not in model._modules and _writes(inner[0]):
        return text_model(inner[0])
    return model


def _writes(model: Any) -> bool:
    return model.get_output_embeddings() is not None


class Called:
    """Notes which modules of a model are called; of a model of text and more, passes over text leave some out."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._called: set[nn.Module] = set()
        self._hooks: list[Any] = []

    def __enter__(self) -> Called:
        for module in self._model.modules():
            self._hooks.append(module.register_forward_pre_hook(lambda called, _: self._called.add(called)))
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def drop_others(self, tokens: Tensor) -> list[str]:
        """Free the parts of which no module was called, if the model is one of text and more: its configuration has
        parts. Inside the part for text nothing is dropped: an expert may wait for its token.

        Where its code looks at them all the same, for ``tokens`` [1, T], they stay.

        Returns:
            Their names.
        """
        config = self._model.config
        if not any(getattr(config, part, None) is not None for part in config.sub_configs):
            return []
        dropped = []
        for parent in (self._model, *(child for child in self._model.children() if child in self._called)):
            for name, child in list(parent.named_children()):
                if not self._called.intersection(child.modules()):
                    setattr(parent, name, None)
                    dropped.append((parent, name, child))
        try:
            self._model(input_ids=tokens, use_cache=False)
        except Exception:  # whatever a model's code raises
            for parent, name, child in dropped:
                setattr(parent, name, child)
            return []
        return [name for _, name, _ in dropped]
