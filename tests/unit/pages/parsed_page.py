"""A page as an HTML parser reads it."""

from html.parser import HTMLParser
from pathlib import Path

VOID = ("img", "input", "link", "meta", "br")
URL_ATTRIBUTES = ("src", "href", "srcset", "action", "data")


class ParsedPage(HTMLParser):
    """All elements with their attributes, and the text outside of styles and scripts. Checks that elements nest."""

    def __init__(self, source: str | Path) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self._open: list[str] = []
        self.source = source.read_bytes().decode("utf-8") if isinstance(source, Path) else str(source)
        self.feed(self.source)
        self.close()
        assert self._open == []
        self.text = " ".join(self.text.split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] not in ("style", "script"):
            self.text += data

    def attributes(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]

    @property
    def policy(self) -> str:
        (policy,) = (meta["content"] for meta in self.attributes("meta") if meta.get("http-equiv"))
        return policy or ""


def assert_self_contained(page: ParsedPage) -> None:
    """The page loads nothing, and has no script or handler but its own script."""
    names = [name for name, _ in page.elements]
    assert not {"link", "iframe", "object", "base", "form"} & set(names)
    assert names.count("script") == page.policy.count("'sha256-") <= 1
    assert page.policy.startswith("default-src 'none'; img-src data:; style-src 'unsafe-inline'")
    for name, attributes in page.elements:
        assert not [key for key in attributes if key.startswith("on")], (name, attributes)
        for key in URL_ATTRIBUTES:
            assert (attributes.get(key) or "#").startswith(("#", "data:image/")), (name, attributes)
        assert "url(" not in (attributes.get("style") or "")
    style = page.source.split("<style>")[1].split("</style>")[0]
    assert "url(" not in style
    assert "@import" not in style
