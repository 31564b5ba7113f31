"""The LoRA adapters of an engine, their numbers, and which of them may be unloaded."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from draftwise.config.lora import LoRARequest
from draftwise.engine.core import EngineCore
from draftwise.errors import ConfigError, ModelLoadError, RequestError
from draftwise.models.lora.low_rank import LowRank
from draftwise.models.lora.peft import read_adapter

Between = Callable[[Callable[[], None]], None]
"""Runs a function between two steps, in the engine's thread, and waits for it."""


@dataclass(slots=True)
class _Entry:
    request: LoRARequest
    slot: int
    used: int  # a clock that counts uses
    pinned: bool  # loaded by name: stays until it is unloaded


class Adapters:
    """Adapters are loaded when the first request names them, at most ``most`` at a time. An adapter that no request
    uses makes room for another one, least recently used first. Numbers (slots) are never given twice, so an adapter
    that is loaded again under its name finds no old keys in the prefix cache."""

    def __init__(self, core: EngineCore, *, enabled: bool, most: int, max_rank: int) -> None:
        self._core = core
        self._enabled = enabled
        self._most = most
        self._max_rank = max_rank
        self._entries: dict[int, _Entry] = {}  # by the user's number
        self._leaving: set[int] = set()  # slots that were unloaded while requests had them
        self._live: set[int] = set()  # slots that may be given to requests; under the engine's lock
        self._next_slot = 1
        self._uses = 0
        self._lock = threading.Lock()  # one load at a time

    def slot(self, request: LoRARequest | None, between: Between) -> int:
        """The number of a request's adapter, which is loaded if necessary; 0: the request has none.

        Raises:
            RequestError: adapters are not enabled, this one cannot be loaded, its number is taken, or running
            requests use all places.
        """
        if request is None:
            return 0
        if not isinstance(request, LoRARequest):
            raise RequestError(f"lora_request must be a LoRARequest, not {type(request).__name__}")
        with self._lock:
            entry = self._entries.get(request.lora_int_id)
            if entry is None:
                entry = self._load(request, between, pinned=False)
            elif entry.request != request:
                raise _taken(entry.request)
            self._uses += 1
            entry.used = self._uses
            return entry.slot

    def turns(self, requests: Sequence[LoRARequest | None]) -> list[list[int]]:
        """Which requests of one call can run together: positions, in parts of at most ``most`` adapters. Adapters get
        their turns in the order in which they are named first; requests without one are in the first part.

        Raises:
            RequestError: an adapter of a later part cannot be read, or two have one number. Of the first part, `slot`
            says so, before anything is run.
        """
        named: dict[int, LoRARequest] = {}
        with self._lock:
            for request in requests:
                if isinstance(request, LoRARequest):
                    entry = self._entries.get(request.lora_int_id)
                    known = named.setdefault(request.lora_int_id, request if entry is None else entry.request)
                    if known != request:
                        raise _taken(known)
        if not self._enabled or len(named) <= self._most:
            return [list(range(len(requests)))]
        turn_of = {number: i // self._most for i, number in enumerate(named)}
        for number, request in named.items():
            if turn_of[number]:
                self._read(request)
        turns: list[list[int]] = [[] for _ in range(1 + max(turn_of.values()))]
        for i, asked in enumerate(requests):
            turns[turn_of[asked.lora_int_id] if isinstance(asked, LoRARequest) else 0].append(i)
        return turns

    def add(self, request: LoRARequest, between: Between) -> None:
        """Load an adapter that stays until `remove`. Raises RequestError as `slot`, or if its number is taken."""
        with self._lock:
            if request.lora_int_id in self._entries:
                raise RequestError(f"lora_request: lora_int_id {request.lora_int_id} is in use")
            self._load(request, between, pinned=True)

    def remove(self, number: int, between: Between) -> bool:
        """Forget an adapter by the user's number; its requests go on with it. False: there is no such adapter."""
        with self._lock:
            entry = self._entries.pop(number, None)
            if entry is None:
                return False
            self._leaving.add(entry.slot)
            self._sweep(between)
            return True

    def check(self, slot: int) -> None:
        """Call it under the engine's lock when a request is queued. Raises RequestError if its adapter was
        unloaded."""
        if slot and slot not in self._live:
            raise RequestError(
                "lora_request: the adapter was unloaded, or it made room for others (max_loras)"
            )

    def requests(self) -> list[LoRARequest]:
        """The loaded adapters."""
        with self._lock:
            return [entry.request for entry in self._entries.values()]

    def _load(self, request: LoRARequest, between: Between, *, pinned: bool) -> _Entry:
        if not self._enabled:
            raise RequestError("lora_request: this engine was started without enable_lora")
        adapter = self._read(request)
        self._make_room(between)
        slot = self._next_slot
        self._next_slot += 1
        try:
            between(lambda: self._core.executor.load_adapter(slot, adapter))
        except (ModelLoadError, ConfigError) as error:
            raise RequestError(f"lora_request: {request.lora_path}: {error}") from error
        with self._core.lock:
            self._live.add(slot)
        entry = self._entries[request.lora_int_id] = _Entry(request, slot, self._uses, pinned)
        return entry

    def _read(self, request: LoRARequest) -> dict[str, LowRank]:
        try:
            return read_adapter(request.lora_path, max_rank=self._max_rank)
        except ModelLoadError as error:
            raise RequestError(f"lora_request: {error}") from error

    def _make_room(self, between: Between) -> None:
        self._sweep(between)
        while len(self._entries) >= self._most:
            with self._core.lock:
                held = self._core.scheduler.adapters_in_use()
            free = [e for e in self._entries.values() if not e.pinned and e.slot not in held]
            if not free:
                raise RequestError(
                    f"lora_request: all {self._most} places for adapters (max_loras) are taken by requests that run or "
                    "by adapters that were loaded to stay"
                )
            oldest = min(free, key=lambda entry: entry.used)
            del self._entries[oldest.request.lora_int_id]
            self._leaving.add(oldest.slot)
            self._sweep(between)

    def _sweep(self, between: Between) -> None:
        """Free adapters that were unloaded and that no request uses any more."""
        with self._core.lock:
            held = self._core.scheduler.adapters_in_use()
            gone = [slot for slot in self._leaving if slot not in held]
            self._live.difference_update(gone)
        for slot in gone:
            self._leaving.discard(slot)
            between(lambda slot=slot: self._core.executor.drop_adapter(slot))  # type: ignore[misc]


def _taken(known: LoRARequest) -> RequestError:
    return RequestError(
        f"lora_request: lora_int_id {known.lora_int_id} is {known.lora_name!r} at {known.lora_path!r}; give another "
        "adapter another number"
    )
