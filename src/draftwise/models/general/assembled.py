"""A model put together from the graph of a trace, out of our operations alone: a list of calls of `Ops`.

So a model that nobody wrote a file for runs as those do that have one: in any weight format, recorded into one native
call, with the same bits in any batch.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from draftwise.kernels.base import Ops
from draftwise.kernels.handles import Linear, Norm, Rope
from draftwise.kv.storage import KVLayerSpec, KVStorage
from draftwise.models.base import DecoderModel, LinearSite, LogitsTail, SharedWeights, finish_logits
from draftwise.models.config import ModelConfig, RawConfig
from draftwise.models.general.attention import LayerCall
from draftwise.models.general.nodes import Node
from draftwise.types import StepInput, TargetOutput


@dataclass(slots=True)
class Pass:
    """One pass: its batch, the rotations of its rows, and the results so far."""

    ops: Ops
    ropes: list[Tensor] = field(default_factory=list)
    results: dict[Node, Tensor] = field(default_factory=dict)
    input: tuple[StepInput, KVStorage] | None = None  # None: only logits are computed

    @property
    def batch(self) -> StepInput:
        assert self.input is not None
        return self.input[0]

    def entries(self, layer: int) -> tuple[Tensor, ...]:
        """The entries of the cache."""
        assert self.input is not None
        return self.input[1].layer(layer)


Run = Callable[[Pass], Tensor]


@dataclass(slots=True)
class Step:
    """Computes ``node``; the results ``done`` are wanted by nobody after it."""

    node: Node
    run: Run
    done: list[Node] = field(default_factory=list)


def attended(
    work: Pass,
    qkv: Tensor,
    call: LayerCall,
    layer: int,
    scale: float,
    rope: int,
    norms: tuple[Norm | None, Norm | None],
    sinks: Tensor | None,
) -> Tensor:
    """Attention of packed rows of queries, keys and values."""
    ops, attention = work.ops, work.batch.attention
    entries, heads, place = work.entries(layer), call.heads, None
    if attention.apart is not None:
        place = attention.apart.queries(qkv.shape[0], heads.num_heads, heads.head_dim, qkv.dtype)
    q = ops.qkv_rope_write(
        qkv, heads, work.ropes[rope], entries, work.batch.slots, norms[0], norms[1], out=place
    )
    return ops.attention(q, entries, attention, heads, scale, call.window, call.softcap, sinks)


@dataclass(frozen=True, slots=True)
class AssembledParts:
    """The data that an `AssembledDecoder` runs on. ``entering``: which layers the result of a node enters."""

    calls: Sequence[LayerCall]
    body: Sequence[Step]
    before_head: Sequence[Step]
    hidden: Node
    given: Node
    head_input: Node
    head: Linear
    tail: LogitsTail
    ropes: Sequence[Rope]
    entering: Mapping[Node, Sequence[int]]
    embedding: Tensor | None
    num_bytes: int
    num_linears: int
    num_mixtures: int
    sites: tuple[LinearSite, ...]


def cut_behind(parts: AssembledParts, count: int) -> AssembledParts:
    """The first ``count`` layers, then what stands behind the last one, reading the result of the cut.

    Raises:
        NotImplementedError: what stands behind the last layer reads more than that layer's result, or layers are not
            told apart.
    """
    entering = {number: node for node, numbers in parts.entering.items() for number in numbers}
    last = max(entering, default=0)
    if count not in entering or last not in entering or not 1 <= count <= last:
        raise NotImplementedError("its layers are not told apart, so that it cannot be cut behind one")
    cut, end = entering[count], entering[last]
    order = [step.node for step in parts.body]
    kept, behind = parts.body[: order.index(cut) + 1], parts.body[order.index(end) + 1 :]
    known: set[Node] = {end}
    for step in behind:
        if not known.issuperset(step.node.inputs()):
            raise NotImplementedError("what stands behind its last layer reads more than that layer's result")
        known.add(step.node)
    joint = Step(end, lambda work: work.results[cut])
    steps = [*kept, *([] if cut is end else [joint]), *behind]
    hidden_done = {node: numbers for node, numbers in parts.entering.items() if node in order[: len(kept)]}
    return replace(parts, body=steps, entering=hidden_done)


class AssembledDecoder(DecoderModel):
    """A decoder of `AssembledParts`."""

    def __init__(self, config: ModelConfig, ops: Ops, parts: AssembledParts) -> None:
        self.config = config
        self.dtype, self.device = ops.dtype, ops.device
        self.same_bits = ops.same_bits
        self.capturable = parts.num_mixtures == 0  # rows are grouped by expert on the host
        self._ops, self._parts = ops, parts
        self._layout = tuple(call.spec for call in parts.calls)

    @classmethod
    def parse(cls, raw: RawConfig, architecture: str, max_model_len: int | None = None) -> ModelConfig:
        raise NotImplementedError("parsed as any model")

    def finish(self) -> None:
        raise NotImplementedError("made finished")

    def kv_layout(self) -> tuple[KVLayerSpec, ...]:
        return self._layout

    def forward(self, batch: StepInput, kv: KVStorage, capture: Sequence[int] = ()) -> TargetOutput:
        parts, ops = self._parts, self._ops
        captured: dict[int, Tensor] = {}
        ropes = [ops.rope_rows(rope, batch.positions) for rope in parts.ropes]
        work = Pass(ops, ropes, input=(batch, kv))
        for step in parts.body:
            result = step.run(work)
            for layer in parts.entering.get(step.node, ()):
                if layer in capture:
                    captured[layer] = ops.copy(result)
            work.results[step.node] = result
            for node in step.done:
                del work.results[node]
            del result  # a recording gives its place to others
        return TargetOutput(work.results[parts.hidden], captured)

    def logits(self, hidden: Tensor) -> Tensor:
        parts, ops = self._parts, self._ops
        work = Pass(ops, results={parts.given: hidden})
        for step in parts.before_head:
            if step.node is not parts.given:
                work.results[step.node] = step.run(work)
        return finish_logits(ops, ops.logits(work.results[parts.head_input], parts.head), parts.tail)

    def shared_weights(self) -> SharedWeights:
        parts = self._parts
        if parts.embedding is None or parts.head_input is not parts.given:
            return super().shared_weights()
        return SharedWeights(parts.embedding, parts.head, self._ops, parts.tail)

    def first_layers(self, count: int) -> DecoderModel:
        part = copy.copy(self)
        part._parts = cut_behind(self._parts, count)
        part._layout = self._layout[:count]
        part.config = replace(
            self.config, num_layers=count, sliding_window=self.config.sliding_window[:count]
        )
        return part

    def linear_sites(self) -> tuple[LinearSite, ...]:
        """Under the names that Transformers has for them."""
        return self._parts.sites

    def operations(self) -> Ops:
        return self._ops

    def with_operations(self, ops: Ops) -> DecoderModel:
        other = copy.copy(self)
        other._ops = ops
        return other

    def weight_bytes(self) -> int:
        return self._parts.num_bytes
