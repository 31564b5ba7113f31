"""A Transformers model as a `DecoderModel`."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from draftwise.kernels.base import Ops
from draftwise.kv.states import StateSpec
from draftwise.kv.storage import KVLayerSpec, KVStorage
from draftwise.models.base import (
    DecoderModel,
    LinearSite,
    LogitsTail,
    SharedWeights,
    SitePart,
    finish_logits,
)
from draftwise.models.config import ModelConfig, RawConfig
from draftwise.models.general.attention import taking
from draftwise.models.general.carried import Unit, running
from draftwise.models.general.modules import PackedLinear
from draftwise.models.general.parts import body_of
from draftwise.models.general.recurrence import Recurrence
from draftwise.models.general.ways import Interface, Part, Way
from draftwise.types import StepInput, TargetOutput


class GeneralDecoder(DecoderModel):
    """Made by `loading.load_general`, finished: modules as they are, but for those that our kernels compute, and
    keys and values in the paged cache."""

    capturable = False  # its code asks the host

    def __init__(
        self,
        config: ModelConfig,
        ops: Ops,
        model: Any,
        way: Way,
        blocks: Sequence[nn.Module],
        units: Sequence[Unit] = (),
    ) -> None:
        """
        Args:
            model: a ``PreTrainedModel`` for causal language modelling, made ready for ``way``.
            blocks: the decoder layers, whose entering hidden states can be captured.
            units: the modules with recurrent state.
        """
        self.config = config
        self.dtype, self.device = ops.dtype, ops.device
        self.ops = ops
        self._model = model
        self._body_name, self._body = body_of(model)
        self.way = way
        tensors = tuple(tensor for unit in units for tensor in unit.tensors)
        self._states = StateSpec(tensors) if tensors else None
        self.rows_in_order = isinstance(way, Interface) and not tensors
        self._positions: Tensor | None = None  # [T] of the pass that runs
        self._captured: dict[int, list[Tensor]] = {}  # [B * n, H] of each part of the pass
        self._wanted: frozenset[int] = frozenset()
        self._given = _Given(self._body)
        self.renew()
        self._hooks = [
            module.register_forward_pre_hook(self._hand_positions, with_kwargs=True)
            for module in self._body.modules()
            if isinstance(module, nn.Embedding) and "position_ids" in signature(module.forward).parameters
        ]
        for i, block in enumerate(blocks):
            self._hooks.append(block.register_forward_pre_hook(_Entering(self, i), with_kwargs=True))
        if blocks:
            self._hooks.append(blocks[-1].register_forward_hook(_Leaving(self, len(blocks))))
        self.num_blocks = len(blocks)
        self.weight_size = 0

    def release(self) -> None:
        """Give the model back unchanged: it is not served in this way."""
        for hook in self._hooks:
            hook.remove()

    def modules(self) -> Iterator[nn.Module]:
        """The modules of the model."""
        found: Iterator[nn.Module] = self._model.modules()
        return found

    def renew(self) -> None:
        """Modules of the model were exchanged. Makes the tail: the output layer and what is done around it (such as
        scales and soft caps), with a body that gives the hidden states it was given."""
        self._tail = copy.copy(self._model)
        self._tail._modules = dict(self._model._modules)
        self._tail._modules[self._body_name] = self._given

    @classmethod
    def parse(cls, raw: RawConfig, architecture: str, max_model_len: int | None = None) -> ModelConfig:
        from draftwise.models.general.config import parse_general

        return parse_general(raw, architecture, max_model_len)

    def finish(self) -> None:
        raise NotImplementedError("made finished")

    def kv_layout(self) -> tuple[KVLayerSpec, ...]:
        return self.way.layout

    def state_spec(self) -> StateSpec | None:
        return self._states

    def forward(self, batch: StepInput, kv: KVStorage, capture: Sequence[int] = ()) -> TargetOutput:
        recurrence = None
        if self._states is not None:
            assert kv.states is not None, "storage of a model with recurrent state has states"
            recurrence = Recurrence(batch, kv.states)
        return self.compute(self.way.parts(batch, kv), len(batch.token_ids), capture, recurrence)

    def compute(
        self,
        parts: Sequence[Part],
        total: int,
        capture: Sequence[int] = (),
        recurrence: Recurrence | None = None,
    ) -> TargetOutput:
        """The parts of a pass of ``total`` rows. ``recurrence``: computes the modules with recurrent state."""
        self._wanted, self._captured = frozenset(capture), {}
        hidden = []
        for part in parts:
            self._positions = part.positions
            runner = None if recurrence is None else recurrence.part(part.rows)
            with taking(part.taker) if part.taker is not None else nullcontext(), running(runner):
                output = self._body(input_ids=part.token_ids, **part.arguments)
            hidden.append(_rows(output.last_hidden_state))
        self._positions = None
        captured, self._captured = self._captured, {}
        return TargetOutput(
            _gathered(parts, hidden, total),
            {layer: _gathered(parts, found, total) for layer, found in captured.items()},
        )

    def logits(self, hidden: Tensor) -> Tensor:
        self._given.hidden = hidden[None]
        try:
            found: Tensor = self._tail(input_ids=self._given.ids, use_cache=False).logits
        finally:
            self._given.hidden = None
        return found[0].float()

    def shared_weights(self) -> SharedWeights:
        embedding, head = self._model.get_input_embeddings(), self._model.get_output_embeddings()
        table = getattr(embedding, "weight", None)
        if not isinstance(head, PackedLinear) or not isinstance(table, Tensor):
            raise NotImplementedError(
                f"{self.config.architecture} has no output layer on kernels of ours to lend"
            )
        size = (self.config.vocab_size, self.config.hidden_size)
        if table.shape != size or (head.out_features, head.in_features) != size:
            raise NotImplementedError(
                f"the embedding or output layer of {self.config.architecture} has another shape"
            )
        return SharedWeights(table.detach(), head.packed, self.ops, self._logits_tail(head))

    def _logits_tail(self, head: PackedLinear) -> LogitsTail:
        """The model's operations on its logits, found from its results for a few hidden states.

        Raises:
            NotImplementedError: it is more than a factor and a cap, or something stands before the output layer.
        """
        states = torch.randn(4, head.in_features, generator=torch.Generator().manual_seed(1)).to(self.device)
        with torch.inference_mode():
            wanted = self.logits(states.to(self.dtype))
            plain = self.ops.logits(states.to(self.dtype), head.packed)
            largest = plain.abs().argmax()
            ratio = float(wanted.flatten()[largest] / plain.flatten()[largest])
            cap = getattr(self._model.config, "final_logit_softcapping", None)
            tails: list[LogitsTail] = [(), (("scale", ratio),)]
            tails += [(("softcap", float(cap)),)] if cap else []
            close = 1e-3 * float(wanted.abs().max())
            for tail in tails:
                found = finish_logits(self.ops, plain.clone(), tail)
                if float((found - wanted).abs().max()) <= close:
                    return tail
        raise NotImplementedError(
            f"{self.config.architecture} does more than scale what its output layer gives"
        )

    def linear_sites(self) -> tuple[LinearSite, ...]:
        """Linear layers on our kernels, under the names that Transformers has for them."""
        return tuple(
            LinearSite(module.packed, module.in_features, (SitePart(name, module.out_features),))
            for name, module in self._model.named_modules()
            if isinstance(module, PackedLinear) and module is not self._model.get_output_embeddings()
        )

    def operations(self) -> Ops:
        return self.ops

    def with_operations(self, ops: Ops) -> DecoderModel:
        for module in self._model.modules():
            if isinstance(module, PackedLinear):
                module.compute_with(ops)
        return self

    def weight_bytes(self) -> int:
        return self.weight_size

    def _hand_positions(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Tables of positions that are told no position, or one that their model counted for itself [T]."""
        told = kwargs.get("position_ids")
        if self._positions is None or (told is not None and told.ndim != 1):
            return None
        return args, {**kwargs, "position_ids": self._positions}

    def note(self, layer: int, hidden: Tensor) -> None:
        """Hidden states entering a layer [B, n, H]."""
        if layer in self._wanted:
            self._captured.setdefault(layer, []).append(_rows(hidden).clone())


def _rows(hidden: Tensor) -> Tensor:
    """[B, n, H] -> [B * n, H]"""
    return hidden.reshape(-1, hidden.shape[-1])


def _gathered(parts: Sequence[Part], found: Sequence[Tensor], total: int) -> Tensor:
    """Results of parts as rows of the batch [T, H]."""
    if parts[0].rows is None:
        return found[0]
    hidden = found[0].new_empty((total, found[0].shape[-1]))
    for part, values in zip(parts, found, strict=True):
        assert part.rows is not None
        hidden[part.rows] = values if part.places is None else values[part.places]
    return hidden


class _Given(nn.Module):
    """Stands for a model's body and gives the hidden states that were put here."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self._body = (body,)  # not a module of this one
        self.hidden: Tensor | None = None
        self.ids = torch.zeros((1, 1), dtype=torch.int64)

    @property
    def decoder(self) -> nn.Module:
        """Some output layers stand behind a part of the body."""
        return self

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return _Output(self.hidden)

    def __getattr__(self, name: str) -> Any:
        """Some output layers ask the body for a number, such as a scale."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self._body[0], name)


class _Output:
    """The result of a body: hidden states, and nothing under any other name."""

    def __init__(self, hidden: Tensor | None) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, i: Any) -> Any:
        return (self.last_hidden_state,)[i]

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)
        return


class _Entering:
    def __init__(self, decoder: GeneralDecoder, layer: int) -> None:
        self._decoder, self._layer = decoder, layer

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._decoder.note(self._layer, args[0] if args else kwargs["hidden_states"])


class _Leaving:
    def __init__(self, decoder: GeneralDecoder, layer: int) -> None:
        self._decoder, self._layer = decoder, layer

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self._decoder.note(self._layer, output if isinstance(output, Tensor) else output[0])
