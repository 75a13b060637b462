"""What a page of ours is made of, for tests without a browser."""

from __future__ import annotations

from html.parser import HTMLParser


class Document(HTMLParser):
    """What stands in a document: attributes by tag, and the text of scripts and styles."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.attributes: list[tuple[str, str, str]] = []
        self.inline: dict[str, list[str]] = {"script": [], "style": []}
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_data(self, data: str) -> None:
        if self.cdata_elem in self.inline:
            self.inline[self.cdata_elem].append(data)
