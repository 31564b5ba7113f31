"""The playground in a real browser."""

from __future__ import annotations

import json
from collections.abc import Callable

from draftwise.sched.request import StepTrace
from tests.e2e.page.driving import Scripts, needs_chromium, run, shown, tokens
from tests.fakes.chromium import Tab
from tests.fakes.running_server import RunningServer
from tests.fakes.traced_engine import Piece, chain, plain


@needs_chromium
def test_it_streams_what_the_engine_writes(server: RunningServer, open_page: Callable[..., Tab]) -> None:
    tab = open_page(server)
    tab.wait("document.querySelector('#model').textContent === 'tiny'")
    tab.fill("#prompt", "abcabcabcabc")
    tab.fill("#max_tokens", "40")
    tab.fill("#temperature", "0")
    tab.fill("[data-pane=A] [name=method]", "ngram")
    tab.fill("[data-pane=A] [name=k]", "3")
    run(tab)
    body = {"prompt": "abcabcabcabc", "max_tokens": 40, "temperature": 0, "seed": 1, "return_trace": True,
            "speculation": {"method": "ngram", "num_speculative_tokens": 3}}  # fmt: skip
    answer = json.loads(server.request("POST", "/v1/completions", body)[2])
    assert shown(tab) == answer["choices"][0]["text"]
    sources = [token["source"] for step in answer["trace"] for token in step["tokens"]]
    assert [names.split()[1] for names, _ in tokens(tab)] == sources
    assert tab.text("[data-figure=counts]") == f"{len(sources)} in {len(answer['trace'])}"
    assert float(tab.text("[data-figure=speed]").replace(",", "")) > 0
    assert tab.text("#problem") == ""


@needs_chromium
def test_plain_and_speculative_greedy_texts_are_equal(
    server: RunningServer, open_page: Callable[..., Tab]
) -> None:
    tab = open_page(server)
    tab.wait("document.querySelector('#model').textContent === 'tiny'")
    tab.fill("#temperature", "0")
    tab.fill("#max_tokens", "48")
    tab.click("#compare")
    tab.fill("[data-pane=A] [name=method]", "ngram")
    tab.fill("[data-pane=B] [name=method]", "none")
    assert tab.evaluate("document.querySelector('[data-pane=B] [name=k]').disabled")
    run(tab)
    tab.wait("!document.querySelector('#verdict').hidden")
    assert tab.text("#verdict").startswith("The texts are equal")
    assert shown(tab, "A") == shown(tab, "B") != ""
    assert {names for names, _ in tokens(tab, "B")} <= {"tok target", "tok target nl"}


@needs_chromium
def test_texts_that_differ_are_marked_where_they_do(scripts: Scripts, open_page: Callable[..., Tab]) -> None:
    engine = scripts([("abcd", plain(b"abcd"))], [("abxd", plain(b"abxd"))])
    with RunningServer(engine) as server:
        tab = open_page(server)
        tab.click("#compare")
        tab.fill("#seed", "")
        run(tab)
        tab.wait("!document.querySelector('#verdict').hidden")
        assert tab.text("#verdict").startswith("The texts differ from token 3 on.")
        for pane, token in (("A", "c"), ("B", "x")):
            assert tab.text(f"[data-pane={pane}] .fork") == token
        first, second = engine.params
        assert first.seed is not None and first.seed == second.seed, "two settings need one seed"


@needs_chromium
def test_hostile_text_stays_text(scripts: Scripts, open_page: Callable[..., Tab]) -> None:
    text = "<img src=x onerror='window.pwned=1'><script>window.pwned=1</script></span>&amp;"
    draft = text.encode()
    engine = scripts([(text, (chain("ngram", draft[:-1], len(draft) - 1, ";"),))])
    with RunningServer(engine, model_names=("<b>m</b>",)) as server:
        tab = open_page(server)
        run(tab)
        tab.wait("!!document.querySelector('#model').textContent")
        assert shown(tab) == text and tab.text("#model") == "<b>m</b>"
        tab.point(".output .tok")
        assert "<" in tab.text("#tree")
        assert tab.evaluate("document.querySelectorAll('img, .output script, #model b').length") == 0
        assert tab.evaluate("window.pwned") is None


@needs_chromium
def test_characters_of_several_tokens_are_whole(scripts: Scripts, open_page: Callable[..., Tab]) -> None:
    data = "né 日本 🙂.".encode()
    pieces: list[Piece] = []
    for i in range(0, len(data), 2):  # two tokens a step; text comes when its character is complete
        before, after = (data[:end].decode(errors="ignore") for end in (i, i + 2))
        own = data[i + 1 : i + 2]
        step = StepTrace("ngram", (data[i],), (-1,), (0,), (data[i], *own))
        pieces.append((after[len(before) :], (step,)))
    with RunningServer(scripts(pieces)) as server:
        tab = open_page(server)
        run(tab)
        assert shown(tab) == "né 日本 🙂."
        assert len(tokens(tab)) == len(data)
        assert "\ufffd" not in shown(tab)


TREE = StepTrace("suffix", tuple(b"ABCD"), (-1, -1, 1, 1), (1, 3), tuple(b"BDX"))
"""root -> A, B; B -> C, D. B and D are accepted, then the target adds X."""


@needs_chromium
def test_the_tree_of_a_step(scripts: Scripts, open_page: Callable[..., Tab]) -> None:
    steps = (*plain(b"a"), TREE, chain("ngram", b"yz", 1, "!"))
    with RunningServer(scripts([("aBDXy!", steps)])) as server:
        tab = open_page(server)
        run(tab)
        assert [names for names, _ in tokens(tab)] == [
            "tok target", "tok draft", "tok draft", "tok bonus", "tok draft", "tok recovered"
        ]  # fmt: skip
        tab.point(".output .tok:nth-child(3)")
        assert tab.text("#step-name") == "Step 2 of 3"
        assert tab.text("#step-text") == (
            "Accepted draft, position 2 of suffix. suffix drafted 4 tokens in a tree; 2 accepted; "
            "the target wrote “X” on top."
        )
        nodes = tab.evaluate(
            "[...document.querySelectorAll('#tree .node')].map(n => [n.classList[1],"
            " n.querySelector('text').textContent, Number(n.querySelector('rect').getAttribute('y'))])"
        )
        kinds = {text: kind for kind, text, _ in nodes}
        assert kinds == {
            "a": "root",
            "A": "rejected",
            "B": "draft",
            "C": "rejected",
            "D": "draft",
            "X": "bonus",
        }
        heights = {text: y for _, text, y in nodes}
        assert heights["a"] == heights["B"] == heights["D"] == heights["X"], (
            "what was kept runs along the top"
        )
        assert min(heights["A"], heights["C"]) > heights["a"] and heights["A"] != heights["C"]
        assert [names for names, _ in tokens(tab) if "same-step" in names] == [
            "tok draft same-step", "tok draft same-step current", "tok bonus same-step"
        ]  # fmt: skip
        # A click keeps the step while the mouse goes elsewhere; Escape lets go.
        tab.click(".output .tok:nth-child(3)")
        tab.point(".output .tok:nth-child(6)")
        assert tab.text("#step-name") == "Step 2 of 3"
        tab.key("Escape")
        tab.point(".output .tok:nth-child(5)")
        tab.point(".output .tok:nth-child(6)")
        assert "in place of “z”" in tab.text("#step-text")


@needs_chromium
def test_the_keyboard_is_enough(scripts: Scripts, open_page: Callable[..., Tab]) -> None:
    steps = (*plain(b"a"), TREE, chain("ngram", b"yz", 1, "!"))
    with RunningServer(scripts([("aBDXy!", steps)])) as server:
        tab = open_page(server)
        order = []
        for _ in range(60):
            tab.key("Tab")
            order.append(tab.evaluate("document.activeElement.id || document.activeElement.className"))
            if order[-1] == "output":
                break
        assert order[0] == "skip" and order[1] == "tab-playground", order
        wanted = ["theme", "prompt", "temperature", "seed", "compare", "run", "output"]
        assert [name for name in order if name in wanted] == wanted, order
        tab.key("Enter", ctrl=True)
        tab.wait("document.querySelector('.finish').textContent !== ''")
        for key, token, name in (
            ("Home", "a", "Step 1 of 3"),
            ("ArrowRight", "B", "Step 2 of 3"),
            ("ArrowRight", "D", "Step 2 of 3"),
            ("ArrowDown", "y", "Step 3 of 3"),
            ("ArrowUp", "B", "Step 2 of 3"),
            ("End", "!", "Step 3 of 3"),
            ("ArrowLeft", "y", "Step 3 of 3"),
        ):
            tab.key(key)
            assert (tab.text(".tok.current"), tab.text("#step-name")) == (token, name), key
        tab.key("?", "Slash")
        assert tab.evaluate("document.querySelector('#help').open")
        tab.key("Escape")
        tab.wait("!document.querySelector('#help').open")
        tab.key("2", "Digit2", alt=True)
        assert tab.evaluate("document.querySelector('#playground').hidden")
        tab.key("p", "KeyP", alt=True)
        assert tab.evaluate("document.activeElement.id") == "prompt"
        tab.evaluate("document.querySelector('#tab-playground').focus()")
        tab.key("ArrowRight")
        assert tab.evaluate("document.activeElement.id") == "tab-dashboard"
        nameless = tab.evaluate(
            "[...document.querySelectorAll('button, input, select, textarea')].filter(e => !e.textContent.trim()"
            " && !e.getAttribute('aria-label') && !e.labels?.length).map(e => e.outerHTML)"
        )
        assert nameless == []


@needs_chromium
def test_stopping_ends_the_request(scripts: Scripts, open_page: Callable[..., Tab]) -> None:
    engine = scripts([("ab", plain(b"ab"))], hang=True)
    with RunningServer(engine) as server:
        tab = open_page(server)
        tab.click("#run")
        tab.wait("document.querySelector('.output').textContent === 'ab'")
        assert tab.evaluate("document.querySelector('#run').disabled")
        tab.key("Escape")
        tab.wait("!document.querySelector('#run').disabled")
        assert tab.text(".finish") == "stopped" and shown(tab) == "ab" and tab.text("#problem") == ""
        tab.wait_for(lambda: len(engine.closed) == 1, "the server hears of it")


@needs_chromium
def test_trees_in_words_and_lists(scripts: Scripts, open_page: Callable[..., Tab]) -> None:
    engine = scripts([("ab", plain(b"ab"))])
    with RunningServer(engine) as server:
        tab = open_page(server)
        tab.wait("document.querySelector('[data-pane=A] [name=method]').options.length > 1")
        tab.fill("[data-pane=A] [name=method]", "suffix")
        for typed, name, value in (
            ("dynamic", "speculative_dynamic_tree", True),
            ("chain", "speculative_dynamic_tree", False),
            ("[[0],[1]]", "speculative_token_tree", [[0], [1]]),
        ):
            tab.fill("[data-pane=A] [name=tree]", typed)
            run(tab)
            speculation = engine.params[-1].speculation
            assert speculation is not None and speculation[name] == value, typed


@needs_chromium
def test_errors_are_shown(scripts: Scripts, open_page: Callable[..., Tab]) -> None:
    engine = scripts([("ab", plain(b"ab"))], hang=True)
    with RunningServer(engine, max_concurrent=1) as server:
        tab = open_page(server)
        tab.fill("#temperature", "-1")
        run(tab)
        assert "temperature" in tab.text("#problem") and tab.text(".finish") == "failed"
        tab.fill("#temperature", "1")
        tab.fill("[data-pane=A] [name=method]", "ngram")
        tab.fill("[data-pane=A] [name=tree]", "[[0")
        tab.click("#run")
        assert "tree is no JSON" in tab.text("#problem")
        tab.fill("[data-pane=A] [name=tree]", "")
        other = open_page(server)
        other.click("#run")
        other.wait("document.querySelector('.output').textContent === 'ab'")
        run(tab)
        assert "Try again in" in tab.text("#problem")
        other.key("Escape")
        other.wait("!document.querySelector('#run').disabled")
        tab.wait_for(lambda: len(engine.closed) == 1, "it has ended")
    run(tab)
    assert "cannot be reached" in tab.text("#problem")


@needs_chromium
def test_a_key_is_asked_for(scripts: Scripts, open_page: Callable[..., Tab]) -> None:
    with RunningServer(scripts([("ab", plain(b"ab"))]), api_keys=("right",)) as server:
        tab = open_page(server)
        tab.wait("!document.querySelector('#key-form').hidden")
        for key, label in (("wrong", "The server refused this API key"), ("right", None)):
            tab.evaluate("document.querySelector('#key').focus()")
            for letter in key:
                tab.key(letter)
            tab.evaluate("document.querySelector('#key-form button').click()")
            if label is not None:
                tab.wait(f"document.querySelector('#key-form label').textContent === '{label}'")
        tab.wait("document.querySelector('#key-form').hidden && document.querySelector('#model').textContent")
        run(tab)
        assert shown(tab) == "ab"
        tab.go(server.url + "/")  # the tab remembers it
        tab.wait("document.querySelector('#model').textContent === 'tiny'")
        assert tab.evaluate("document.querySelector('#key-form').hidden")
        assert tab.evaluate("JSON.stringify(localStorage)").find("right") < 0, "keys die with the tab"
