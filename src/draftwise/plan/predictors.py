"""Predicts the next interval from those before it."""

from __future__ import annotations

import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from draftwise.errors import ConfigError, install, suggest

_FEW = 12
"""Values below which a model has nothing to be fitted to: the newest value stands."""
_FEW_LENGTHS = 8
"""Intervals whose lengths of requests count."""
_REFIT = 24
"""Intervals between two fits of a model's parameters; between them it takes in what is new."""
_WINDOW = 96
"""Values that a model is fitted to, and that a forecast looks at."""
_ITERATIONS = 6
"""Iterations of a fit: a decision takes under 10 ms, and further ones hardly change the forecast."""


class Predictor(ABC):
    """A function of the values it is given, oldest first; keeps nothing of them but what makes it quicker."""

    @abstractmethod
    def predict(self, values: Sequence[float]) -> float:
        """The next value, not negative. ``values``: at least one, all finite."""


class Constant(Predictor):
    """It goes on as it is."""

    def predict(self, values: Sequence[float]) -> float:
        return max(values[-1], 0.0)


class Recent(Predictor):
    """The mean of the last values: of lengths, of which a few say little."""

    def predict(self, values: Sequence[float]) -> float:
        return max(math.fsum(values[-_FEW_LENGTHS:]) / len(values[-_FEW_LENGTHS:]), 0.0)


class _Fitted(Predictor):
    """A state-space model of statsmodels. Its parameters are fitted now and then; every value is filtered.

    When it was fitted follows from the number of values alone, so that two that are given the same say the same.
    """

    def __init__(self) -> None:
        self._params: Any = None
        self._fitted_at = -1
        self._quietly(_load)  # a second or two, which no decision is to take

    def predict(self, values: Sequence[float]) -> float:
        if len(values) < _FEW or max(values) == min(values):
            return max(values[-1], 0.0)
        due = len(values) // _REFIT * _REFIT or _FEW
        scale = max(abs(v) for v in values) or 1.0
        if due != self._fitted_at:
            sample = [v / scale for v in values[max(due - _WINDOW, 0) : due]]
            fitted, self._fitted_at = self._quietly(lambda: self._fit(sample)), due
            self._params = None if fitted is None else fitted.params
            if fitted is not None and due == len(values):  # it has seen the newest value
                return self._checked(self._quietly(lambda: float(fitted.forecast(1)[0])), values, scale)
        if self._params is None:
            return max(values[-1], 0.0)
        recent = [v / scale for v in values[-_WINDOW:]]
        return self._checked(self._quietly(lambda: self._next(recent)), values, scale)

    @staticmethod
    def _checked(found: float | None, values: Sequence[float], scale: float) -> float:
        # A forecast far beyond everything that was seen is a fit gone wrong.
        if found is None or not math.isfinite(found) or abs(found) > 3.0:
            return max(values[-1], 0.0)
        return max(float(found) * scale, 0.0)

    @staticmethod
    def _quietly(work: Callable[[], Any]) -> Any:
        """The result of a fit; None if it fails, so that the planner goes on."""
        import numpy as np
        import statsmodels.tools.sm_exceptions  # sets filters of its own when it is imported first  # noqa: F401

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                return work()
            except (ValueError, np.linalg.LinAlgError, IndexError):
                return None

    def _fit(self, values: Sequence[float]) -> Any:
        return self._model(values).fit(disp=0, maxiter=_ITERATIONS, cov_type="none")

    def _next(self, values: Sequence[float]) -> float:
        return float(self._model(values).filter(self._params).forecast(1)[0])

    @abstractmethod
    def _model(self, values: Sequence[float]) -> Any: ...


def _load() -> None:
    from statsmodels.tsa.statespace import sarimax, structural  # noqa: F401


class Arima(_Fitted):
    """ARIMA(1, 1, 1)."""

    def _model(self, values: Sequence[float]) -> Any:
        from statsmodels.tsa.statespace.sarimax import SARIMAX

        return SARIMAX(values, order=(1, 1, 1), enforce_stationarity=True, enforce_invertibility=True)


class Kalman(_Fitted):
    """A level and a slope that wander, seen through noise (local linear trend)."""

    def _model(self, values: Sequence[float]) -> Any:
        from statsmodels.tsa.statespace.structural import UnobservedComponents

        return UnobservedComponents(values, level="local linear trend")


class Seasonal(Predictor):
    """The load at this time of the last days, moved to today's level; a Kalman filter before a whole day has passed.

    Example (a day of 4 intervals): 1 5 9 5, 2 10: yesterday's next was 9, today is twice yesterday: 18.
    """

    def __init__(self, period: int) -> None:
        """``period``: intervals of a day."""
        if period < 2:
            raise ConfigError(f"seasonal: a day has {period} intervals; expected at least 2")
        self._period = period
        self._first_day = Kalman()

    def predict(self, values: Sequence[float]) -> float:
        period, n = self._period, len(values)
        if n < period + 2:
            return self._first_day.predict(values)
        days = [n - period * d for d in range(1, 4) if n - period * d >= 0]
        usual = sum(values[i] for i in days) / len(days)
        recent = min(max(period // 24, 2), n - period)
        today = sum(values[n - recent :])
        then = sum(values[n - period - recent : n - period])
        level = today / then if then > 0 else 1.0
        return max(usual * min(max(level, 0.25), 4.0), 0.0) if usual > 0 else max(values[-1], 0.0)


PREDICTORS: Mapping[str, str] = {
    "constant": "as in the last interval",
    "arima": "ARIMA(1, 1, 1)",
    "kalman": "level and slope, filtered",
    "seasonal": "the same time of past days, at today's level",
}


def predictor(name: str, period: int = 1440) -> Predictor:
    """A fresh predictor by name. ``period``: intervals of a day, for the seasonal one.

    Raises:
        ConfigError: an unknown name, or statsmodels is not installed.
    """
    if name not in PREDICTORS:
        raise ConfigError(f"predictor: unknown {name!r}{suggest(name, PREDICTORS)} ({', '.join(PREDICTORS)})")
    if name != "constant":
        from importlib.util import find_spec

        if find_spec("statsmodels") is None:
            raise ConfigError(f"predictor {name!r} needs statsmodels: {install('plan')}")
    kinds: Mapping[str, Callable[[], Predictor]] = {
        "constant": Constant,
        "arima": Arima,
        "kalman": Kalman,
        "seasonal": lambda: Seasonal(period),
    }
    return kinds[name]()
