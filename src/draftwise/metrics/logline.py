"""One line of statistics for the log, about what happened since the line before."""

from __future__ import annotations

from draftwise.engine.outputs import EngineStats


def statistics_line(before: EngineStats, now: EngineStats, seconds: float) -> str | None:
    """None when nothing happened.

    "running 3, waiting 0, KV cache 12 %; generated 512 tokens/s; mean acceptance length 2.61, accepted 301/s of
    560/s drafted (54 %), per position 0.81 0.52 0.31"
    """
    tokens = now.num_generation_tokens - before.num_generation_tokens
    if not tokens and not now.num_running and not now.num_waiting:
        return None
    used = 100 * now.num_used_blocks / now.num_blocks
    line = (
        f"running {now.num_running}, waiting {now.num_waiting}, KV cache {used:.0f} %; "
        f"generated {tokens / seconds:.0f} tokens/s"
    )
    old, new = before.speculation, now.speculation
    drafts = new.num_drafts - old.num_drafts
    if not drafts:
        return line + "; no drafts"
    drafted = new.num_draft_tokens - old.num_draft_tokens
    accepted = new.num_accepted_tokens - old.num_accepted_tokens
    earlier = old.num_accepted_tokens_per_pos + (0,) * len(new.num_accepted_tokens_per_pos)
    rates = [
        f"{(count - past) / drafts:.2f}"
        for count, past in zip(new.num_accepted_tokens_per_pos, earlier, strict=False)
    ]
    return (
        f"{line}; mean acceptance length {1 + accepted / drafts:.2f}, accepted {accepted / seconds:.0f}/s of "
        f"{drafted / seconds:.0f}/s drafted ({100 * accepted / drafted:.0f} %), per position {' '.join(rates)}"
    )
