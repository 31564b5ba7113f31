"""The files of the pages, without a browser."""

from __future__ import annotations

import re

from draftwise.server.page import STATIC
from tests.fakes.running_server import RunningServer


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
    for page in (files["index.html"], files["docs.html"]):
        assert not re.search(r"\son\w+=|\sstyle=|<style|javascript:", page)
        assert not re.search(r"<script(?![^>]*\ssrc=)", page)


def test_every_file_is_served_and_named_by_a_page(server: RunningServer) -> None:
    pages = "".join(server.request("GET", path)[2].decode() for path in ("/", "/docs"))
    named = set(re.findall(r'(?:src|href)="static/([^"]+)"', pages))
    assert named == {p.name for p in STATIC.iterdir()} - {"index.html", "docs.html"}
    kinds = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
    for path in STATIC.iterdir():
        status, headers, body = server.request("GET", f"/static/{path.name}")
        assert status == 200 and body == path.read_bytes()
        if path.suffix in kinds:
            assert headers["content-type"].startswith(kinds[path.suffix])
    assert server.request("GET", "/static/../page.py")[0] == 404
