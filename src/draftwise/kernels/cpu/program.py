"""A recorded pass, replayed with one native call; `draftwise.kernels.cpu.recording` makes them."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from draftwise.kernels.cpu.attention import address, ends_of, fill_view
from draftwise.kernels.cpu.chains import ChainOutput, Feedback, fill_draws, target_ids_at
from draftwise.kernels.cpu.checks import refuse, require
from draftwise.kernels.cpu.library import NativeLibrary, release_with
from draftwise.kernels.cpu.pass_records import Operation, PassInput, PassOutput, PassRows, Results
from draftwise.kernels.cpu.pool import ThreadPool
from draftwise.kernels.cpu.trees import NativeTrees, TreeOutput
from draftwise.types import ChainDraws, DraftedTree, StepInput, TreeDraws, new_record

_PTR, _I32, _I64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64

_INT64 = np.dtype(np.int64)
_MIN_CAPACITY = 64
_FEW = 512
"""Of so many rows, or fewer, the tensors of tokens, positions and slots are remembered: packers use these again."""
_KEPT_BYTES = 4 << 20
"""Results that nobody reads are written to the same memory in every call, if it is no more."""
ALIGNMENT = 64  # bytes; of each buffer's bytes per row, so that every buffer starts on a cache line


class Program:
    """A recorded pass. Made by `Recording.finish`; runs on one thread at a time."""

    def __init__(
        self,
        library: NativeLibrary,
        pool: ThreadPool,
        *,
        body: Sequence[Operation],
        head: Sequence[Operation],
        offsets: Sequence[int],
        row_bytes: int,
        features: int | None,
        hidden: tuple[int, torch.dtype],
        captured: Mapping[int, tuple[int, torch.dtype]],
        logits: tuple[int, torch.dtype],
        kept: list[object],
    ) -> None:
        create = library.function("dw_program_create", _PTR, [_PTR, _I64, _PTR, _I64, _PTR, _I64, _I32])
        destroy = library.function("dw_program_destroy", None, [_PTR])
        self._call = library.function("dw_program_run", None, [_PTR, _PTR, ctypes.POINTER(PassInput)])
        self._chains = library.function(
            "dw_program_chains",
            None,
            [_PTR, _PTR, ctypes.POINTER(PassInput), ctypes.POINTER(ChainOutput)],
        )
        self._trees = library.function(
            "dw_program_trees", None, [_PTR, _PTR, ctypes.POINTER(PassInput), ctypes.POINTER(TreeOutput)]
        )
        self.num_operations = len(body) + len(head)
        self._pool = pool
        self._kept = kept
        self._row_bytes = row_bytes
        self._hidden, self._captured, self._logits = hidden, dict(captured), logits
        self._features = features
        self._first_result = 3 if features is None else 4
        self._externals = (_PTR * (self._first_result + 2 + len(captured)))()
        places = np.array(offsets, np.int64)
        self._pointer: int = create(
            (Operation * len(body))(*body),
            len(body),
            (Operation * len(head))(*head),
            len(head),
            address(places),
            len(places),
            len(self._externals),
        )
        release_with(self, destroy, self._pointer)
        self._input = PassInput()
        self._input.externals = ctypes.addressof(self._externals)
        self._arena = torch.empty(0, dtype=torch.uint8)
        self._room: tuple[tuple[int, int], Tensor, Tensor] | None = None
        self._own: Results | None = None  # of passes whose results nobody reads, see `_prepare`
        self._fed_back: tuple[Feedback, int, int | None] | None = None  # the latest, see `feed_back`
        self._checked: dict[
            int, PassRows
        ] = {}  # by number of rows: the latest tensors, which a packer uses again

    def run(
        self,
        batch: StepInput,
        head_rows: npt.NDArray[np.int64] | int = 0,
        features: Tensor | None = None,
        *,
        head_only: bool = False,
    ) -> PassOutput:
        """One pass.

        Args:
            batch: T rows.
            head_rows: rows that logits are wanted for, int64 [M]; or the number of them if they are the first ones.
            features: [T, F] where the recording asked for them.
            head_only: nobody reads the other results, whose contents then are undefined.
        """
        results, *kept = self._prepare(batch, head_rows, features, head_only=head_only)
        self._call(self._pointer, self._pool.pointer, self._input)
        del kept
        logits = results.logits if self._input.head_rows else None
        return PassOutput(results.hidden, dict(zip(self._captured, results.captured, strict=True)), logits)

    def chains(
        self,
        batch: StepInput,
        head_rows: npt.NDArray[np.int64] | int,
        steps: int,
        draws: ChainDraws | None = None,
        features: Tensor | None = None,
        feedback: Feedback | None = None,
    ) -> tuple[npt.NDArray[np.int64], Tensor | None]:
        """Continue each request: a pass over ``batch``, then passes of one row each, in one native call.

        Args:
            batch: R requests without trees; block tables must reach ``steps - 1`` tokens further.
            head_rows: the last row of each request, as in `run`.
            steps: tokens per request.
            draws: how tokens are drawn; None: the most likely, the lowest of those that tie.
            features: [T, F] of the first pass, where the recording asked for them; the following ones get the rows that
                ``feedback`` says. Positions of such a batch are one less than its keys.

        Returns:
            Tokens int64 [R, steps], and, if they were sampled, the distributions they were drawn from, float32
            [R, steps, V].
        """
        tables = batch.attention
        require(tables.ancestors_np is None, "chains behind requests without trees")
        tokens = np.empty((len(tables.context_len_np), steps), np.int64)
        positions = ends_of(tables)
        kept = self._prepare(batch, head_rows, features, own=True)
        out = ChainOutput(steps, self._logits[0], address(tokens), positions.buffer_info()[0])
        out.feature_in = out.feature_out = -1
        if feedback is not None:
            self.feed_back(out, feedback)
        q = fill_draws(out, draws, len(tokens))
        self._chains(self._pointer, self._pool.pointer, self._input, out)
        del kept
        return tokens, q

    def trees(
        self,
        batch: StepInput,
        head_rows: npt.NDArray[np.int64] | int,
        draws: Sequence[TreeDraws],
        features: Tensor | None = None,
        feedback: Feedback | None = None,
    ) -> Sequence[DraftedTree]:
        """Draft a tree below each request: a pass over ``batch``, then one per level, in one native call.

        Args:
            batch: R requests without trees; block tables must reach as far as nodes may be fed, up to 64 keys further.
            head_rows: the last row of each request, as in `run`.
            draws: one per request.
            features: as in `chains`.
            feedback: as in `chains`.
        """
        tables = batch.attention
        starts_np = tables.query_start_np
        contexts = tables.context_len_np + starts_np[1:] - starts_np[:-1]
        trees = NativeTrees.make(draws, contexts, self._logits[0])
        kept = self._prepare(batch, head_rows, features, trees.output.room, own=True)
        if feedback is not None:
            self.feed_back(trees.output, feedback)
        self._trees(self._pointer, self._pool.pointer, self._input, trees.output)
        del kept
        return trees.result()

    def given(
        self, batch: StepInput, features: Tensor, head_rows: npt.NDArray[np.int64] | int = 0
    ) -> tuple[PassInput, object]:
        """The inputs of native code for the pass that `run` would run, and the objects to keep until it has ended."""
        kept = self._prepare(batch, head_rows, features)
        return self._input, kept

    def room_for(self, rows: int, head_rows: int) -> PassInput:
        """The inputs of native code for passes of its own: arena and results for this many rows, kept here. It fills
        in the batch."""
        require(not self._captured, "a pass with one result beside its logits")
        if rows > self._input.capacity:
            self._grow(rows)
        sizes = rows, head_rows
        if self._room is None or any(size < new for size, new in zip(self._room[0], sizes, strict=True)):
            (width, dtype), (vocab, kind) = self._hidden, self._logits
            self._room = (
                sizes,
                torch.empty((rows, width), dtype=dtype),
                torch.empty((head_rows, vocab), dtype=kind),
            )
        self._input.head_only = False
        _, hidden, logits = self._room
        self._externals[self._first_result] = hidden.data_ptr()
        self._externals[self._first_result + 1] = logits.data_ptr()
        return self._input

    def results(self, rows: int) -> Results:
        """Tensors for what passes of up to so many rows write, with logits of all of them; see `goes_to`."""
        return self._results(rows, rows)

    def goes_to(self, results: Results, *, head_only: bool, adapters: int | None = None) -> PassInput:
        """The inputs of native code for passes of its own, which fills in their rows: let them write there. The arena
        has room for as many rows. ``head_only``: as in `run`. ``adapters``: address of those of the requests, int64."""
        rows = results.logits.shape[0]
        if rows > self._input.capacity:
            self._grow(rows)
        for place, at in enumerate(results.places, self._first_result):
            self._externals[place] = at
        self._input.head_only = head_only
        self._input.adapters = adapters
        return self._input

    @property
    def layers(self) -> tuple[int, ...]:
        """The captured layers, in the order of `Results.captured`."""
        return tuple(self._captured)

    @property
    def given_room(self) -> PassInput:
        """What `make_room` and `give_features` prepared."""
        return self._input

    @property
    def pointer(self) -> int:
        """The ``dw::Program*``."""
        return self._pointer

    @property
    def widths(self) -> tuple[tuple[int, torch.dtype], int]:
        """The widths of hidden rows, with their type, and of logits."""
        return self._hidden, self._logits[0]

    def feed_back(self, out: ChainOutput | TreeOutput, feedback: Feedback) -> None:
        """Say where the features of a next row come from, and which tokens are drawn."""
        width, dtype = self._hidden if feedback.layer is None else self._captured[feedback.layer]
        if width != self._features or dtype is not self._hidden[1]:
            refuse("features as wide as those that are fed back")
        if self._fed_back is None or self._fed_back[0] is not feedback:
            place = 0 if feedback.layer is None else 1 + list(self._captured).index(feedback.layer)
            self._fed_back = feedback, place, target_ids_at(feedback.target_ids_np, self._logits[0])
        _, place, out.target_ids = self._fed_back
        out.feature_in, out.feature_out = 3, self._first_result + place
        out.feature_bytes = width * dtype.itemsize
        out.key_offset = 1

    def _prepare(
        self,
        batch: StepInput,
        head_rows: npt.NDArray[np.int64] | int,
        features: Tensor | None,
        room: int = 0,
        *,
        own: bool = False,
        head_only: bool = False,
    ) -> tuple[Results, object, object, object, object]:
        """Fill in the input of a pass: its results, and what must be kept until it has run. ``room``: rows that later
        passes over the same results may have; ``own``: nobody reads the results but native code, which reads the
        head's rows; ``head_only``: nobody reads more than logits."""
        rows: int = batch.token_ids.shape[0]
        call, externals = self._input, self._externals
        index: npt.NDArray[np.int64] | None = None
        if isinstance(head_rows, int):
            count = head_rows
        else:
            index = head_rows
            count = index.shape[0]
            if index.dtype != _INT64 or not index.flags.c_contiguous:
                refuse("the head's rows in int64")
        results = self.make_room(rows if rows > room else room, count if count > room else room, own=own)
        given = self._checked.get(rows)
        if (
            given is None
            or given.token_ids is not batch.token_ids
            or given.positions is not batch.positions
            or given.slots is not batch.slots
        ):
            given = self._check(batch, rows)
        externals[0], externals[1], externals[2] = given.places
        if self._features is not None:
            self.give_features(features, rows)
        call.rows = rows
        call.head_rows = count
        call.head_index = None if index is None else address(index)
        call.head_only = own or head_only
        adapters = None if batch.adapters is None else np.array(batch.adapters, np.int64)
        call.adapters = None if adapters is None else address(adapters)
        return results, fill_view(call.batch, batch.attention, rows), index, given, adapters

    def give_features(self, features: Tensor | None, rows: int) -> None:
        """Let the next pass read these, [rows, F], where the recording asked for features."""
        if self._features is None:
            return
        if (
            features is None
            or features.shape != (rows, self._features)
            or features.dtype is not self._hidden[1]
            or not features.is_contiguous()
        ):
            refuse("features of the hidden states' type for each row")
        self._externals[3] = features.data_ptr()

    def make_room(self, rows: int, head_rows: int, *, own: bool) -> Results:
        """See that the next pass has an arena for so many rows, and memory for its results, which the caller keeps.
        ``own``: as in `_prepare`."""
        most = rows if rows > head_rows else head_rows
        if most > self._input.capacity:
            self._grow(most)
        results = self._own if own else None
        if results is None or results.hidden.shape[0] < rows or results.logits.shape[0] < head_rows:
            results = self._results(rows, head_rows)
            if own and results.nbytes <= _KEPT_BYTES:
                self._own = results
        externals = self._externals
        for place, at in enumerate(results.places, self._first_result):
            externals[place] = at
        return results

    def _results(self, rows: int, head_rows: int) -> Results:
        """Fresh tensors for what a pass writes."""
        width, dtype = self._hidden
        hidden = torch.empty((rows, width), dtype=dtype)
        captured: list[Tensor] = []
        places = [hidden.data_ptr()]
        for width, dtype in self._captured.values():
            value = torch.empty((rows, width), dtype=dtype)
            captured.append(value)
            places.append(value.data_ptr())
        width, dtype = self._logits
        logits = torch.empty((head_rows, width), dtype=dtype)
        places.append(logits.data_ptr())
        return new_record(Results, (hidden, captured, logits, places))

    def _check(self, batch: StepInput, rows: int) -> PassRows:
        """See that the tensors of the rows are what a pass reads."""
        token_ids, positions, slots = batch.token_ids, batch.positions, batch.slots
        for given in (token_ids, positions, slots):
            require(
                given.dtype is torch.int64 and given.shape == (rows,) and given.is_contiguous(),
                "a token, a position and a slot for each row, in int64",
            )
        found = PassRows(
            token_ids, positions, slots, (token_ids.data_ptr(), positions.data_ptr(), slots.data_ptr())
        )
        if rows <= _FEW:
            self._checked[rows] = found
        return found

    def _grow(self, rows: int) -> None:
        capacity = _MIN_CAPACITY
        while capacity < rows:
            capacity *= 2
        self._arena = torch.empty(self._row_bytes * capacity + ALIGNMENT, dtype=torch.uint8)
        start = self._arena.data_ptr()
        self._input.arena = -(-start // ALIGNMENT) * ALIGNMENT
        self._input.capacity = capacity
