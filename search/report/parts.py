"""Hold the parts of a report as plain data, whatever they are written as."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Table:
    """A table; numbers are formatted already.

    Attributes:
        columns: Headings.
        rows: Cells as text.
        left: Number of columns, from the first, that hold text rather than numbers.
    """

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    left: int = 1


@dataclass(frozen=True)
class Section:
    """A part of the report; everything but the title may be empty.

    Attributes:
        title: Heading.
        text: Paragraphs.
        figures: SVGs, each with its caption.
        tables: Tables, below the figures.
        code: Lines to be copied.
        in_characters: The figures as lines of characters, for whoever shows no figures.
    """

    title: str
    text: tuple[str, ...] = ()
    figures: tuple[tuple[str, str], ...] = ()
    tables: tuple[Table, ...] = ()
    code: tuple[str, ...] = ()
    in_characters: tuple[str, ...] = ()

    @property
    def empty(self) -> bool:
        """Whether there is nothing to show."""
        return not (self.text or self.figures or self.tables or self.code)
