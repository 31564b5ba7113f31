"""Ray Serve's way to a replica: by cached prefix and load, as `fleet.router` weighs them."""

from __future__ import annotations

from typing import Any

import numpy as np
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from draftwise.deploy import noted  # not what is in it: Ray copies this class, and would copy that, too

PROMPT = "prompt_ids_np"
"""The keyword of a call that has the prompt's token ids, int32 [n], or None."""
ONLY = "only"
"""The keyword of a call that is for one replica and no other: its name, or None."""


class PrefixRouter(RequestRouter):  # type: ignore[misc]  # Ray has no types
    """In each front, for all its calls of engines. What the front of another process has under way, this one does not
    know; a replica that has too much of it refuses, and the next best is asked."""

    def initialize_state(self, **options: Any) -> None:
        """``request_router_kwargs``: ``block_size``, and ``kinship`` where drafters learn from past requests."""
        noted.HERE.begin(options.get("block_size", 16), kinship=options.get("kinship", False))

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Ray tells which there are."""
        noted.HERE.update(r.replica_id.unique_id for r in replicas)
        super().update_replicas(replicas)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Ranks of one replica each, the best first: Ray asks the next if one has no room."""
        if pending_request is None:
            return [candidate_replicas]
        # Ray asks again and again, at once and without letting others run, unless it is told that these are all.
        pending_request.routing_context.should_backoff = True
        by_name = {r.replica_id.unique_id: r for r in candidate_replicas}
        if (only := pending_request.kwargs.get(ONLY)) is not None:
            return [[by_name[only]]] if only in by_name else []
        noted.HERE.update(by_name)
        ids_np = pending_request.kwargs.get(PROMPT)
        if ids_np is None:
            ids_np = np.empty(0, np.int32)
        request = pending_request.metadata.internal_request_id
        return [[by_name[name]] for name in noted.HERE.order(request, ids_np, by_name)]

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: object
    ) -> None:
        """Ray tells where it went."""
        noted.HERE.sent(pending_request.metadata.internal_request_id, replica_id.unique_id)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Ray tells that it is over."""
        noted.HERE.ended(internal_request_id)
