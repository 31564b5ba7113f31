"""How the memory of a GPU is divided: a pure function, and the measurements it is given."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from draftwise.errors import ConfigError

_SLACK = 1 / 64
"""Share of the device that is left to what cannot be planned: the allocator's fragments, libraries' workspaces."""


@dataclass(frozen=True, slots=True)
class MemoryNeeds:
    """Bytes.

    ``used``: taken on the device already: weights of target and drafters, the CUDA context, and whoever else is there.
    ``activations``: the most that one pass needs besides, measured on the largest one, logits and attention's partial
    results included. ``logits``: of the rows of the largest captured pass, kept for all graphs. ``drafts``:
    distributions and features of the drafters' loops. ``graphs``: the memory inside graphs. ``fixed``: storage besides
    the cache's blocks, such as scratch blocks of trees. ``block``: one block of the cache, in all storages.
    """

    used: int
    activations: int
    logits: int
    drafts: int
    graphs: int
    fixed: int
    block: int


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """``limit``: of the whole device, by gpu_memory_utilization; ``planned``: what all will take, at most ``limit``."""

    limit: int
    planned: int
    num_blocks: int
    cache: int

    def as_dict(self) -> dict[str, int]:
        """For JSON."""
        return asdict(self)


def plan_memory(total: int, utilization: float, needs: MemoryNeeds, most_blocks: int) -> MemoryPlan:
    """Give the cache what is left of ``utilization`` of a device of ``total`` bytes, ``most_blocks`` blocks at most.

    Example: 80 GB at 0.9 are 72 GB, of which 16 are used, 4 are needed besides and 1.25 is slack: 50.75 GB of blocks.

    Raises:
        ConfigError: not one block is left; says what takes the memory.
    """
    limit = int(total * utilization)
    others = needs.used + needs.activations + needs.logits + needs.drafts + needs.graphs + needs.fixed
    others += int(total * _SLACK)
    blocks = min(most_blocks, (limit - others) // needs.block)
    if blocks < 1:
        parts = ", ".join(
            f"{name} {size >> 20} MiB" for name, size in asdict(needs).items() if name != "block"
        )
        raise ConfigError(
            f"gpu_memory_utilization: {utilization} of {total >> 20} MiB leave no room for the K/V cache ({parts}); "
            "raise it, or lower max_num_seqs, max_num_batched_tokens or max_model_len"
        )
    return MemoryPlan(limit, others + blocks * needs.block, blocks, blocks * needs.block)
