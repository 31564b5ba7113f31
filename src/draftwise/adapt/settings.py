"""Constants of the adaptive controller that may be changed."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AdaptiveSettings:
    """Constants of the controller; times in plain steps, shares of the time that passes.

    ``explore_share``: time that may be spent on learning what is not in use (probes, pauses, looks beyond the cap).
    ``loss_share``: time that speculation as a whole may lose against plain decoding before it is suspended, and
    ``loss_steps`` the reserve it starts with and never exceeds with few requests. The two shares, and what the
    controller itself takes, are the 2 % of the promise.
    """

    explore_share: float = 0.004
    explore_steps: float = 8.0
    loss_share: float = 0.01
    loss_steps: float = 24.0
    trial_rounds: int = (
        24  # with drafts of a new group, before times decide about it: the first ones say little
    )
    trial_loss: float = 5.0  # plain steps lost that end every trial
    first_steps: int = 12  # choose every step
    warm_steps: int = 48  # choose often; steps have few rounds for as many rounds
    warm_interval: int = 4
    interval: int = 16
    idle_interval: int = 128  # when no request drafts
