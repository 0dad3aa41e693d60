"""HTML from small functions. Whatever is not `Html` is text from outside and is escaped on its way in."""

from collections.abc import Iterable
from html import escape

_VOID = frozenset(("img", "input", "meta", "br"))


class Html(str):
    """Markup that is taken as it is."""

    __slots__ = ()


def tag(name: str, /, *children: str, **attributes: str | int | None) -> Html:
    """An element. ``class_`` stands for ``class``, ``http_equiv`` for ``http-equiv``; None leaves an attribute out."""
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(str(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    if name in _VOID:
        assert not children
        return Html(f"<{name}{written}>")
    return Html(f"<{name}{written}>{join(children)}</{name}>")


def join(children: Iterable[str]) -> Html:
    """Elements and texts one after another."""
    return Html("".join(child if isinstance(child, Html) else escape(child) for child in children))


def rows(lines: Iterable[Iterable[str]], **attributes: str) -> Html:
    """A table of ``lines``, the first cell of each being its heading."""
    return tag("table", tag("tbody", *(_row(line) for line in lines)), **attributes)


def _row(line: Iterable[str]) -> Html:
    first, *others = line
    return tag("tr", tag("th", first, scope="row"), *(tag("td", cell) for cell in others))


def language(text: str) -> str | None:
    """The language attribute that makes a browser choose the right letters; None where the script does not tell."""
    if any("\u3040" <= letter <= "\u30ff" for letter in text):
        return "ja"
    if any("\uac00" <= letter <= "\ud7af" for letter in text):
        return "ko"
    if any("\u3400" <= letter <= "\u9fff" or "\uf900" <= letter <= "\ufaff" for letter in text):
        return "zh"
    return None
