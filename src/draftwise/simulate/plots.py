"""A simulated run over time, and settings against each other, as charts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from draftwise.charts import Line, Panel, lines_svg
from draftwise.simulate.outcome import Moment, Outcome

_POINTS = 60


def timeline_svg(outcomes: Sequence[Outcome]) -> str:
    """Requests per second, those at work and waiting, replicas, drafts per request, and what kept to the limits, all
    over hours, or minutes or seconds if the run is short."""
    last = max((o.moments[-1].time for o in outcomes if o.moments), default=1.0)
    unit, word = (3600.0, "hours") if last > 7200 else (60.0, "minutes") if last > 300 else (1.0, "seconds")

    def line(outcome: Outcome, name: str, value: Callable[[Moment, float], float | None]) -> Line:
        # So many moments side by side are one point, with their mean: what there is to see is no noise.
        every = max(-(-len(outcome.moments) // _POINTS), 1)
        points: list[tuple[float, float]] = []
        found: list[float] = []
        before = 0.0
        for i, moment in enumerate(outcome.moments, 1):
            y = value(moment, max(moment.time - before, 1e-9))
            before = moment.time
            if y is not None:
                found.append(y)
            if found and (i % every == 0 or i == len(outcome.moments)):
                points.append((moment.time / unit, sum(found) / len(found)))
                found = []
        return name, points

    def each(value: Callable[[Moment, float], float | None]) -> list[Line]:
        return [line(o, o.policy, value) for o in outcomes]

    first = outcomes[0]
    replicas = each(lambda m, _: float(sum(m.replicas.values())))
    if any(m.wanted for m in first.moments):
        replicas.append(line(first, "wanted", lambda m, _: float(sum(m.wanted.values()))))
    panels: list[Panel] = [
        ("requests that come per second", [line(first, "load", lambda m, s: m.arrived / s)]),
        ("requests at work or waiting", each(lambda m, _: float(m.running + m.waiting))),
        ("replicas that serve", replicas),
        ("drafts per request that decodes (K)", each(lambda m, _: m.drafts if m.running else None)),
        (
            "within the limits, %",
            each(lambda m, _: None if m.attained is None else 100 * m.attained),
        ),
    ]
    return lines_svg(panels, word)
