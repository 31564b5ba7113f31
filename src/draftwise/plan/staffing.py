"""How many replicas, so that few requests wait too long for a place: requests come at random times, not evenly.

The replicas are taken as one queue, a birth-death process (Kleinrock, Queueing Systems, vol. 1, chapter 3): requests
come at random, and the more of them are at work, the more end per second, until every place is taken.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

_EVEN = 4 / 3
"""How much quicker a queue is served than if the work of requests were exponentially distributed, with a standard
deviation as large as its mean: outputs differ less (2 / (1 + c^2), with a squared coefficient of variation of 0.5)."""
_MOST_PLACES = 1 << 11
"""Places up to which the queue is reckoned out; beyond, chance hardly matters, and a normal distribution will do."""
_POINTS = [
    (float(z), float(weight) / math.sqrt(2 * math.pi))
    for z, weight in zip(*np.polynomial.hermite_e.hermegauss(7), strict=True)
]
"""Seven points of the normal distribution and their weights (Gauss and Hermite): what a function is on average."""


class Service:
    """The service rate of one replica: requests that end per second, by the number of running ones."""

    def __init__(self, curve: Sequence[tuple[int, float]], prompt: float, osl: float) -> None:
        """``curve``: (requests at once, seconds per token of each), from one request on; ``prompt``: seconds in which
        a prompt is read and nobody decodes; ``osl``: tokens of an output."""
        ends = [(m, 1 / max(prompt + osl * itl / m, 1e-9)) for m, itl in curve]
        self._at_np = np.array([0.0, *(m for m, _ in ends)])
        # More at once are never slower altogether: an engine may leave some waiting.
        self._rates_np = np.maximum.accumulate(np.array([0.0, *(rate for _, rate in ends)]))
        self.places = curve[-1][0]
        self.most = float(self._rates_np[-1])
        """Requests per second, all places taken."""

    def rates(self, at_work_np: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """[n] requests per second, by how many are at work."""
        return np.interp(at_work_np, self._at_np, self._rates_np)


def share_waiting(
    load: float, replicas: int, service: Service, wait: float, horizon: float = math.inf
) -> float:
    """Share of requests that wait longer than ``wait`` seconds for a place, at ``load`` requests per second that have
    come for ``horizon`` seconds: until then nobody waited. More than can be served make a queue that grows, and it
    takes its time until anybody waits too long.

    Example: one replica with one place that ends 1 request per second, at 0.5 per second: half of the requests find it
    taken, and of these a share of exp(-0.5 * 4 / 3) waits longer than a second: 26 %.
    """
    if load <= 0:
        return 0.0
    places = replicas * service.places
    ends_np = replicas * service.rates(np.arange(1, places + 1) / replicas)
    full = load / float(ends_np[-1])
    if full >= 1:
        return _grown(load, float(ends_np[-1]), wait, horizon)
    logs_np = np.concatenate(([0.0], np.cumsum(np.log(load / ends_np))))
    chances_np = np.exp(logs_np - logs_np.max())
    waiting = float(chances_np[-1]) / (1 - full)  # all places taken, whoever waits besides
    whole = float(chances_np[:-1].sum()) + waiting
    return waiting / whole * _grown(load, float(ends_np[-1]), wait, horizon)


def _grown(load: float, ends: float, wait: float, horizon: float) -> float:
    """Chance that a queue that was empty ``horizon`` seconds ago is longer than what ``ends`` requests per second take
    ``wait`` seconds for: a Brownian motion with drift that does not fall below zero (Harrison, Brownian Motion and
    Stochastic Flow Systems, 1985, section 3.6). After a long time: exp(-(ends - load) * wait * 4 / 3).

    Example: 1.1 requests come for each that ends: 10 s longer to wait after 100 s, in half of the cases.
    """
    if horizon == math.inf:
        return 1.0 if load >= ends else math.exp(-(ends - load) * wait * _EVEN)
    drift, length = load - ends, ends * wait
    spread = math.sqrt(2 * ends / _EVEN * max(horizon, 1e-9))
    tail = _normal((drift * horizon - length) / spread)
    exponent = drift * wait * _EVEN
    if exponent < 50:  # beyond, the other factor is smaller still
        tail += math.exp(exponent) * _normal((-length - drift * horizon) / spread)
    return min(tail, 1.0)


def _normal(z: float) -> float:
    """Chance that a normally distributed number is below ``z`` standard deviations."""
    return 0.5 * math.erfc(-z / math.sqrt(2))


def replicas_for(
    load: float, service: Service, wait: float, goal: float, *, error: float = 0.0, horizon: float = math.inf
) -> int:
    """Replicas with which at least a share ``goal`` of the requests waits no longer than ``wait`` seconds for a place.
    ``error``: standard error of ``load``: the share is that of all loads that may be, on average. ``horizon``: as
    `share_waiting` takes it.

    Example: 2.5 requests per second and replicas that end 1 each, with 8 places: 3 replicas do the work, and with 24
    places few wait; with one place each it takes 6.
    """
    if load <= 0:
        return 0
    needed = load / service.most
    taken = (needed + 2 * error / service.most) * service.places
    if taken > _MOST_PLACES:
        return math.ceil((taken + 3 * math.sqrt(taken)) / service.places)
    replicas = max(math.ceil(needed - 1e-6), 1)
    points = _POINTS if error > 0 else [(0.0, 1.0)]
    while (
        sum(
            weight * share_waiting(load + z * error, replicas, service, wait, horizon) for z, weight in points
        )
        > 1 - goal
    ):
        replicas += 1
    return replicas
