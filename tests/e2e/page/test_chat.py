"""The chat of the playground in a real browser: bubbles, Markdown, what can be done with a message, history."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from tests.e2e.page.driving import Scripts, needs_chromium
from tests.fakes.chromium import Tab
from tests.fakes.running_server import RunningServer
from tests.fakes.traced_engine import TracedEngine, plain

DONE = "document.querySelector('#send').textContent === 'Send' && !!document.querySelector('.regenerate')"


def start_chat(tab: Tab) -> None:
    tab.wait("!!document.querySelector('#model').textContent")
    tab.click("[name=mode][value=chat] + span")


def say(tab: Tab, text: str) -> None:
    tab.fill("#composer", text)
    tab.evaluate("document.querySelector('#composer').focus()")
    tab.key("Enter")
    tab.wait(DONE)


def bubbles(tab: Tab) -> list[list[str]]:
    """[role, text] of every bubble."""
    found: list[list[str]] = tab.evaluate(
        "[...document.querySelectorAll('#messages .bubble')].map(b => [b.classList[1],"
        " b.querySelector('.bubble-body').textContent])"
    )
    return found


def sent(engine: TracedEngine) -> str:
    text: str = engine.get_tokenizer().decode(engine.prompts[-1]["prompt_token_ids"])
    return text


@needs_chromium
def test_a_conversation(scripts: Scripts, open_page: Callable[..., Tab]) -> None:
    engine = scripts([("hi", plain(b"hi"))])
    with RunningServer(engine) as server:
        tab = open_page(server)
        start_chat(tab)
        tab.click("#send")
        assert tab.text("#problem") == "Write a message first."
        tab.fill("#system", "Be brief.")
        say(tab, "hello")
        assert bubbles(tab) == [["user", "hello"], ["assistant", "hi"]]
        assert "tokens/s" in tab.text(".bubble.assistant .hint") and tab.text("#problem") == ""
        say(tab, "more")
        assert sent(engine) == "<system>Be brief.\n<user>hello\n<assistant>hi\n<user>more\n<assistant>"
        # Another answer, with a seed of its own.
        before = engine.params[-1].seed
        tab.evaluate("[...document.querySelectorAll('.regenerate')].at(-1).click()")
        tab.wait(DONE)
        assert len(engine.params) == 3 and engine.params[-1].seed != before and len(bubbles(tab)) == 4
        # A message written anew takes what came after it away.
        tab.click(".edit")
        tab.fill(".editing textarea", "bye")
        tab.click(".save-edit")
        tab.wait("document.querySelectorAll('#messages .bubble').length === 2 && " + DONE)
        assert bubbles(tab) == [["user", "bye"], ["assistant", "hi"]]
        assert sent(engine) == "<system>Be brief.\n<user>bye\n<assistant>"
        # How it was drafted unfolds.
        assert tab.evaluate("document.querySelector('#anatomy').hidden")
        tab.click("#anatomy-button")
        assert tab.text("[data-pane=A] .output") == "hi"


@needs_chromium
def test_conversations_stay_in_the_browser(scripts: Scripts, open_page: Callable[..., Tab]) -> None:
    with RunningServer(scripts([("hi", plain(b"hi"))])) as server:
        tab = open_page(server)
        start_chat(tab)
        say(tab, "first")
        tab.click("#new-chat")
        assert bubbles(tab) == []
        say(tab, "second")
        tab.go(server.url + "/")
        tab.wait("document.documentElement.dataset.ready === 'true'")
        start_chat(tab)
        names = "[...document.querySelectorAll('.open-chat')].map(b => b.textContent)"
        assert tab.evaluate(names) == ["second", "first"]
        tab.evaluate("document.querySelectorAll('.open-chat')[1].click()")
        assert bubbles(tab) == [["user", "first"], ["assistant", "hi"]]
        tab.evaluate("document.querySelectorAll('.chats .icon')[1].click()")
        assert tab.evaluate(names) == ["second"] and bubbles(tab) == []
        # What somebody else put there is no conversation.
        tab.evaluate(
            "localStorage.setItem('draftwise.conversations', '[{\"id\": 1}, 5, {\"messages\": []}]')"
        )
        tab.go(server.url + "/")
        tab.wait("document.documentElement.dataset.ready === 'true'")
        assert tab.evaluate(names) == []


@needs_chromium
def test_an_answer_is_stopped(scripts: Scripts, open_page: Callable[..., Tab]) -> None:
    engine = scripts([("ab", plain(b"ab"))], hang=True)
    with RunningServer(engine) as server:
        tab = open_page(server)
        start_chat(tab)
        tab.fill("#composer", "x")
        tab.click("#send")
        tab.wait("document.querySelector('.bubble.assistant')?.textContent.includes('ab')")
        assert tab.text("#send") == "Stop"
        tab.click("#send")
        tab.wait(DONE)
        assert bubbles(tab)[-1] == ["assistant", "ab"] and tab.text(".bubble.assistant .hint") == "stopped"
        tab.wait_for(lambda: len(engine.closed) == 1, "the server hears of it")


@needs_chromium
def test_trouble_is_told_in_the_conversation(scripts: Scripts, open_page: Callable[..., Tab]) -> None:
    with RunningServer(scripts([("ab", plain(b"ab"))])) as server:
        tab = open_page(server)
        start_chat(tab)
        tab.fill("#temperature", "-1")
        tab.fill("#composer", "x")
        tab.click("#send")
        tab.wait("!!document.querySelector('#messages .notice')")
        assert "temperature" in tab.text("#messages .notice") and bubbles(tab) == [["user", "x"]]
        tab.fill("#temperature", "1")
        tab.click("#send")  # what waits for an answer is asked again
        tab.wait(DONE)
        assert bubbles(tab) == [["user", "x"], ["assistant", "ab"]]


@needs_chromium
def test_reasoning_is_folded_away(scripts: Scripts, open_page: Callable[..., Tab]) -> None:
    text = "<think>Hm</think>Yes"
    with RunningServer(scripts([(text, plain(text.encode()))]), reasoning_parser="qwen3") as server:
        tab = open_page(server)
        start_chat(tab)
        say(tab, "x")
        assert tab.text(".bubble.assistant .thoughts p") == "Hm"
        assert not tab.evaluate("document.querySelector('.thoughts').open")
        assert tab.text(".bubble.assistant .bubble-body > p") == "Yes"


def rendered(tab: Tab, text: str) -> str:
    """The HTML that `markdown` makes of a text."""
    script = (
        "import('/static/markdown.js').then(({markdown}) => { const d = document.createElement('div');"
        f" d.append(markdown({json.dumps(text)})); return d['inner' + 'HTML']; }})"
    )
    html: str = tab.evaluate(script)
    return html.replace(' tabindex="0"', "")


@needs_chromium
def test_markdown(server: RunningServer, open_page: Callable[..., Tab]) -> None:
    tab = open_page(server)
    code = '<div class="code"><div class="code-head"><span>{}</span>{}</div><pre><code>{}</code></pre></div>'
    copy = '<button type="button" class="ghost small copy-code">Copy</button>'
    indented = "x = 1\n\n  y"
    for text, html in (
        ("a *b* **c** __d__ ~~e~~ `f*g`", "<p>a <em>b</em> <strong>c</strong> <strong>d</strong> <del>e</del>"
         " <code>f*g</code></p>"),
        ("snake_case_name 2*3*4 * a", "<p>snake_case_name 2<em>3</em>4 * a</p>"),
        ("## H ##\ntext\nmore\n\nnext", "<h3>H</h3><p>text\nmore</p><p>next</p>"),
        ("- a\n- b\n  - c\n\n3. d\n4. e", '<ul><li>a</li><li>b<ul><li>c</li></ul></li></ul>'
         '<ol start="3"><li>d</li><li>e</li></ol>'),
        ("> a\n> b", "<blockquote><p>a\nb</p></blockquote>"),
        ("---", "<hr>"),
        ("```py\nx < 1\n```\nend", code.format("py", copy, "x &lt; 1") + "<p>end</p>"),
        ("a\n\n    x = 1\n\n      y\n\nb", f"<p>a</p>{code.format('code', copy, indented)}<p>b</p>"),
        ("```\nnever closed", code.format("code", copy, "never closed")),
        ("| a | b |\n|---|:-:|\n| 1 |", '<div class="table"><table><thead><tr><th scope="col">a</th>'
         '<th scope="col">b</th></tr></thead><tbody><tr><td>1</td><td></td></tr></tbody></table></div>'),
        ("[x](https://a.b/c) [y](javascript:alert(1)) [z](/local)", '<p><a href="https://a.b/c" target="_blank"'
         ' rel="noopener noreferrer nofollow">x</a> [y](javascript:alert(1)) [z](/local)</p>'),
        ("<b>x</b> \\* \\a", "<p>&lt;b&gt;x&lt;/b&gt; * \\a</p>"),
        ("**never closed `too", "<p>**never closed `too</p>"),
        ("", ""),
    ):  # fmt: skip
        assert rendered(tab, text) == html, text


@needs_chromium
def test_hostile_markdown_is_only_text_and_costs_little(
    server: RunningServer, open_page: Callable[..., Tab]
) -> None:
    tab = open_page(server)
    hostile: list[Any] = [
        "<img src=x onerror=window.pwned=1> [a](<javascript:window.pwned=1>) ![i](https://a.b/x.png)",
        "*" * 5000 + "a", "[" * 5000, "`" * 5000 + "x", "> " * 3000, "- " * 3000 + "x", "_a" * 5000, "**a" * 5000,
        "|" * 5000 + "\n" + "|-" * 2500, "  " * 3000 + "- x\n" * 200, "\\" * 5001, "1. a\n\n" * 2000,
    ]  # fmt: skip
    for text in hostile:
        steps = tab.evaluate(
            "import('/static/markdown.js').then(({markdown}) => { const d = document.createElement('div');"
            f" d.append(markdown({json.dumps(text)})); document.body.append(d);"
            " const n = d.querySelectorAll('img, script, iframe, [href^=javascript]').length;"
            " const all = d.querySelectorAll('*').length; d.remove(); return [n, all]; })"
        )
        assert steps[0] == 0 and steps[1] < 10_000, text[:40]
    assert tab.evaluate("window.pwned") is None
