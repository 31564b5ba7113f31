"""How long captured passes take, measured when an engine starts: so its controller knows what plain steps take, and
requests that draft need make none (`AdaptiveController`, ``seated``)."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import torch

from draftwise.adapt.performance import PassTime
from draftwise.graphs.decoder import GraphedDecoder
from draftwise.kv.storage import KVStorage
from draftwise.models.inputs import RowInput, build_step_input

_CONTEXTS = (128, 1024)
"""Tokens before the rows of a request."""
_REPLAYS = 2


@torch.inference_mode()
def pass_times(
    model: GraphedDecoder,
    kv: KVStorage,
    num_blocks: int,
    clock: Callable[[], float] = time.perf_counter,
) -> list[PassTime]:
    """The times of whole passes: of 1, 2, 4, ... requests with every number of rows up to the widest.

    A batch in which a request has two rows runs in the narrowest pass with two rows or more: it takes that pass's time.
    Nothing may be in the cache yet: the passes write to its blocks. Contexts are as long as the model allows.

    Example: passes of 1 and of 4 rows: of one request 1 row, and three times the same for 2, 3 and 4.
    """
    shapes = {(shape.requests, shape.rows) for shape in model.captures.passes}
    widths = sorted({rows for _, rows in shapes})
    found: list[PassTime] = []
    longest = model.config.max_model_len - max(widths, default=1)
    contexts = sorted({min(context, longest) for context in _CONTEXTS}) if longest > 0 else []

    def seconds_of(requests: int, rows: int, context: int) -> float | None:
        """Of one pass; None: no captured pass is so long."""
        blocks = -(-(context + rows) // kv.block_size)
        if blocks > num_blocks:
            return None
        tables = np.arange(requests * blocks, dtype=np.int32).reshape(requests, blocks) % num_blocks
        inputs = [RowInput(np.zeros(rows, np.int32), context, table) for table in tables]
        replay = model.replay_of(build_step_input(inputs, kv.block_size, model.inputs_on), kv)
        if replay is None:
            return None
        replay()
        model.backend.fence().synchronize()
        begun = clock()
        for _ in range(_REPLAYS):
            replay()
        model.backend.fence().synchronize()
        return (clock() - begun) / _REPLAYS

    for requests in sorted({n for n, _ in shapes if n & (n - 1) == 0}):
        for context in contexts:
            before = 0
            for width in widths:
                seconds = seconds_of(requests, width, context) if (requests, width) in shapes else None
                if seconds is not None:
                    each = range(before + 1, width + 1)
                    found += [PassTime(requests, requests * n, context, seconds) for n in each]
                    before = width
    return found
