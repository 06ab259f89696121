"""Draw with matplotlib into SVG whose colours are CSS variables, for pages that are light or dark.

Matplotlib draws in stand-in colours; each is replaced by a variable that the page's style defines.
Text stays text, so that it can be searched and takes the page's font.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, MUTED, GRID, PAPER = "#010101", "#020202", "#030303", "#040404"
WINNER, UNIFORM, OTHER, BAD = "#050505", "#060606", "#070707", "#080808"
VARIABLES = {
    INK: "--ink",
    MUTED: "--muted",
    GRID: "--grid",
    PAPER: "--paper",
    WINNER: "--winner",
    UNIFORM: "--uniform",
    OTHER: "--other",
    BAD: "--bad",
}
WIDTH = 7.5  # inches, as wide as the page's column
_STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "mola-search",  # the same study gives the same file
    "text.parse_math": False,
    "font.size": 9,
    "text.color": INK,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": INK,
    "axes.facecolor": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.titlesize": 9,
    "axes.titlelocation": "left",
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "figure.facecolor": "none",
    "legend.frameon": False,
    "lines.linewidth": 1.4,
}


class Sheet:
    """A figure under way.

    Attributes:
        figure: Matplotlib's.
        axes: Its axes, row by row.
    """

    def __init__(self, figure: Figure, axes: list[Axes]) -> None:
        self.figure = figure
        self.axes = axes
        self.svg = ""


@contextmanager
def sheet(
    name: str, height: float, *, rows: int = 1, columns: int = 1, **grid: Any
) -> Iterator[Sheet]:
    """Open a figure; when the context closes, its `svg` is there.

    Args:
        name: Unique on the page; starts the ids in the SVG.
        height: Inches; the width is the page's.
        rows: Of axes.
        columns: Of axes.
        grid: As for `Figure.subplots`.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(WIDTH, height), layout="constrained")
        axes = figure.subplots(rows, columns, squeeze=False, **grid)
        page = Sheet(figure, list(axes.flat))
        yield page
        page.svg = _svg(figure, name)


def whole_numbers(axes: Axes, *, x: bool = False, y: bool = False) -> None:
    """Put ticks on whole numbers alone."""
    from matplotlib.ticker import MaxNLocator

    for wanted, axis in ((x, axes.xaxis), (y, axes.yaxis)):
        if wanted:
            axis.set_major_locator(MaxNLocator(integer=True, nbins=8))


def _svg(figure: Figure, name: str) -> str:
    """Write a figure as an `svg` element without a size of its own."""
    stream = io.StringIO()
    unsaid = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    figure.savefig(stream, format="svg", metadata=unsaid)
    text = stream.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", text, count=1)
    text = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", text, count=1)
    # Ids are unique within a figure only.
    text = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", text)
    for colour, variable in VARIABLES.items():
        text = text.replace(colour, f"var({variable})")
    return text
