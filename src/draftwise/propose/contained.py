"""A drafter from outside that can only fail itself."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import wraps
from typing import Any, ClassVar

from draftwise.propose.base import Proposer
from draftwise.propose.delegating import DelegatingProposer, hooks_of_contract


class ContainedProposer(DelegatingProposer):
    """What ends programs, such as `SystemExit`, is an error of the drafter. In the thread of an engine, or in a rank's
    process, it would end no program, but the engine, and with it everybody's requests.

    In the main thread of the user's program it is left alone: a handler of a signal may have raised it.
    """

    name: ClassVar[str] = "contained"

    def __init__(self, inner: Proposer, *, always: bool) -> None:
        """``always``: in the main thread, too."""
        super().__init__(inner)
        self._always = always

    def contained(self, call: Callable[[], Any]) -> Any:
        """The answer of ``call``."""
        try:
            return call()
        except Exception:
            raise
        except BaseException as error:
            if not self._always and threading.current_thread() is threading.main_thread():
                raise
            raise RuntimeError(f"the drafter raised {type(error).__name__}: {error}") from error

    def propose(self, rows: Any) -> Any:  # replaced below, as all hooks are
        raise NotImplementedError


def _contains(name: str) -> Callable[..., Any]:
    @wraps(getattr(Proposer, name))
    def hook(self: ContainedProposer, *args: Any, **options: Any) -> Any:
        return self.contained(lambda: getattr(self.inner, name)(*args, **options))

    return hook


for _name in hooks_of_contract():
    setattr(ContainedProposer, _name, _contains(_name))
