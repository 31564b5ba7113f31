"""How kernels are handed to Triton's compiler."""

import inspect
from collections.abc import Callable
from typing import Any

import triton


def kernel(*specialized: str) -> Callable[[Callable[..., Any]], Any]:
    """`triton.jit` for a function that is compiled once, whatever its arguments are aligned to, and not again for whole
    numbers that are 1 or multiples of 16; but for the arguments that are named here."""

    def compiled(function: Callable[..., Any]) -> Any:
        names = [
            name
            for name, parameter in inspect.signature(function).parameters.items()
            if parameter.annotation is inspect.Parameter.empty and name not in specialized
        ]
        return triton.jit(function, do_not_specialize=names, do_not_specialize_on_alignment=names)

    return compiled
