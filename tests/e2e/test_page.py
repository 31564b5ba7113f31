"""The page at ``/`` in a real browser."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from draftwise import AsyncLLM
from draftwise.sched.request import StepTrace
from draftwise.server.page import STATIC
from tests.fakes.chromium import Chromium, Tab, find_chromium
from tests.fakes.running_server import RunningServer
from tests.fakes.tiny_chat import make_tiny_chat
from tests.fakes.traced_engine import Piece, TracedEngine, chain, plain

PROGRAM = find_chromium()
needs_chromium = pytest.mark.skipif(PROGRAM is None, reason="no chromium on the path")

Scripts = Callable[..., TracedEngine]


# ---------------------------------------------------------------------------------------------- fixtures


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_tiny_chat(tmp_path_factory.mktemp("chat"))


@pytest.fixture(scope="module")
def llm(folder: str) -> Iterator[AsyncLLM]:
    engine = AsyncLLM(folder, dtype="float32", device="cpu", num_kv_blocks=256)
    yield engine
    engine.check_integrity()
    assert engine.stats().num_used_blocks == 0
    engine.close()


@pytest.fixture(scope="module")
def server(llm: AsyncLLM) -> Iterator[RunningServer]:
    with RunningServer(llm) as running:
        yield running


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    assert PROGRAM is not None
    with Chromium(PROGRAM, tmp_path_factory.mktemp("profile")) as running:
        yield running


@pytest.fixture
def open_page(browser: Chromium) -> Iterator[Callable[..., Tab]]:
    """``open(server)``: a tab that must not have seen an exception, an error in the console, a violation of the
    security policy, or an address elsewhere when the test ends."""
    opened: list[tuple[Tab, str]] = []

    def go(server: RunningServer, path: str = "/", **size: int) -> Tab:
        tab = browser.open(server.url + path, **size)
        opened.append((tab, server.url))
        tab.wait("document.documentElement.dataset.ready === 'true'")
        return tab

    yield go
    for tab, url in opened:
        assert tab.troubles() == []
        assert [asked for asked in tab.requested() if not asked.startswith(url + "/")] == []
        tab.close()


@pytest.fixture
def scripts(folder: str) -> Scripts:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    return lambda *answers, **more: TracedEngine(folder, tokenizer, answers, **more)


def run(tab: Tab) -> None:
    tab.wait("!document.querySelector('#run').disabled")
    tab.click("#run")
    tab.wait("!document.querySelector('#run').disabled && document.querySelector('.finish').textContent")


def tokens(tab: Tab, pane: str = "A") -> list[list[str]]:
    """[class names, text] of every token shown."""
    found: list[list[str]] = tab.evaluate(
        f"[...document.querySelectorAll('[data-pane={pane}] .output .tok')].map(t => [t.className, t.textContent])"
    )
    return found


def shown(tab: Tab, pane: str = "A") -> str:
    return tab.text(f"[data-pane={pane}] .output")


# ------------------------------------------------------------------------------------------ without browser


def test_files_hold_nothing_that_the_policy_or_a_hostile_text_could_use() -> None:
    """No inline script or style, no address elsewhere, no markup made of text."""
    files = {path.name: path.read_text() for path in STATIC.iterdir()}
    assert {"index.html", "app.js", "style.css", "icon.svg"} <= set(files)
    for name, text in files.items():
        outside = {u for u in re.findall(r"https?://[^\s\"']+", text) if "www.w3.org" not in u}
        assert not outside, (name, outside)
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text
        ), name
        assert text.count("\n") < 420, f"{name} is long"
    page = files["index.html"]
    assert not re.search(r"\son\w+=|\sstyle=|<style|javascript:", page)
    assert not re.search(r"<script(?![^>]*\ssrc=)", page)


def test_every_file_is_served_and_named_by_the_page(server: RunningServer) -> None:
    page = server.request("GET", "/")[2].decode()
    assert set(re.findall(r'(?:src|href)="static/([^"]+)"', page)) == {p.name for p in STATIC.iterdir()} - {
        "index.html"
    }
    kinds = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
    for path in STATIC.iterdir():
        status, headers, body = server.request("GET", f"/static/{path.name}")
        assert status == 200 and body == path.read_bytes()
        if path.suffix in kinds:
            assert headers["content-type"].startswith(kinds[path.suffix])
    assert server.request("GET", "/static/../page.py")[0] == 404


# ---------------------------------------------------------------------------------------------- playground


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
        for _ in range(40):
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
def test_chat_goes_on_from_an_answer(scripts: Scripts, open_page: Callable[..., Tab]) -> None:
    engine = scripts([("hi", plain(b"hi"))])
    with RunningServer(engine) as server:
        tab = open_page(server)
        tab.click("[name=mode][value=chat] + span")
        tab.click("#run")
        assert tab.text("#problem") == "Write a message first."
        tab.fill("#messages textarea", "hello")
        run(tab)
        assert shown(tab) == "hi"
        tab.click(".keep")
        tab.fill("#messages li:last-child textarea", "more")
        run(tab)
        sent = engine.get_tokenizer().decode(engine.prompts[-1]["prompt_token_ids"])
        assert sent == "<user>hello\n<assistant>hi\n<user>more\n<assistant>"


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


# ------------------------------------------------------------------------------------- dashboard and looks


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
        "steps" in tab.text(".charts").lower()
        and tab.evaluate("document.querySelectorAll('.bar').length") > 0
    )
    tab.click("#pause")
    before = len(tab.requested())
    tab.evaluate("new Promise(resolve => setTimeout(resolve, 1500))")
    assert not [url for url in tab.requested()[before:] if url.endswith("/metrics")]


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
  for (const method of ['draft_model', 'ngram', 'suffix', 'eagle', 'medusa', 'mtp', 'grammar', 'other']) {
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
