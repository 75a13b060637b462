"""``GET /``: a page on which a person plays the agent and sees a steered and an unsteered customer side by side.

It is one file, ``page.html``, with nothing from elsewhere and no build step, and a client of this server like any
other. A model's text is hostile: the page never parses it as HTML, and the headers let the browser run this page's own
script and nothing else.
"""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path

from fastapi import APIRouter
from fastapi.responses import HTMLResponse


def router() -> APIRouter:
    """The route, which needs no key: the page asks for one when the server does."""
    html = Path(__file__).with_name("page.html").read_text("utf-8")
    headers = {
        "Content-Security-Policy": _policy(html),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cross-Origin-Opener-Policy": "same-origin",
        "Cache-Control": "no-cache",  # of the version that is served now
    }
    routes = APIRouter()

    @routes.api_route("/", methods=["GET", "HEAD"], include_in_schema=False)
    async def page() -> HTMLResponse:
        return HTMLResponse(html, headers=headers)

    return routes


def _policy(html: str) -> str:
    """A Content-Security-Policy under which only the script and the style that stand in `html` count."""

    def hashes(tag: str) -> str:
        texts = re.findall(rf"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
        return " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(t.encode()).digest()).decode()}'" for t in texts)

    return "; ".join(
        (
            "default-src 'none'",
            f"script-src {hashes('script')}",
            f"style-src {hashes('style')}",
            "connect-src 'self'",
            "img-src data:",  # the icon
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
            "require-trusted-types-for 'script'",
            "trusted-types 'none'",
        )
    )
