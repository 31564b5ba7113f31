"""Where a recorded pass can go on with the rows of its head alone.

Behind the last layer's keys and values, nothing but a row's own result depends on it. Of a prompt, logits of one row
are wanted, if any: the last attention and all that follows it are then run for this row (csrc/narrow.h). What is alive
at that place moves up, so that rows stand side by side again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from draftwise.kernels.cpu.linear import Epilogue
from draftwise.kernels.cpu.pass_records import Operation

# dw::OpKind of csrc/program.h
_LINEAR, _ROPE_WRITE, _ATTENTION, _NARROW, _ADAPT = 5, 6, 7, 21, 22
_RANKS = range(60, 63)
"""What ranks do together: all with the same rows, whatever each of them is asked for."""
_TWO = frozenset((3, 6, 9, 10, 11, 12, 18))
"""Those that read y: ADD_RMS_NORM, ROPE_WRITE, CONCAT, ADD, CLEAR_FIRST, EXPERTS, MUL."""
_IN_PLACE = frozenset((6, 10, 11, 14, 15, 22))
"""Those without a result of their own: ROPE_WRITE, ADD, CLEAR_FIRST, SCALE, SOFTCAP, ADAPT."""


def with_narrowing(
    body: Sequence[Operation], row_bytes: Sequence[int], inputs: int, results: Collection[int]
) -> list[Operation]:
    """``body`` with OP_NARROW in front of its last attention, once for each buffer that is read behind it; unchanged
    where that cannot be.

    Args:
        row_bytes: of each buffer.
        inputs: buffers 0 .. inputs - 1 are the caller's, and stay as they are.
        results: buffers that the caller reads. All must be written behind the place or move there: rows would stand
            in different places otherwise.
    """
    attentions = [i for i, operation in enumerate(body) if operation.kind == _ATTENTION]
    if not attentions:
        return list(body)
    place = attentions[-1]
    tail = body[place:]
    if any(operation.kind == _ROPE_WRITE or _among_ranks(operation) for operation in tail):
        return list(body)
    alive: list[int] = []
    written: set[int] = set()
    for operation in tail:
        alive += [x for x in _read(operation) if x not in written and x not in alive]
        if operation.kind not in _IN_PLACE:
            written.add(operation.out)
    if any(x < inputs for x in alive) or not written.union(alive).issuperset(results):
        return list(body)
    moves = [Operation(kind=_NARROW, x=x, width=row_bytes[x]) for x in alive]
    return [*body[:place], *moves, *tail]


def _among_ranks(operation: Operation) -> bool:
    return operation.kind in _RANKS or (operation.kind == _ADAPT and operation.weight2 is not None)


def _read(operation: Operation) -> Iterator[int]:
    """Buffers whose rows it reads."""
    yield operation.x
    if operation.kind in _TWO:
        yield operation.y
    if operation.kind == _ADAPT or (operation.kind == _LINEAR and operation.epilogue == Epilogue.ADD):
        yield operation.out
