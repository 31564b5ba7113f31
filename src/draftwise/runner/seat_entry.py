"""What a request brings to its seat: its state, and the blocks that it may write to besides its own."""

from __future__ import annotations

from collections.abc import Mapping

from draftwise.graphs.seats.drafter import Place
from draftwise.graphs.seats.entering import Entering
from draftwise.runner.seat_results import Member
from draftwise.runner.seated import Seated
from draftwise.runner.seating import Seating
from draftwise.types import Proposal


class Scratch:
    """Blocks behind a request's own, by method: of drafters of dynamic trees each request's own ones, of others the
    spare block, which is nobody's. See `Entering`."""

    def __init__(self, spare_block: int, drafters: Mapping[str, Seated]) -> None:
        self._spare = range(spare_block, spare_block + 1)
        self._free = {
            method: list(drafter.scratch) for method, drafter in drafters.items() if drafter.scratch
        }

    def has(self, method: str) -> bool:
        """Whether there are some for one more request."""
        return self._free.get(method) != []

    def take(self, method: str) -> range:
        """Those of a request that takes a seat."""
        return self._free[method].pop() if method in self._free else self._spare

    def give_back(self, method: str, blocks: range) -> None:
        """Its request is gone."""
        if method in self._free:
            self._free[method].append(blocks)


def entering(member: Member, proposal: Proposal, place: Place, seating: Seating) -> Entering:
    """What the device is told of a request that takes a seat; ``proposal`` waits, ``place``: where its drafter
    stands."""
    row, way = member.row, member.way
    return Entering(
        known=row.num_tokens,
        root=int(row.tokens_np[row.num_tokens - 1]),
        drafts=proposal.tokens,
        parents=proposal.parents,
        fed=place.fed,
        stored=place.stored,
        first_key=place.first_key,
        rule=way.rule,
        sampling=row.state,
        blocks_np=row.blocks_np,
        scratch=member.scratch,
        source=0 if proposal.q is None else member.source,
        q=None if proposal.q is None else seating.distributions_of(way.method, proposal),
        drafter=seating.number_of(way.method),
        carried=place.carried,
        adapter=seating.adapter_of(row),
        text_np=row.tokens_np[: row.num_tokens] if way.method in seating.look_ups else None,
    )
