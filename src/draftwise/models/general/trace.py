"""Watches one pass of a Transformers model and says what it computes, as a graph of `nodes`.

The pass runs on numbers, a few rows at positions far apart. Every operation of torch on the way is seen. Beside each
tensor that depends on the tokens stands a `Rows`: for each of its elements, of which row and column of which node it
is. Views, slices and transpositions are done to these numbers as they are done to the tensor, so that it does not
matter in which of the many ways a model cuts its projections into heads.

Worked example: a fused projection gives node L of width 6, two rows: numbers 0..5 and 6..11 as ``index``. A view as
[2, 3, 2] and the slice [:, 1] leave [[2, 3], [8, 9]]: columns 2 and 3 of L, rows 0 and 1. What rotates them multiplies
by cosines and adds the other half times sines: `Rows.factor`, and a second index with a factor of its own.

What is not understood becomes `Unknown` and is an error only if the result depends on it. Nothing here has to be
proven: what is put together from the graph is compared with the model afterwards (`check`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from draftwise.kernels.base import FUNCTIONS
from draftwise.models.general.attention import LayerCall, plain_attention
from draftwise.models.general.check import sample
from draftwise.models.general.experts import Stack
from draftwise.models.general.mixing import following
from draftwise.models.general.model import GeneralDecoder
from draftwise.models.general.nodes import Attend, CannotAssemble, Given, Linear, Node
from draftwise.models.general.rows import Rows, Tokens, Unknown, Value
from draftwise.models.general.rules import Rules
from draftwise.models.general.stored import StoredLinear
from draftwise.models.general.ways import Interface

_ROUTED = 40  # rows from which a routing is told


@dataclass(frozen=True)
class Traced:
    """``entering[i]``: the hidden states that enter layer i, and behind the last those that leave it."""

    hidden: Node
    entering: Mapping[int, Node]
    given: Given
    logits: Node
    positions: Tensor  # [T] int64, of the rows of `Turn`


class Tracer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows the operations inside of it. ``positions`` [T]: those of the rows. ``widths``: of linear layers whose
    results ``numbers`` will hold, [T, width] float32."""

    def __init__(self, positions: Tensor, widths: frozenset[int] = frozenset()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._rules = Rules(positions, widths)
        self.numbers: Mapping[Linear, Tensor] = self._rules.numbers
        self.paused = False

    def put_tokens(self, tensor: Tensor) -> None:
        self._rules.put(tensor, Tokens())

    def put_unknown(self, tensor: Tensor, why: str) -> None:
        self._rules.put(tensor, Unknown(why))

    def put_node(self, tensor: Tensor, node: Node, rows_at: int) -> None:
        """``tensor`` is the result of ``node``; dimension ``rows_at`` is that of the rows."""
        self._rules.put(tensor, self._rules.fresh(node, tensor.shape, rows_at))

    def put_function(self, tensor: Tensor, x: Tensor, function: str) -> None:
        """``tensor`` is a function of ``x``, if rows are known of that."""
        value = self._rules.held(x)
        if isinstance(value, Rows):
            with suppress(CannotAssemble):
                self._rules.put(tensor, self._rules.unary(value, function))

    def held(self, tensor: Tensor) -> Value | None:
        """The known content of a tensor; None: it depends on no token."""
        return self._rules.held(tensor)

    def put_product(self, tensor: Tensor, x: Tensor, module: StoredLinear) -> None:
        """``tensor`` is what ``module`` made of ``x``."""
        try:
            value = self._rules.product(self._rules.held(x), module.layer, module.bias, tensor)
        except CannotAssemble as error:
            value = Unknown(str(error))
        self._rules.put(tensor, value)

    def node_of(self, tensor: Tensor) -> Node:
        """Raises CannotAssemble if what the tensor holds is no node."""
        value = self._rules.held(tensor)
        if isinstance(value, Rows):
            return self._rules.node(value)[0]
        if value is None:
            raise CannotAssemble("what it computes depends on no token")
        raise CannotAssemble(value.why if isinstance(value, Unknown) else "it ends in the middle of a norm")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not self.paused:
            self._rules.follow(func, args, kwargs or {}, out)
        return out


class _Taking:
    """Takes attention's calls in a trace."""

    def __init__(self, tracer: Tracer, calls: Sequence[LayerCall]) -> None:
        self._tracer, self._calls = tracer, calls
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
        tracer, layer = self._tracer, self._next
        call = self._calls[layer]
        assert module is call.module, "calls come in another order"
        self._next += 1
        tracer.paused = True
        out = plain_attention(call, query, key, value, options.get("s_aux"))  # [1, T, Hq, D]
        tracer.paused = False
        try:
            q, k, v = (tracer.node_of(part) for part in (query, key, value))
            node = Attend(out.shape[2] * out.shape[3], layer, q, k, v, options.get("s_aux"))
            tracer.put_node(out, node, 1)
        except CannotAssemble as error:
            tracer.put_unknown(out, str(error))
        return out


def _functions(modules: Iterable[nn.Module]) -> dict[nn.Module, str]:
    """Modules that do nothing but a function of `FUNCTIONS`, whatever formula they write it with."""
    x = torch.linspace(-9, 9, 601)
    values = {name: function(x) for name, function in FUNCTIONS.items()}
    found: dict[nn.Module, str] = {}
    for module in modules:
        if next(module.children(), None) is not None or next(module.parameters(), None) is not None:
            continue
        with suppress(Exception):  # it wants something else than one tensor
            own = module(x)
            name = next((n for n, v in values.items() if torch.allclose(own, v, rtol=1e-5, atol=1e-6)), None)
            if name is not None:
                found[module] = name
    return found


@contextmanager
def _naming(
    functions: Mapping[nn.Module, str], modules: Iterable[nn.Module], tracer: Tracer
) -> Iterator[None]:
    """What these modules give is what their name says, and what stored layers give is their product."""

    def named(module: nn.Module, args: tuple[Any, ...], out: Tensor) -> None:
        if args:
            tracer.put_function(out, args[0], functions[module])

    def before(module: nn.Module, args: tuple[Any, ...]) -> None:
        tracer.paused = True  # how it multiplies is its own: a made-up matrix would be kept as a constant

    def multiplied(module: nn.Module, args: tuple[Any, ...], out: Tensor) -> None:
        assert isinstance(module, StoredLinear)
        tracer.paused = False
        if args:
            tracer.put_product(out, args[0], module)
        else:
            tracer.put_unknown(out, "it calls a linear layer by the name of what it gives")

    hooks = [module.register_forward_hook(named) for module in functions]
    stored = [module for module in modules if isinstance(module, StoredLinear)]
    hooks += [module.register_forward_pre_hook(before) for module in stored]
    hooks += [module.register_forward_hook(multiplied) for module in stored]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def _explained() -> Iterator[None]:
    try:
        yield
    except CannotAssemble:
        raise
    except IndexError as error:
        raise _OutOfRange(str(error)) from error
    except Exception as error:  # whatever a model's code raises at rows so far apart
        if "out of bounds" in str(error):
            raise _OutOfRange(str(error)) from error
        raise CannotAssemble(f"its code fails: {type(error).__name__}: {error}") from error


def trace(
    decoder: GeneralDecoder, way: Interface, stacks: Mapping[nn.Module, Stack] = MappingProxyType({})
) -> Traced:
    """Watch ``decoder`` compute a few rows and their logits. ``stacks``: its mixtures of experts.

    Raises:
        CannotAssemble: it does something that has no node.
    """
    for last in (decoder.config.max_model_len - 1, 333, 40):  # a config may say more positions than there are
        try:
            return _trace(decoder, way, min(last, decoder.config.max_model_len - 1), stacks)
        except _OutOfRange as error:
            why = str(error)
    raise CannotAssemble(why)


class _OutOfRange(Exception):
    """A position is beyond a table."""


def _trace(decoder: GeneralDecoder, way: Interface, last: int, stacks: Mapping[nn.Module, Stack]) -> Traced:
    spread = sorted({min(p, last) for p in (0, 1, 2, 7, 40, 333, 4093, last)} | _more(last, stacks))
    positions = torch.tensor(spread, device=decoder.device)
    tokens = torch.tensor(sample(decoder.config.vocab_size, len(spread), seed=8), device=decoder.device)
    tracer = Tracer(positions, frozenset(stack.count for stack in stacks.values()))
    tracer.put_tokens(tokens)
    modules = list(decoder.modules())
    naming = _naming(_functions(modules), modules, tracer)
    with (
        _explained(), torch.inference_mode(False), torch.no_grad(),
        naming, following(stacks, tracer), tracer,
    ):  # fmt: skip
        part = way.part(tokens, positions, _Taking(tracer, way.calls))
        output = decoder.compute([part], len(spread), range(decoder.num_blocks + 1))
        hidden = tracer.node_of(output.hidden)
        entering = {i: tracer.node_of(x) for i, x in output.captured.items()}
        given = Given(hidden.width)
        states = torch.zeros((len(spread), hidden.width), dtype=decoder.dtype, device=decoder.device)
        tracer.put_node(states, given, 0)
        logits = tracer.node_of(decoder.logits(states))
    return Traced(hidden, entering, given, logits, positions.cpu())


def _more(last: int, stacks: Mapping[nn.Module, Stack]) -> set[int]:
    """Positions of rows from which a routing is told."""
    return set(range(0, last, max(1, last // _ROUTED))) if stacks else set()
