"""Several samples of one request in the playground, in a real browser."""

from __future__ import annotations

import json
from collections.abc import Callable

from tests.e2e.page.driving import needs_chromium, run, shown
from tests.fakes.chromium import Tab
from tests.fakes.running_server import RunningServer


@needs_chromium
def test_a_tab_for_each_sample(server: RunningServer, open_page: Callable[..., Tab]) -> None:
    tab = open_page(server)
    tab.fill("#prompt", "abcabcabcabc")
    tab.fill("#max_tokens", "20")
    tab.fill("#n", "3")
    run(tab)
    body = {"prompt": "abcabcabcabc", "max_tokens": 20, "temperature": 0.7, "seed": 1, "n": 3}
    answer = json.loads(server.request("POST", "/v1/completions", body)[2])
    wanted = {choice["index"]: choice["text"] for choice in answer["choices"]}
    assert len(set(wanted.values())) == 3, "samples differ"
    tabs = "document.querySelectorAll('#samples button')"
    assert tab.evaluate(f"{tabs}.length") == 3
    for i, pane in enumerate(("A", "A2", "A3")):
        tab.evaluate(f"{tabs}[{i}].click()")
        visible = (
            "[...document.querySelectorAll('.pane')].filter(p => p.offsetParent).map(p => p.dataset.pane)"
        )
        assert tab.evaluate(visible) == [pane]
        assert shown(tab, pane) == wanted[i]
        assert tab.evaluate(f"{tabs}[{i}].getAttribute('aria-selected')") == "true"
        assert tab.evaluate(f"document.querySelector('[data-pane={pane}] [name=method]') !== null"), (
            "settings follow"
        )
    tab.evaluate(f"{tabs}[2].focus()")
    tab.key("ArrowRight")
    assert tab.evaluate("document.activeElement.textContent.startsWith('Sample 1')")


@needs_chromium
def test_samples_of_two_settings(server: RunningServer, open_page: Callable[..., Tab]) -> None:
    tab = open_page(server)
    tab.fill("#prompt", "abcabcabcabc")
    tab.fill("#max_tokens", "12")
    tab.fill("#temperature", "0")
    tab.fill("#n", "2")
    tab.click("#compare")
    run(tab)
    assert tab.text("#verdict").startswith("The texts are equal")
    tab.evaluate("document.querySelectorAll('#samples button')[1].click()")
    visible = "[...document.querySelectorAll('.pane')].filter(p => p.offsetParent).map(p => p.dataset.pane)"
    assert tab.evaluate(visible) == ["A2", "B2"] and shown(tab, "A2") == shown(tab, "B2") != ""
    tab.click("#compare")
    assert tab.evaluate(visible) == ["A2"]
    tab.fill("#n", "")
    run(tab)
    assert tab.evaluate(visible) == ["A"] and tab.evaluate("document.querySelector('#samples').hidden")
    tab.fill("#n", "17")
    tab.click("#run")
    tab.wait("document.querySelector('#problem').textContent.includes('16 at most')")
