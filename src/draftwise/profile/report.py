"""A profile's report, as text and charts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from draftwise.charts import Cells, Line, cells_svg, lines_svg, write_svg
from draftwise.errors import ConfigError
from draftwise.plan.acceptance import AcceptanceModel
from draftwise.plan.operating import (
    OperatingPoint,
    Sla,
    best_point,
    by_setting,
    operating_point,
    pareto,
    points,
    rows_of_step,
)
from draftwise.plan.profile import Profile
from draftwise.plan.samples import Setting
from draftwise.plan.times import Infeasible, Measured


def settings_known(times: Measured, acceptance: AcceptanceModel) -> list[str]:
    """Methods whose times and acceptance were both measured."""
    return [m for m in times.methods if m in acceptance.methods]


def best_settings(
    profile: Profile, sla: Sla, isl: int, osl: int
) -> list[tuple[str, OperatingPoint | Infeasible]]:
    """Per format of weights, the best setting for requests of this size. Raises ConfigError."""
    acceptance = profile.acceptance()
    out = []
    for weights in profile.settings:
        times = profile.times(weights)
        found = best_point(
            times,
            acceptance,
            sla,
            isl,
            osl,
            methods=settings_known(times, acceptance),
            most_requests=most_requests(profile.settings[weights]),
            most_drafts=most_drafts(profile.settings[weights]),
        )
        out.append((weights, found))
    return out


def most_requests(setting: Setting) -> int:
    """Most requests at once that were measured."""
    return max((s.requests for s in setting.steps), default=1)


def most_drafts(setting: Setting) -> int:
    """Most drafts that were measured; at least 1."""
    return max((s.drafts for s in setting.steps), default=1) or 1


def contexts_of(setting: Setting) -> list[int]:
    """Contexts per request that were measured."""
    return sorted({s.length for s in setting.steps if s.method == "none"})


def break_even(
    profile: Profile, weights: str, method: str, drafts: int
) -> list[tuple[int, list[tuple[int, OperatingPoint]]]]:
    """By context: (requests, point) for the requests that were measured. What has to be accepted per step for
    drafting to pay follows from times alone (`OperatingPoint.break_even`)."""
    times, acceptance = profile.times(weights), profile.acceptance()
    if method not in acceptance.methods:
        acceptance = AcceptanceModel.constant((0.0,), method)
    setting = profile.settings[weights]
    requests = sorted({s.requests for s in setting.steps if s.method == "none"})
    out = []
    for context in contexts_of(setting):
        row = [
            (n, operating_point(times, acceptance, method, drafts, n, context))
            for n in requests
            if n * context <= setting.kv_tokens
            and times.outside(n, rows_of_step(acceptance, method, drafts, n, context), n * context) is None
        ]
        if row:
            out.append((context, row))
    return out


def choices(profile: Profile, weights: str) -> list[tuple[int, int, OperatingPoint]]:
    """(context, requests, best method and K there): drafters lose at long contexts and in large batches."""
    times, acceptance = profile.times(weights), profile.acceptance()
    setting = profile.settings[weights]
    out = []
    requests = sorted({s.requests for s in setting.steps if s.method == "none"})
    for context in contexts_of(setting):
        for n in requests:
            if n * context > setting.kv_tokens:
                continue
            settings: list[tuple[str, int]] = [("none", 0)]
            for method in settings_known(times, acceptance):
                settings += [(method, k) for k in range(1, most_drafts(setting) + 1)]
            found = [
                operating_point(times, acceptance, m, k, n, context)
                for m, k in settings
                if times.outside(n, rows_of_step(acceptance, m, k, n, context), n * context) is None
            ]
            if found:
                out.append((context, n, max(found, key=lambda p: p.tokens_per_second)))
    return out


def draw(profile: Profile, folder: Path) -> list[Path]:
    """Write charts per format of weights into a folder; the files. Raises ConfigError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--plots {folder}: no folder can be made there: {error.strerror}") from None
    written: list[Path] = []

    def keep(name: str, text: str) -> None:
        path = folder / f"{name}.svg"
        write_svg(text, path, "--plots")
        written.append(path)

    acceptance = profile.acceptance()
    for weights, setting in profile.settings.items():
        times = profile.times(weights)
        prompts = [("first token, ms", [(float(n), 1000 * t) for n, t in setting.prefill])]
        rates = [("tokens/s", [(float(n), n / t) for n, t in setting.prefill if t > 0])]
        keep(
            f"prefill-{weights}",
            lines_svg(
                [("time to first token, ms", prompts), ("prompt tokens per second", rates)], "prompt tokens"
            ),
        )
        panels = []
        for context in contexts_of(setting):
            panels.append((f"step, ms, at a context of {context}", _steps(setting, context)))
        if panels:
            keep(f"steps-{weights}", lines_svg(panels, "requests at once"))
        surfaces = _surfaces(profile, weights, times)
        if surfaces:
            keep(f"best-{weights}", cells_svg(surfaces, "requests at once", "context"))
        context = contexts_of(setting)[0] if contexts_of(setting) else 32
        known = settings_known(times, acceptance)
        found = list(
            points(
                times,
                acceptance,
                context,
                methods=known,
                most_drafts=most_drafts(setting),
                most_requests=most_requests(setting),
            )
        )
        fronts: Mapping[str, Sequence[OperatingPoint]] = {
            "plain": pareto(by_setting(found).get(("none", 0), [])),
            "best": pareto(found),
        }
        lines: list[Line] = [
            (name, [(1000 * p.itl, p.tokens_per_second) for p in front]) for name, front in fronts.items()
        ]
        keep(
            f"pareto-{weights}",
            lines_svg(
                [(f"tokens per second and device, context {context}", lines)], "ms per token of a request"
            ),
        )
    return written


def _surfaces(profile: Profile, weights: str, times: Measured) -> list[Cells]:
    """The best setting by context and requests at once, what it gains over plain decoding, and how long its users wait
    per token."""
    gains: dict[tuple[int, int], tuple[float, str]] = {}
    waits: dict[tuple[int, int], tuple[float, str]] = {}
    acceptance = profile.acceptance()
    for context, n, best in choices(profile, weights):
        plain = operating_point(times, acceptance, "none", 0, n, context)
        gain = best.tokens_per_second / plain.tokens_per_second
        name = "plain" if best.method == "none" else f"{best.method} {best.drafts}"
        gains[context, n] = (gain, f"{name}: {gain:.2f}")
        waits[context, n] = (best.itl, f"{1000 * best.itl:.3g}" if best.itl < 1 else f"{1000 * best.itl:.0f}")
    if not gains:
        return []
    columns, rows = sorted({n for _, n in gains}), sorted({context for context, _ in gains})
    return [
        Cells("best setting: times the tokens per second of plain decoding", columns, rows, gains),
        Cells("ms per token of a request with it", columns, rows, waits),
    ]


def _steps(setting: Setting, context: int) -> list[Line]:
    lines: dict[str, list[tuple[float, float]]] = {}
    for s in sorted(setting.steps, key=lambda s: s.requests):
        if s.length == context:
            name = "plain" if s.method == "none" else f"{s.method} K={s.drafts}"
            lines.setdefault(name, []).append((float(s.requests), 1000 * (s.target + s.draft)))
    return list(lines.items())
