"""The LoRA adapters of an engine, their numbers, and which of them are kept in memory."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from draftwise.config.lora import LoRARequest
from draftwise.engine.core import EngineCore
from draftwise.engine.outputs import AdapterStats
from draftwise.errors import ConfigError, ModelLoadError, RequestError
from draftwise.models.lora.low_rank import LowRank
from draftwise.models.lora.peft import read_adapter

Between = Callable[[Callable[[], object]], None]
"""Runs a function between two steps, in the engine's thread, and waits for it."""


def at_once(work: Callable[[], object]) -> None:
    """`Between` of an engine that steps when its caller asks for it."""
    work()


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Lease:
    """While somebody has this, its adapter is kept in memory. ``slot``: the adapter's number, `Request.adapter`."""

    slot: int


@dataclass(slots=True)
class _Entry:
    request: LoRARequest
    lease: weakref.ref[Lease]
    slot: int
    used: int  # a clock that counts uses
    pinned: bool  # loaded by name: stays until it is unloaded


class Adapters:
    """Adapters are read when the first request names them, and stay in memory for later requests: at most ``most`` that
    nobody uses, of which the least recently used goes first. Which of them the executor holds is decided step by step
    (`sched.adapters`). Numbers (slots) are never given twice, so an adapter that is read again under its name finds no
    old keys in the prefix cache."""

    def __init__(self, core: EngineCore, *, enabled: bool, most: int, max_rank: int) -> None:
        self._core = core
        self._enabled = enabled
        self._most = most
        self._max_rank = max_rank
        self._entries: dict[int, _Entry] = {}  # by the user's number
        self._leaving: list[_Entry] = []  # unloaded; requests may still have them
        self._names: dict[int, str] = {}  # by slot, of all in memory; under the engine's lock
        self._next_slot = 1
        self._uses = 0
        self._reading = threading.Lock()  # one adapter is read at a time, for seconds perhaps
        self._lock = threading.Lock()  # of the books; taken after the other one

    def lease(self, request: LoRARequest | None, between: Between) -> Lease | None:
        """A request's adapter, which is read if necessary; None: the request has none.

        Raises:
            RequestError: adapters are not enabled, this one cannot be loaded, or its number is taken.
        """
        if request is None:
            return None
        if not isinstance(request, LoRARequest):
            raise RequestError(f"lora_request must be a LoRARequest, not {type(request).__name__}")
        lease = self._known(request, between)
        if lease is None:
            with self._reading:
                lease = self._known(request, between) or self._load(request, between, pinned=False)
        return lease

    def has(self, request: LoRARequest) -> bool:
        """Whether an adapter need not be read. It takes no lock."""
        return isinstance(request, LoRARequest) and request.lora_int_id in self._entries

    def add(self, request: LoRARequest, between: Between) -> None:
        """Read an adapter that stays until `remove`. Raises RequestError as `lease`, or if its number is taken."""
        with self._reading:
            if request.lora_int_id in self._entries:
                raise RequestError(f"lora_request: lora_int_id {request.lora_int_id} is in use")
            self._load(request, between, pinned=True)

    def remove(self, number: int, between: Between) -> bool:
        """Forget an adapter by the user's number; its requests go on with it. False: there is no such adapter."""
        with self._lock:
            entry = self._entries.pop(number, None)
            if entry is None:
                return False
            self._leaving.append(entry)
            self._sweep(between)
            return True

    def sweep(self, between: Between) -> None:
        """Free what requests that have ended kept in memory; `lease`, `add` and `remove` do so, too."""
        with self._lock:
            self._sweep(between)

    def after_fork_in_child(self) -> None:
        """Called in a forked child: a thread that is not here may have been reading an adapter."""
        self._reading, self._lock = threading.Lock(), threading.Lock()

    def requests(self) -> list[LoRARequest]:
        """The adapters in memory. It takes no lock, which who sweeps holds for as long as a step."""
        return [entry.request for entry in list(self._entries.values())]

    def stats(self) -> AdapterStats | None:
        """Whose requests run and wait; None: adapters are not enabled. Call it under the engine's lock."""
        if not self._enabled:
            return None
        scheduler = self._core.scheduler
        running, waiting = scheduler.adapters_by_state()
        return AdapterStats(
            scheduler.config.max_adapters,
            *(tuple(sorted({self._names[slot] for slot in slots})) for slots in (running, waiting)),
        )

    def _known(self, request: LoRARequest, between: Between) -> Lease | None:
        """A lease of an adapter in memory; None: it has to be read."""
        with self._lock:
            entry = self._entries.get(request.lora_int_id)
            if entry is None:
                return None
            if entry.request != request:
                raise RequestError(
                    f"lora_request: lora_int_id {entry.request.lora_int_id} is {entry.request.lora_name!r} at "
                    f"{entry.request.lora_path!r}; give another adapter another number"
                )
            lease = entry.lease() or Lease(entry.slot)
            entry.lease = weakref.ref(lease)
            self._uses += 1
            entry.used = self._uses
            self._sweep(between)
            return lease

    def _load(self, request: LoRARequest, between: Between, *, pinned: bool) -> Lease:
        """Read an adapter that is not in memory. Nobody else reads one meanwhile."""
        if not self._enabled:
            raise RequestError("lora_request: this engine was started without enable_lora")
        adapter = self._read(request)
        try:
            between(lambda: self._core.executor.check_adapter(adapter))
        except (ModelLoadError, ConfigError) as error:
            raise RequestError(f"lora_request: {request.lora_path}: {error}") from error
        with self._lock:
            lease = Lease(self._next_slot)
            self._next_slot += 1
            with self._core.lock:
                self._core.adapters[lease.slot] = adapter
                self._names[lease.slot] = request.lora_name
            self._uses += 1
            self._entries[request.lora_int_id] = _Entry(
                request, weakref.ref(lease), lease.slot, self._uses, pinned
            )
            self._sweep(between)
            return lease

    def _read(self, request: LoRARequest) -> Mapping[str, LowRank]:
        try:
            return read_adapter(request.lora_path, max_rank=self._max_rank)
        except ModelLoadError as error:
            raise RequestError(f"lora_request: {error}") from error

    def _sweep(self, between: Between) -> None:
        """Free adapters that were unloaded, or are too many, and that nobody uses."""
        cached = [entry for entry in self._entries.values() if not entry.pinned]
        excess = max(0, len(cached) - self._most)
        if not excess and not self._leaving:
            return
        with self._core.lock:
            queued = self._core.scheduler.adapters_in_use()

            def idle(entry: _Entry) -> bool:
                return entry.lease() is None and entry.slot not in queued

            gone = [entry for entry in self._leaving if idle(entry)]
            self._leaving = [entry for entry in self._leaving if entry not in gone]
            oldest = sorted(filter(idle, cached), key=lambda entry: entry.used)[:excess]
            for entry in oldest:
                del self._entries[entry.request.lora_int_id]
            for entry in (*gone, *oldest):
                del self._core.adapters[entry.slot], self._names[entry.slot]
                self._core.scheduler.adapters.forget(entry.slot)
            moves = bool(gone or oldest) and self._core.scheduler.adapters.moves
        if moves:
            between(self._core.move_adapters)
