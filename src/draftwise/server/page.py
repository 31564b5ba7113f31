"""The pages at ``/`` and ``/docs`` and their files: what lies in ``static/`` when the server starts, nothing else."""

from __future__ import annotations

import base64
import hashlib
import html
import mimetypes
import re
from collections.abc import Iterable
from pathlib import Path

from starlette.responses import Response

from draftwise.server.errors import APIError

STATIC = Path(__file__).parent / "static"


class Page:
    """Files are read once; a name is looked up and never joined to a path."""

    def __init__(self, endpoints: Iterable[tuple[str, str]], folder: Path = STATIC) -> None:
        """``endpoints``: (methods and path, what it does), for the plain page."""
        self._files = {
            path.name: path.read_bytes()
            for path in (folder.iterdir() if folder.is_dir() else ())
            if path.is_file() and not path.name.startswith(".")
        }
        plain = _plain(endpoints)
        self._pages = {name: self._files.get(name, plain) for name in ("index.html", "docs.html")}
        self._policies = {name: _policy(data.decode()) for name, data in self._pages.items()}

    def html(self, name: str) -> Response:
        """``index.html`` or ``docs.html``, with a policy that loads nothing from elsewhere."""
        headers = {
            "content-security-policy": self._policies[name],
            "x-content-type-options": "nosniff",
            "referrer-policy": "no-referrer",
        }
        return Response(self._pages[name], media_type="text/html", headers=headers)

    def file(self, name: str) -> Response:
        """Raises APIError (404)."""
        data = self._files.get(name)
        if data is None:
            raise APIError(404, "no such file", code="not_found")
        kind = mimetypes.guess_type(name)[0] or "application/octet-stream"
        return Response(data, media_type=kind, headers={"x-content-type-options": "nosniff"})


def _policy(page: str) -> str:
    """The content security policy: nothing from elsewhere, and only the inline scripts and styles that the page
    ships."""

    def hashes(tag: str) -> str:
        bodies = re.findall(rf"<{tag}\b[^>]*>(.*?)</{tag}>", page, re.DOTALL | re.IGNORECASE)
        digests = (base64.b64encode(hashlib.sha256(b.encode()).digest()).decode() for b in bodies if b)
        return "".join(f" 'sha256-{digest}'" for digest in digests)

    return (
        f"default-src 'none'; script-src 'self'{hashes('script')}; style-src 'self'{hashes('style')}; "
        "img-src 'self' data:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def _plain(endpoints: Iterable[tuple[str, str]]) -> bytes:
    rows = "\n".join(
        f"<tr><td><code>{html.escape(path)}</code></td><td>{html.escape(text)}</td></tr>"
        for path, text in endpoints
    )
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Draftwise</title>
<style>
:root {{ color-scheme: light dark }}
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 50rem; margin: 3rem auto; padding: 0 1rem }}
td {{ padding: .2rem 1rem .2rem 0; vertical-align: top }}
</style>
</head>
<body>
<h1>Draftwise</h1>
<p>An OpenAI-compatible server. It answers at:</p>
<table>
{rows}
</table>
</body>
</html>
""".encode()
