"""The books of several engines as those of one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import zip_longest

from draftwise.adapt.controller import ControlStats
from draftwise.engine.outputs import AdapterStats, EngineStats, SpeculationMetrics

_SUMS = (
    "num_blocks", "num_free_blocks", "num_used_blocks", "kv_cache_bytes", "num_running", "num_waiting", "num_steps",
    "num_preemptions", "num_requests_finished", "num_prompt_tokens", "num_generation_tokens", "prefix_cache_queries",
    "prefix_cache_hits", "step_time", "forward_time", "draft_forward_time", "draft_time", "verify_time",
)  # fmt: skip
_CONTROL = ("decisions", "probes", "pauses", "suspended_steps")


def total(stats: Sequence[EngineStats]) -> EngineStats:
    """Sums over engines, of which there is at least one. Times are sums, too: of two engines that step for a second
    each, they are two seconds. ``control`` has the groups of all."""
    return EngineStats(
        **{name: sum(getattr(one, name) for one in stats) for name in _SUMS},
        block_size=stats[0].block_size,
        finish_reasons=_added([one.finish_reasons for one in stats]),
        drafter_failures=_added([one.drafter_failures for one in stats]),
        adapters=_adapters([one.adapters for one in stats if one.adapters is not None]),
        speculation=total_speculation([one.speculation for one in stats]),
        control=ControlStats(
            mode=stats[0].control.mode,
            groups=tuple(group for one in stats for group in one.control.groups),
            **{name: sum(getattr(one.control, name) for one in stats) for name in _CONTROL},
        ),
    )


def _adapters(parts: Sequence[AdapterStats]) -> AdapterStats | None:
    if not parts:
        return None
    running, waiting = (
        tuple(sorted({name for part in parts for name in getattr(part, field)}))
        for field in ("running", "waiting")
    )
    return AdapterStats(sum(part.most for part in parts), running, waiting)


def total_speculation(parts: Sequence[SpeculationMetrics]) -> SpeculationMetrics:
    """Sums."""
    return SpeculationMetrics(
        num_drafts=sum(p.num_drafts for p in parts),
        num_draft_tokens=sum(p.num_draft_tokens for p in parts),
        num_accepted_tokens=sum(p.num_accepted_tokens for p in parts),
        num_accepted_tokens_per_pos=tuple(
            sum(counts)
            for counts in zip_longest(*(p.num_accepted_tokens_per_pos for p in parts), fillvalue=0)
        ),
        steps_by_method=_added([p.steps_by_method for p in parts]),
    )


def _added(parts: Sequence[Mapping[str, int]]) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for part in parts:
        counts.update(part)
    return dict(counts)
