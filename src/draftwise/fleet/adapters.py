"""Adapters of a fleet: on all replicas, or on none."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Hashable, Mapping, Sequence

from draftwise.config.lora import LoRARequest
from draftwise.errors import EngineDeadError
from draftwise.fleet.replicas import Replica


class FleetAdapters:
    """Which are loaded, and what tells their blocks apart in each replica's prefix cache. All but `salts` wait."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # one change at a time
        self._loaded: dict[int, LoRARequest] = {}
        self._salts: dict[int, dict[Hashable, str | None]] = {}  # by adapter, then by replica

    def salts(self, lora_request: LoRARequest | None) -> Mapping[Hashable, str | None] | None:
        """By replica, for `Router.route`; None: nothing is told apart."""
        return None if lora_request is None else self._salts.get(lora_request.lora_int_id)

    def load(self, replicas: Sequence[Replica], lora_request: LoRARequest) -> None:
        """Raises RequestError if one cannot; then none has it."""
        done: list[Replica] = []
        salts: dict[Hashable, str | None] = {}
        with self._lock:
            try:
                for replica in replicas:
                    salts[replica.number] = replica.process.order("add_lora", lora_request)
                    done.append(replica)
            except BaseException:
                for replica in done:
                    with contextlib.suppress(EngineDeadError):
                        replica.process.order("remove_lora", lora_request.lora_int_id)
                raise
            self._loaded[lora_request.lora_int_id] = lora_request
            self._salts[lora_request.lora_int_id] = salts

    def catch_up(self, replica: Replica) -> None:
        """Load the others' adapters in a replica that was added later."""
        with self._lock:
            for number, adapter in self._loaded.items():
                self._salts[number][replica.number] = replica.process.order("add_lora", adapter)

    def remove(self, replicas: Sequence[Replica], lora_int_id: int) -> bool:
        """False: none had one of this number."""
        found = False
        with self._lock:
            self._loaded.pop(lora_int_id, None)
            self._salts.pop(lora_int_id, None)
            for replica in replicas:
                with contextlib.suppress(EngineDeadError):
                    found |= replica.process.order("remove_lora", lora_int_id)
        return found
