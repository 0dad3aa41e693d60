"""Tables for the terminal whose numbers and words stay whole at every width."""

import re
from collections.abc import Iterator, Sequence

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

# What a line break must not divide: a word, up to a slash or underscore of a path, with the indent of its line; a
# character of a script without spaces. A slash before a digit may be a fraction.
_ATOM = re.compile(r"(?:^\s*)?(?:(?:[!-.0-^`-~]|[/_](?=\d))+[/_]*|[/_]+|\S)|\s+")
_INDENT = 2


class ResultTable(Table):
    """A table that breaks lines between words only.

    Text columns wrap as far as their words allow. Where that is not enough, every row becomes a block: its first cell,
    then one line per further cell, with the heading. Only a word that is longer than the line makes a line longer.
    Cells, title and headings are plain text: no markup. Print it with `print_table` or `show`, which do not crop.
    """

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        headings = [_text(column.header) if self.show_header else Text() for column in self.columns]
        columns = [[_text(cell) for cell in column.cells] for column in self.columns]
        widths = self._widths(headings, columns, console, options)
        if widths is None:
            return self._blocks(headings, columns, options.max_width)
        return self._narrowed(headings, columns, widths).__rich_console__(console, options)

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(1, options.max_width)

    def _widths(
        self, headings: Sequence[Text], columns: Sequence[Sequence[Text]], console: Console, options: ConsoleOptions
    ) -> list[int] | None:
        """Return the widths of the columns, or None where their longest words do not fit side by side."""
        cells = [[heading, *column] for heading, column in zip(headings, columns, strict=True)]
        widths = [max(1, *(cell_len(line) for text in texts for line in text.plain.split("\n"))) for texts in cells]
        least = [
            width if column.no_wrap else max(1, *map(_longest_atom, texts))
            for column, width, texts in zip(self.columns, widths, cells, strict=True)
        ]
        whole = self._narrowed(headings, columns, widths)
        wide_enough = options.update(width=sum(widths) + 16 * (len(widths) + 1))
        borders = Measurement.get(console, wide_enough, whole).maximum - sum(widths)
        while sum(widths) + borders > options.max_width:
            wrapable = [index for index, width in enumerate(widths) if width > least[index]]
            if not wrapable:
                return None
            widths[max(wrapable, key=widths.__getitem__)] -= 1
        return widths

    def _narrowed(self, headings: Sequence[Text], columns: Sequence[Sequence[Text]], widths: Sequence[int]) -> Table:
        """Return a plain rich table with these widths and with the lines already broken."""
        table = Table(
            box=self.box, padding=self.padding, pad_edge=self.pad_edge, show_header=self.show_header,
            title_justify=self.title_justify,
        )  # fmt: skip
        for heading, column, width in zip(headings, self.columns, widths, strict=True):
            table.add_column(wrapped(heading, width), justify=column.justify, style=column.style, width=width)
        for row, cells in zip(self.rows, zip(*columns, strict=True), strict=True):
            texts = (wrapped(cell, width) for cell, width in zip(cells, widths, strict=True))
            table.add_row(*texts, style=row.style, end_section=row.end_section)
        total = sum(widths)
        table.title = None if self.title is None else wrapped(_text(self.title, "table.title"), total)
        table.caption = None if self.caption is None else wrapped(_text(self.caption, "table.caption"), total)
        return table

    def _blocks(self, headings: Sequence[Text], columns: Sequence[Sequence[Text]], width: int) -> Iterator[Text]:
        if self.title is not None:
            yield wrapped(_text(self.title, "table.title"), width)
        for first, *others in zip(*columns, strict=True):
            if first:
                yield wrapped(first, width)
            for heading, cell in zip(headings[1:], others, strict=True):
                if cell:
                    yield _indented(Text(f"{heading}: " if heading else "") + _one_line(cell), width)
        if self.caption is not None:
            yield wrapped(_text(self.caption, "table.caption"), width)


def print_table(table: RenderableType) -> None:
    """Print a table to stdout; a line that is longer than the terminal is not cut."""
    Console().print(table, crop=False)


def wrapped(text: Text, width: int) -> Text:
    """Return the text with lines of at most ``width`` columns where its words allow that; longer words stay whole."""
    lines: list[Text] = []
    for line in text.split("\n", allow_blank=True):
        parts = line.divide(_breaks(line.plain, width))
        for part in parts[:-1]:
            part.rstrip()
        lines.extend(parts)
    return _unbroken(Text("\n").join(lines), width)


def _breaks(line: str, width: int) -> list[int]:
    """Return the offsets at which the lines after the first start."""
    offsets: list[int] = []
    used = 0
    for atom in _ATOM.finditer(line):
        size = cell_len(atom.group())
        if used and used + size > width and not atom.group().isspace():
            offsets.append(atom.start())
            used = 0
        used += size
    return offsets


def _longest_atom(text: Text) -> int:
    atoms = (atom for line in text.plain.split("\n") for atom in _ATOM.findall(line))
    return max((cell_len(atom) for atom in atoms if not atom.isspace()), default=1)


def _text(cell: RenderableType, style: str = "") -> Text:
    return cell if isinstance(cell, Text) else Text(str(cell), style=style)


def _one_line(cell: Text) -> Text:
    return Text(" ").join(cell.split("\n"))


def _indented(text: Text, width: int) -> Text:
    lines = wrapped(text, width - _INDENT).split("\n")
    return _unbroken(Text("\n").join(Text(" " * _INDENT) + line for line in lines), width)


def _unbroken(text: Text, width: int) -> Text:
    """Keep rich from folding a line that a long word makes longer than ``width``."""
    text.overflow = "ignore" if any(cell_len(line) > width for line in text.plain.split("\n")) else None
    return text
