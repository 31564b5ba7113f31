"""The dashboard, the modules by themselves, themes and widths, in a real browser."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from draftwise import AsyncLLM
from draftwise.plan.capacity import FixedCapacity
from draftwise.plan.live import PlannerService
from draftwise.plan.planner import Planner, PlannerConfig
from draftwise.plan.ticks import ENGINES, Observation
from tests.e2e.page.driving import Scripts, needs_chromium, run
from tests.fakes.chromium import Tab
from tests.fakes.running_server import RunningServer
from tests.fakes.traced_engine import chain, plain


@needs_chromium
def test_the_dashboard_draws_the_metrics(server: RunningServer, open_page: Callable[..., Tab]) -> None:
    tab = open_page(server, "/#dashboard")
    body = {"prompt": "abcabcabc", "max_tokens": 64, "temperature": 0, "speculation": {"method": "ngram"}}
    tab.wait("document.querySelectorAll('#totals dd').length > 0")
    assert server.request("POST", "/v1/completions", body)[0] == 200
    metrics = server.request("GET", "/metrics")[2].decode()
    total = re.search(r"draftwise:generation_tokens_total\{.*\} (\S+)", metrics)
    assert total is not None
    wanted = f"{int(float(total[1])):,}"
    tab.wait(f"document.querySelector('#totals dd').textContent === '{wanted}'")
    lines = tab.evaluate(
        "Object.fromEntries([...document.querySelectorAll('.chart svg')].map(s =>"
        " [s.getAttribute('aria-label').split(':')[0], s.querySelector('.line').getAttribute('d')]))"
    )
    for title in (
        "Tokens generated per second",
        "Requests",
        "Cache",
        "Time to first token",
        "Between tokens",
    ):
        assert lines[title].startswith("M"), title
    assert "NaN" not in json.dumps(lines)
    assert (
        "steps" in tab.text("#dashboard").lower()
        and tab.evaluate("document.querySelectorAll('.bar').length") > 0
    )
    tab.click("#pause")
    before = len(tab.requested())
    tab.evaluate("new Promise(resolve => setTimeout(resolve, 1500))")
    assert not [url for url in tab.requested()[before:] if url.endswith("/metrics")]


@needs_chromium
def test_a_planner_says_load_replicas_and_why(llm: AsyncLLM, open_page: Callable[..., Tab]) -> None:
    planner = Planner(PlannerConfig(interval=10.0, budget=4), FixedCapacity(10_000, output_tokens=100))
    loads = iter([20.0, 30.0])
    service = PlannerService(
        planner,
        lambda now: Observation(now, requests=next(loads), isl=100.0, osl=100.0, ready={ENGINES: 1}),
    )
    with RunningServer(llm, planner=service) as server:
        tab = open_page(server, "/#dashboard")
        tab.wait("!document.querySelector('#planner').hidden")
        tab.wait("document.querySelector('#planner').textContent.includes('nothing was decided yet')")
        assert not planned_charts(tab), "there is nothing to draw yet"
        for wanted in (3, 4):
            service.tick()
            tab.wait(
                f"document.querySelector('#planner-words').textContent === '{wanted} engines, plain decoding'"
            )
        assert "(advice)" in tab.text("#planner")
        reasons = tab.evaluate(
            "[...document.querySelectorAll('#planner-reasons li')].map(li => li.textContent)"
        )
        decision = service.as_dict()["decision"]
        assert decision is not None and reasons == decision["reasons"]
        assert any("requests/s of 100 + 100 tokens need 4 engines" in reason for reason in reasons)
        tab.wait("document.querySelectorAll('.chart:not([hidden]) svg[aria-label^=Planne]').length === 2")
        charts = planned_charts(tab)
        assert "4 · 1" in charts["Planned replicas"] and "3.00" in charts["Planner's load"]


def planned_charts(tab: Tab) -> dict[str, str]:
    """Titles of the planner's charts that are shown -> the newest values."""
    found: dict[str, str] = tab.evaluate(
        "Object.fromEntries([...document.querySelectorAll('.chart:not([hidden])')]"
        ".filter(c => c.querySelector('.name')?.textContent.startsWith('Planne'))"
        ".map(c => [c.querySelector('.name').textContent, c.querySelector('.now').textContent]))"
    )
    return found


@needs_chromium
def test_the_modules_by_themselves(server: RunningServer, open_page: Callable[..., Tab]) -> None:
    tab = open_page(server)

    def aligned(*calls: Any) -> Any:
        return tab.evaluate(
            "import('/static/align.js').then(({Aligner}) => { const out = [];"
            " const a = new Aligner((token, text) => out.push([token?.text ?? null, text]));"
            f" for (const [text, tokens] of {json.dumps(calls)}) a.push(text, tokens.map(text => ({{text}})));"
            " a.finish(); return out; })"
        )

    bad = "\ufffd"
    assert aligned(("ab", ["a", "b"])) == [["a", "a"], ["b", "b"]]
    assert aligned(("", ["a"]), ("ab", ["b"])) == [["a", "a"], ["b", "b"]], "text that comes late"
    assert aligned(("é!", [bad, bad, "!"])) == [[bad, ""], [bad, "é"], ["!", "!"]]
    assert aligned(("", [bad]), ("é", [bad]), ("x", ["x"])) == [[bad, ""], [bad, "é"], ["x", "x"]]
    assert aligned(("hi you", ["hi", "you"])) == [["hi", "hi"], ["you", " you"]], (
        "a space that the token lacks"
    )
    assert aligned(("a", ["a", "</s>"])) == [["a", "a"], ["</s>", ""]], "a special token"
    assert aligned(("ab", ["ab", "cd"])) == [["ab", "ab"], ["cd", ""]], "cut by a stop string"
    assert aligned(("abc", ["ab", "cd"])) == [["ab", "ab"], ["cd", "c"]], "cut within a token"
    assert aligned(("ab tail", ["ab"])) == [["ab", "ab"], [None, " tail"]], "more than was traced"
    texts = tab.evaluate(
        "import('/static/align.js').then(({Aligner}) => { let out = '';"
        " const a = new Aligner((_, text) => { out += text; });"
        " for (const [t, ...rest] of [['x<', 'x', 'y'], ['q é', 'w'], ['', '\\ufffd'], ['zz', 'é', '\\ufffd']])"
        " a.push(t, rest.map(text => ({text}))); a.finish(); return out; })"
    )
    assert texts == "x<q ézz", "whatever the tokens say, the text is the server's"

    exposition = "\n".join(
        f'draftwise:h_bucket{{le="{bound}",m="a\\"b"}} {n}'
        for bound, n in (("1", 10), ("2", 20), ("+Inf", 20))
    )
    value = tab.evaluate(
        "import('/static/metrics.js').then(({Reading, Change}) => { const none = new Reading('', 0);"
        f" const c = new Change(none, new Reading({json.dumps(exposition)}, 2));"
        " return [c.quantile('h', 0.75), c.quantile('h', 0.5), c.quantile('x', 0.5), c.rate('x'),"
        " c.after.samples.get('h_bucket')[0].labels.m]; })"
    )
    assert value == [1.5, 1, None, 0, 'a"b']
    places = tab.evaluate("import('/static/tree.js').then(({layout}) => layout([-1, -1, 0], new Set([1])))")
    assert places == {"places": [{"row": 1, "column": 1}, {"row": 0, "column": 1}, {"row": 1, "column": 2}],
                      "rows": 2, "columns": 3}  # fmt: skip


CONTRAST = """
(() => {
  const canvas = new OffscreenCanvas(1, 1).getContext('2d', {willReadFrequently: true});
  const paint = (...colours) => {
    for (const colour of colours) { canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1); }
    return [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3);
  };
  const light = (rgb) => {
    const [r, g, b] = rgb.map(v => v / 255).map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ratio = (a, b) => { const [x, y] = [light(a), light(b)].sort((p, q) => q - p); return (x + .05) / (y + .05); };
  const root = getComputedStyle(document.documentElement);
  const colour = name => root.getPropertyValue(name);
  const surface = colour('--surface');
  const out = {};
  for (const name of ['--ink', '--soft', '--accent', '--bonus', '--recovered', '--good'])
    out[name] = ratio(paint(colour(name)), paint(surface));
  out.button = ratio(paint(colour('--accent-ink')), paint(colour('--accent')));
  out.error = ratio(paint(colour('--bad')), paint(colour('--bad-soft')));
  out.soft_on_ground = ratio(paint(colour('--soft')), paint(colour('--ground')));
  for (const method of ['draft_model', 'ngram', 'suffix', 'eagle', 'medusa', 'mtp', 'early_exit',
      'hybrid', 'grammar', 'other']) {
    const token = document.createElement('span');
    token.className = 'tok draft';
    token.dataset.method = method;
    token.dataset.depth = 7;
    document.body.append(token);
    out[method] = ratio(paint(colour('--ink')), paint(surface, getComputedStyle(token).backgroundColor));
    token.remove();
  }
  return out;
})()
"""


@needs_chromium
def test_light_and_dark_can_be_read(server: RunningServer, open_page: Callable[..., Tab]) -> None:
    tab = open_page(server)
    grounds = []
    for system in ("light", "dark"):
        tab.command(
            "Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": system}]
        )
        low = {name: value for name, value in tab.evaluate(CONTRAST).items() if value < 4.5}
        assert low == {}, system
        grounds.append(tab.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert grounds[0] != grounds[1]
    tab.click("#theme")  # light, though the system is dark
    assert tab.evaluate("getComputedStyle(document.body).backgroundColor") == grounds[0]
    tab.go(server.url + "/")
    assert tab.evaluate("getComputedStyle(document.body).backgroundColor") == grounds[0], "the choice is kept"
    tab.wait("document.documentElement.dataset.theme === 'light'")
    tab.click("#theme")
    tab.command("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "light"}])
    assert tab.evaluate("getComputedStyle(document.body).backgroundColor") == grounds[1]


@needs_chromium
@pytest.mark.parametrize("width", [320, 390, 768, 1024, 1360, 1920])
def test_it_fits_any_width(width: int, scripts: Scripts, open_page: Callable[..., Tab]) -> None:
    steps = tuple(chain("ngram", b"some words", 9, " ") for _ in range(30))
    text = "some word " * 30
    with RunningServer(scripts([(text, steps)])) as server:
        tab = open_page(server, width=width, height=800)
        tab.click("#compare")
        run(tab)
        tab.point(".output .tok")
        for name in ("playground", "dashboard"):
            tab.evaluate(f"document.querySelector('#tab-{name}').click()")
            assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth"), name


@needs_chromium
def test_the_dashboard_begins_with_what_matters(server: RunningServer, open_page: Callable[..., Tab]) -> None:
    tab = open_page(server, "/#dashboard")
    assert tab.evaluate("document.querySelector('#window').value") == "60"
    tab.wait("document.querySelectorAll('#totals dd').length > 0")
    titles = "[...document.querySelectorAll('.chart .name')].filter(n => n.checkVisibility()).map(n => n.textContent)"
    assert tab.evaluate(titles) == [
        "Tokens generated per second", "Tokens per verified draft", "Drafts accepted", "Time to first token"
    ]  # fmt: skip
    tab.click("#more-charts summary")
    tab.wait("document.querySelector('#more-charts').open")
    assert len(tab.evaluate(titles)) == 12


@needs_chromium
def test_the_help_can_be_read(server: RunningServer, open_page: Callable[..., Tab]) -> None:
    tab = open_page(server)
    tab.click("#help-button")
    rows = tab.evaluate(
        "[...document.querySelectorAll('#help dl > div')].map(d => { const b = d.getBoundingClientRect();"
        " return [Math.round(b.top), Math.round(b.left), b.height]; })"
    )
    assert len({left for _, left, _ in rows}) == 1, "one column"
    assert all(below[0] >= above[0] + above[2] for above, below in pairwise(rows)), "no overlap"


@needs_chromium
def test_the_badge_tells_the_truth(scripts: Scripts, open_page: Callable[..., Tab]) -> None:
    with RunningServer(scripts([("ab", ())])) as server:
        tab = open_page(server)
        tab.wait("document.querySelector('#health').textContent === 'ready'")
    tab.click("#run")  # the server is gone: whoever sees a request fail sees it in the sign, too
    tab.wait("document.querySelector('#problem').textContent.includes('cannot be reached')")
    assert (
        tab.text("#health") == "not reachable"
        and tab.evaluate("document.querySelector('#health').dataset.state") == "bad"
    )


@needs_chromium
def test_things_are_explained_where_they_stand(server: RunningServer, open_page: Callable[..., Tab]) -> None:
    tab = open_page(server)
    tab.point(".figures div:nth-child(2) dd")
    tab.wait("!document.querySelector('#tip').hidden")
    assert tab.text("#tip") == "Tokens that one pass of the model gives on average. Without drafts it is 1."
    tab.key("Escape")
    assert tab.evaluate("document.querySelector('#tip').hidden")
    tab.evaluate("document.querySelector('#prompt').focus()")
    for _ in range(5):  # over the examples to the first number
        tab.key("Tab")
    assert tab.evaluate("document.activeElement.id") == "temperature"
    assert "most likely" in tab.text("#tip") and not tab.evaluate("document.querySelector('#tip').hidden")
    bare = tab.evaluate(
        "[...document.querySelectorAll('#request .grid2 input, .pane-settings input, .pane-settings select,"
        " .figures dt')].filter(e => !e.closest('[data-help]')).map(e => e.outerHTML.slice(0, 80))"
    )
    assert bare == []
    inside = (
        "(() => { const b = document.querySelector('#tip').getBoundingClientRect();"
        " return [b.left >= 0, b.right <= innerWidth, b.top >= 0, b.bottom <= innerHeight]; })()"
    )
    assert all(tab.evaluate(inside))


@needs_chromium
def test_a_pause_of_the_controller_is_explained(scripts: Scripts, open_page: Callable[..., Tab]) -> None:
    with RunningServer(scripts([("ab" * 10, plain(b"ab" * 10))])) as server:
        tab = open_page(server)
        tab.wait("document.querySelector('[data-pane=A] [name=method]').options.length > 1")
        run(tab)
        assert tab.evaluate("document.querySelector('.paused').hidden"), "nobody asked for drafts"
        tab.fill("[data-pane=A] [name=method]", "ngram")
        run(tab)
        tab.wait("!document.querySelector('.paused').hidden")
        assert tab.text(".paused").startswith("In this answer nothing was drafted: ")


@needs_chromium
def test_the_inspector_folds_away_and_a_phone_scrolls_to_the_output(
    scripts: Scripts, open_page: Callable[..., Tab]
) -> None:
    with RunningServer(scripts([("ab", plain(b"ab"))])) as server:
        tab = open_page(server, width=390, height=800)
        still = {"name": "prefers-reduced-motion", "value": "reduce"}
        tab.command("Emulation.setEmulatedMedia", features=[still])
        run(tab)
        tab.wait("document.querySelector('#panes').getBoundingClientRect().top < 200")
        tab.click("#inspector summary h2")
        assert not tab.evaluate("document.querySelector('#tree').checkVisibility()")
        tab.wait("localStorage.getItem('draftwise.inspector') === 'false'")
        tab.go(server.url + "/")
        tab.wait("document.documentElement.dataset.ready === 'true'")
        assert not tab.evaluate("document.querySelector('#inspector').open"), "it stays folded"


@needs_chromium
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_axe_finds_nothing(theme: str, scripts: Scripts, open_page: Callable[..., Tab]) -> None:
    """axe-core (https://github.com/dequelabs/axe-core), if a package that brings it is installed."""
    script = axe_script()
    if script is None:
        pytest.skip("no axe-core")
    markdown = "## Head\n\n* a\n* `b`\n\n```py\nx\n```\n\n| a |\n|---|\n| b |"
    with RunningServer(
        scripts([(markdown, (chain("ngram", markdown.encode(), len(markdown) - 1, "!"),))])
    ) as server:
        tab = open_page(server)
        tab.command("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": theme}])
        tab.evaluate(script)
        run(tab)
        tab.point(".output .tok")
        for place in ("prompt", "chat", "dashboard", "help"):
            if place == "chat":
                tab.click("[name=mode][value=chat] + span")
                tab.fill("#composer", "x")
                tab.click("#send")
                tab.wait("!!document.querySelector('.regenerate')")
            elif place == "dashboard":
                tab.click("#tab-dashboard")
                tab.click("#more-charts summary")
            elif place == "help":
                tab.click("#help-button")
            found = tab.evaluate(
                "axe.run(document, {resultTypes: ['violations']}).then(r => r.violations.map(v =>"
                " [v.id, v.help, v.nodes.slice(0, 3).map(n => n.html.slice(0, 160))]))"
            )
            assert found == [], place


def axe_script() -> str | None:
    for package in ("axe_playwright_python", "axe_core_python"):
        spec = importlib.util.find_spec(package)
        for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
            path = Path(folder) / "axe.min.js"
            if path.is_file():
                return path.read_text(encoding="utf-8") + "\n;0"
    return None
