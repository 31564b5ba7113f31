"""Ray Serve's way to a replica: by cached prefix and load, as `fleet.router` weighs them."""

from __future__ import annotations

from typing import Any

import numpy as np
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from draftwise.deploy.noted import Noted

PROMPT = "prompt_ids_np"
"""The keyword of a call that has the prompt's token ids, int32 [n], or None."""


class PrefixRouter(RequestRouter):  # type: ignore[misc]  # Ray has no types
    """In each front, for all its calls of engines. What the front of another process sent, this one does not know; a
    replica that has too much of it refuses, and the next best is asked."""

    def initialize_state(self, **options: Any) -> None:
        """``request_router_kwargs``: ``block_size``, and ``kinship`` where drafters learn from past requests."""
        self._noted = Noted(options.get("block_size", 16), kinship=options.get("kinship", False))

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Ray tells which there are."""
        found = {r.replica_id.unique_id: r.routing_stats.get("num_blocks") for r in replicas}
        self._noted.update(found)
        super().update_replicas(replicas)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Ranks of one replica each, the best first: Ray asks the next if one has no room."""
        if pending_request is None:
            return [candidate_replicas]
        by_name = {r.replica_id.unique_id: r for r in candidate_replicas}
        known = {name: r.routing_stats.get("num_blocks") for name, r in by_name.items()}
        self._noted.update({**dict.fromkeys(self._noted.names), **known})
        ids_np = pending_request.kwargs.get(PROMPT)
        if ids_np is None:
            ids_np = np.empty(0, np.int32)
        request = pending_request.metadata.internal_request_id
        return [[by_name[name]] for name in self._noted.order(request, ids_np, by_name)]

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: object
    ) -> None:
        """Ray tells where it went."""
        self._noted.sent(pending_request.metadata.internal_request_id, replica_id.unique_id)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Ray tells that it is over."""
        self._noted.ended(internal_request_id)
