"""Write the report as Markdown: the same text and tables, without the figures."""

from __future__ import annotations

import re
from collections.abc import Sequence

from search.report.parts import Section, Table

_MARKUP = re.compile(r"([\\`*_{}\[\]<>|#~&!$])")


def markdown_report(name: str, verdict: Sequence[str], parts: Sequence[Section]) -> str:
    """Write the report.

    Args:
        name: Of the study; in it, as in all text, markup is escaped.
        verdict: Sentences, the first thing that is read.
        parts: What follows.
    """
    lines = [f"# Expert allocation search: {_plain(name)}", ""]
    for sentence in verdict:
        lines += [_plain(sentence), ""]
    for part in parts:
        if part.text or part.tables or part.code:
            lines += [f"## {_plain(part.title)}", "", *_section(part)]
    return "\n".join(lines)


def _section(part: Section) -> list[str]:
    lines = [line for paragraph in part.text for line in (_plain(paragraph), "")]
    if part.in_characters:
        lines += [*_code(part.in_characters), ""]
    for table in part.tables:
        lines += [*_table(table), ""]
    if part.code:
        lines += [*_code(part.code), ""]
    return lines


def _code(lines: Sequence[str]) -> list[str]:
    """Indent each line of each text, since one that is not would be Markdown again."""
    return [f"    {line}" for text in lines for line in text.splitlines()]


def _table(table: Table) -> list[str]:
    rule = ["---" if i < table.left else "---:" for i in range(len(table.columns))]
    return [_row(table.columns), _row(rule), *(_row(map(_plain, row)) for row in table.rows)]


def _row(cells: Sequence[str] | map[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _plain(text: str) -> str:
    """Make text that Markdown and HTML show as it is."""
    return _MARKUP.sub(r"\\\1", " ".join(text.split()))
