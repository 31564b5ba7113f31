"""Seconds as a function of sizes, from measurements that scatter: medians where something was measured, a fit where
not."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

_RING = 9
"""Samples of which a cell is the median: a busy neighbour may spoil four of them."""
_KNOWN = 3
"""Samples from which on a cell is believed."""
_STALE = 100
"""Measurements of other points after which a point's samples are stale."""
_REFIT = 256
"""Measurements after which the fit is made anew in any case."""
_HUBER = 0.25
"""Relative residual from which on a cell's pull on the fit grows no more: a sample may be wrong by a factor of ten."""
_MAX_CELLS = 384
_LEAST = 0.1
"""The least time as a share of the quickest measured step, because a fit may give nonsensical times."""
_TICK = 1e-9
"""Seconds, the least that a measurement counts as: a clock may stand still between two readings."""
_PRIOR_WEIGHT = 0.05
"""The weight of the fit's prior, against one for a cell: it decides only where there are no measurements."""


class Speed:
    """How much slower steps are now than the cells remember: the median of the last ratios. A machine that slows down
    for everybody thus changes no comparison."""

    def __init__(self) -> None:
        self.value = 1.0
        self._ratios: deque[float] = deque(maxlen=_RING)

    def observe(self, ratio: float) -> None:
        self._ratios.append(ratio)
        if len(self._ratios) == _RING:
            self.value = sorted(self._ratios)[_RING // 2]


class Cell:
    """Median of the last samples at one operating point, and where in it they were taken (``features``, their mean): a
    cell spans contexts, and what was measured at 250 tokens must not count as measured at 130."""

    __slots__ = ("count", "features", "last", "median", "ring")

    def __init__(self, features: tuple[float, ...]) -> None:
        self.features = features
        self.ring: list[float] = []
        self.median = 0.0
        self.count = 0
        self.last = 0  # when it was last measured, in measurements of its curve

    def add(self, seconds: float, features: tuple[float, ...]) -> None:
        if len(self.ring) == _RING:
            del self.ring[0]
        self.ring.append(seconds)
        if features != self.features:
            share = 1 / len(self.ring)
            self.features = tuple(
                [old + share * (new - old) for old, new in zip(self.features, features, strict=True)]
            )
        self.count += 1
        self.median = sorted(self.ring)[len(self.ring) // 2]


Key = tuple[int, int, int]
Array = npt.NDArray[np.float64]


class TimeCurve:
    """Seconds as a function of sizes: medians where they were measured, a fit (relative least squares, weights >= 0)
    where not, scaled to agree with the measured points around."""

    def __init__(
        self,
        prior: Sequence[float],
        speed: Speed,
        axes: tuple[float, float, float],
        *,
        tells_speed: bool = False,
    ) -> None:
        """``prior``: relative weights of the features before anything is known. ``axes``: how far apart two points are
        whose keys differ by one in each place. ``tells_speed``: its measurements say how fast the machine is. Those of
        drafters do not: a look-up takes 2 us or 20, and where nobody times them they are what other times left over."""
        self._tells_speed = tells_speed
        self._axes_np = np.array(axes)
        self._prior_np = np.asarray(prior, np.float64)
        self._weights: tuple[float, ...] | None = None
        self._least = 0.0  # seconds, what the formula says at least
        self._speed = speed
        self._cells: dict[Key, Cell] = {}
        self._measurements = 0
        self._fit_at = 1  # fit again when there are this many cells
        self._guesses: dict[
            Key, float
        ] = {}  # what the measured points around say to the formula, as a factor
        self._known: tuple[Array, Array] | None = None  # keys [n, 3] and factors [n] of those points

    def count(self, keys: Iterable[Key]) -> int:
        """Measurements at points."""
        cells = map(self._cells.get, keys)
        return sum(cell.count for cell in cells if cell is not None)

    def observe(self, key: Key, features: tuple[float, ...], seconds: float, times: int = 1) -> float:
        """One measurement, which says as much as so many. Answers what such a step takes by now, and no more than was
        believed where few were measured: the first one may be of cold caches or a busy machine."""
        seconds = max(seconds, _TICK)
        self._measurements += 1
        cell = self._cells.get(key)
        believed = math.inf
        if (cell is None or cell.count < _KNOWN - 1) and self._weights is not None:
            believed = self.predict(key, features)
        if cell is None:
            if len(self._cells) >= _MAX_CELLS:
                # Not those that were taught: where steps stay on a device, nothing else says what plain ones take.
                own = [k for k, c in self._cells.items() if c.last]
                del self._cells[min(own or self._cells, key=lambda k: self._cells[k].last)]
            cell = self._cells[key] = Cell(features)
        elif self._measurements - cell.last > _STALE:
            # What was measured long ago, perhaps while a neighbour was busy, counts as two samples among the new ones.
            cell.ring = [cell.median] * 2
        elif cell.count >= _KNOWN and cell.median > 0 and self._tells_speed:
            self._speed.observe(seconds / (cell.median * self._from(cell, features)))
        cell.last = self._measurements
        before = cell.count
        for _ in range(times):
            cell.add(seconds / self._speed.value, features)
        if before < _RING:
            self._forget_guesses()
            passed = any(before < mark <= cell.count for mark in (1, _KNOWN, _RING))
            if passed and len(self._cells) >= self._fit_at:
                self._fit()
        if self._measurements % _REFIT == 0:
            self._forget_guesses()
            self._fit()
        return min(cell.median * self._from(cell, features) * self._speed.value, believed)

    def teach(self, key: Key, features: tuple[float, ...], seconds: float) -> None:
        """Take over a time that was measured with care: it is believed, and says nothing of the machine's speed now."""
        cell = self._cells.setdefault(key, Cell(features))
        for _ in range(_KNOWN):
            cell.add(max(seconds, _TICK), features)
        self._fit()
        self._forget_guesses()

    def predict(self, key: Key, features: tuple[float, ...]) -> float:
        """Seconds at a point; 0 while nothing was measured."""
        cell = self._cells.get(key)
        if cell is not None and cell.count >= _KNOWN:
            return cell.median * self._from(cell, features) * self._speed.value
        if self._weights is None:
            return 0.0
        factor = self._guesses.get(key)
        if factor is None:
            factor = self._guesses[key] = self._factor(key)
        return factor * self._formula(features) * self._speed.value

    def _from(self, cell: Cell, features: tuple[float, ...]) -> float:
        """How much more a step with these features takes than one with those of the cell's samples: a cell spans
        contexts, and many numbers of requests and rows."""
        if self._weights is None or features == cell.features:
            return 1.0
        return min(max(self._formula(features) / self._formula(cell.features), 0.5), 2.0)

    def _factor(self, key: Key) -> float:
        """By how much the formula errs near a point: the mean of the measured points, the near ones above all.

        Example: points at distances 1 and 2, where steps took 1.2 and 0.9 times what the formula says, weigh 0.64 and
        0.055: 1.18.
        """
        if self._known is None:
            cells = [
                (k, c.median / self._formula(c.features)) for k, c in self._cells.items() if c.count >= _KNOWN
            ]
            keys = np.array([k for k, _ in cells], np.float64).reshape(-1, 3)
            self._known = keys, np.array([ratio for _, ratio in cells])
        keys_np, factors_np = self._known
        if not len(keys_np):
            return 1.0
        away_np = (((keys_np - np.array(key)) * self._axes_np) ** 2).sum(1)
        weights_np = (0.25 + away_np) ** -2
        return float(weights_np @ factors_np / weights_np.sum())

    def _forget_guesses(self) -> None:
        self._guesses.clear()
        self._known = None

    def _formula(self, features: tuple[float, ...]) -> float:
        assert self._weights is not None
        return max(self._least, sum(w * x for w, x in zip(self._weights, features, strict=True)))

    def _fit(self) -> None:
        cells = [cell for cell in self._cells.values() if cell.median > 0]
        if not cells:
            return
        # Often while there are few cells, then ever less: 1, 2, ..., 8, then by an eighth more.
        self._fit_at = len(self._cells) + len(self._cells) // 8
        x_np = np.array([cell.features for cell in cells])
        value_np = np.array([cell.median for cell in cells])
        typical = float(np.median(value_np / (x_np @ self._prior_np)))
        prior_np = self._prior_np * typical
        rows_np = x_np / value_np[:, None]
        trust_np = np.array([min(cell.count, _KNOWN) for cell in cells]) / _KNOWN
        pull_np = trust_np
        weights_np = prior_np
        for _ in range(3):
            weights_np = _least_squares(rows_np, pull_np, prior_np)
            residual_np = np.abs(rows_np @ weights_np - 1)
            # A cell whose time is far above the fit has a small relative residual: look at it both ways.
            residual_np = np.maximum(residual_np, np.abs(1 / np.maximum(rows_np @ weights_np, 1e-9) - 1))
            pull_np = trust_np * np.minimum(1.0, _HUBER / np.maximum(residual_np, 1e-9))
        self._weights = tuple(weights_np.tolist())
        self._least = float(value_np.min()) * _LEAST

    def as_list(self) -> list[list[Any]]:
        """Every measured point: [key, features, seconds, measurements]. For JSON."""
        return [[list(k), list(c.features), c.median, c.count] for k, c in self._cells.items() if c.count]

    def load(self, points: Sequence[Sequence[Any]]) -> None:
        """Take over what `as_list` gave."""
        for key, features, seconds, count in points:
            cell = Cell(tuple(map(float, features)))
            for _ in range(min(int(count), _RING)):
                cell.add(float(seconds), cell.features)
            a, b, c = key
            self._cells[int(a), int(b), int(c)] = cell
        self._fit()
        self._forget_guesses()


def _least_squares(rows_np: Array, pull_np: Array, prior_np: Array) -> Array:
    """Weights >= 0 [p] for which ``rows_np`` [n, p] times them is near 1, rows pulling by ``pull_np`` [n], and which
    stay near ``prior_np`` [p] where the rows say nothing."""
    # A weight is free to move by what makes its feature as dear as the whole step.
    penalty_np = _PRIOR_WEIGHT * np.maximum((rows_np**2).mean(0), 1e-300)
    used_np = np.ones(len(prior_np), np.bool_)
    weights_np = prior_np
    for _ in range(len(prior_np)):
        a_np = rows_np[:, used_np]
        gram_np = (a_np * pull_np[:, None]).T @ a_np + np.diag(penalty_np[used_np])
        target_np = pull_np @ a_np + penalty_np[used_np] * prior_np[used_np]
        weights_np = np.zeros(len(prior_np))
        weights_np[used_np] = np.linalg.solve(gram_np, target_np)
        if not (weights_np < 0).any():
            break
        used_np &= weights_np >= 0
    return np.maximum(weights_np, 0.0)
