"""Write the report as one HTML file that needs nothing else: no network, no script."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from search.report.parts import Section, Table

# Both palettes keep 4.5:1 between text and paper; hues differ in lightness, too.
_STYLE = """
:root { color-scheme: light dark;
  --paper: #ffffff; --ink: #1c2024; --muted: #62686f; --grid: #e3e6e9; --panel: #f4f6f8;
  --winner: #0a6ab4; --uniform: #b45309; --other: #4f7f68; --bad: #b3261e; }
@media screen and (prefers-color-scheme: dark) { :root {
  --paper: #14171a; --ink: #e8eaed; --muted: #a0a7ae; --grid: #2c3237; --panel: #1e2327;
  --winner: #62b5f5; --uniform: #f0a04b; --other: #86c5a4; --bad: #f2877f; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 2rem 1rem 4rem; max-width: 48rem; background: var(--paper);
  color: var(--ink); font: 16px/1.5 system-ui, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
h1 { font-size: 1.5rem; line-height: 1.25; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin: 2.2rem 0 .5rem; }
.verdict { background: var(--panel); border-left: 4px solid var(--winner); padding: .6rem 1rem; }
.verdict p { margin: .4rem 0; overflow-wrap: anywhere; }
figure { margin: 1rem 0; break-inside: avoid; }
figure svg { display: block; width: 100%; height: auto; }
figure svg text { font-family: inherit !important; }
figcaption { color: var(--muted); font-size: .875rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .875rem; }
th, td { padding: .2rem .9rem .2rem 0; text-align: right; vertical-align: top; white-space: nowrap;
  border-bottom: 1px solid var(--grid); font-variant-numeric: tabular-nums; }
th { color: var(--muted); font-weight: 600; }
.text { text-align: left; }
.text:last-child { white-space: normal; overflow-wrap: anywhere; min-width: 14rem; }
pre { background: var(--panel); padding: .6rem .8rem; overflow-x: auto; font-size: .8125rem;
  white-space: pre-wrap; overflow-wrap: anywhere; }
@media print { body { max-width: none; padding: 0; font-size: 11pt; }
  h2 { break-after: avoid; } tr { break-inside: avoid; } }
"""
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def html_report(name: str, verdict: Sequence[str], parts: Sequence[Section]) -> str:
    """Write the page.

    Args:
        name: Of the study; like all text it is escaped.
        verdict: Sentences, the first thing that is read.
        parts: What follows.
    """
    title = escape(f"Expert allocation search: {name}")
    claims = "\n".join(f"<p>{escape(sentence)}</p>" for sentence in verdict)
    body = "\n".join(_section(part) for part in parts)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<title>{title}</title>
<style>{_STYLE}</style>
</head>
<body>
<h1>{title}</h1>
<div class="verdict">
{claims}
</div>
{body}
</body>
</html>
"""


def _section(part: Section) -> str:
    pieces = [f"<h2>{escape(part.title)}</h2>"]
    pieces += [f"<p>{escape(paragraph)}</p>" for paragraph in part.text]
    for svg, caption in part.figures:
        label = escape(f"{part.title}. {caption}", quote=True)
        drawn = svg.replace("<svg ", f'<svg role="img" aria-label="{label}" ', 1)
        pieces.append(f"<figure>{drawn}<figcaption>{escape(caption)}</figcaption></figure>")
    pieces += [_table(table) for table in part.tables]
    if part.code:
        pieces.append(f"<pre>{escape(chr(10).join(part.code))}</pre>")
    return "\n".join(["<section>", *pieces, "</section>"])


def _table(table: Table) -> str:
    head = "".join(_cell("th", text, table, i) for i, text in enumerate(table.columns))
    rows = "\n".join(
        "<tr>" + "".join(_cell("td", text, table, i) for i, text in enumerate(row)) + "</tr>"
        for row in table.rows
    )
    return (
        f'<div class="wide"><table><thead><tr>{head}</tr></thead>\n'
        f"<tbody>\n{rows}\n</tbody></table></div>"
    )


def _cell(tag: str, text: str, table: Table, column: int) -> str:
    kind = ' class="text"' if column < table.left else ""
    return f"<{tag}{kind}>{escape(text)}</{tag}>"
