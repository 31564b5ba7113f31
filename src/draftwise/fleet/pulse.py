"""Whether a replica hangs: it is asked how it is, and answers, or does not.

Two things are told apart. Its process may stand still: then it does not answer. Or its engine may, in a step that does
not end, while the event loop beside it still answers, and says for how long.
"""

from __future__ import annotations

LATE = 5.0
"""Seconds without an answer after which a replica gets no new requests as long as others answer."""


class Pulse:
    """The heartbeat of one replica. Times are seconds of one clock."""

    def __init__(self, patience: float) -> None:
        """``patience``: seconds that a step may take, or an answer."""
        self._patience = patience
        self._asked: float | None = None  # when, if there is no answer yet
        self._in_step = 0.0  # what the last answer said

    def ask(self, now: float) -> bool:
        """Whether to ask it now: one question at a time."""
        if self._asked is not None:
            return False
        self._asked = now
        return True

    def answered(self, in_step: float) -> None:
        """It lives, and its engine's step has run for so long."""
        self._asked = None
        self._in_step = in_step

    def forgive(self, now: float) -> None:
        """The asking process itself stood still: answers may have arrived unread."""
        if self._asked is not None:
            self._asked = now

    def silence(self, now: float) -> float:
        """Seconds since a question that has no answer yet; 0 if there is none."""
        return 0.0 if self._asked is None else now - self._asked

    def is_late(self, now: float) -> bool:
        """Whether others should rather be asked."""
        return self.silence(now) > min(LATE, self._patience)

    def fault(self, now: float) -> str | None:
        """A text that says what is wrong with the replica; None: nothing."""
        limit = f"{self._patience:g} s (worker_timeout)"
        if self.silence(now) > self._patience:
            return f"did not answer within {limit}"
        if self._in_step > self._patience:
            return f"was in one step for more than {limit}"
        return None
