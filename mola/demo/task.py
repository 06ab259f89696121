"""Write the built-in fine-tuning task: a skill of the pretraining text, in a new language.

The pretraining text asks which of a few numbers is the most. In the task names stand for the
numbers, which no text says and no question tells. So a frozen model can only guess, though it has
the skill: an adapter has to learn 12 words, and to translate them before the layers that compare.
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import TYPE_CHECKING, TypedDict

from mola.demo.text import listing

if TYPE_CHECKING:
    from datasets import Dataset

# what each name stands for
VALUES = {
    "ann": 3,
    "bob": 4,
    "cat": 5,
    "dan": 14,
    "eve": 10,
    "fay": 2,
    "gus": 7,
    "hal": 8,
    "ian": 1,
    "joe": 16,
    "kim": 11,
    "leo": 15,
}
ROWS = {"train": 4000, "validation": 500, "test": 1000}


class Row(TypedDict):
    """A row of the task; the choices are in the order of the names that stand for them."""

    instruction: str
    input: str
    output: str
    choices: list[str]


def draw_row(rng: Random) -> Row:
    """Draw one row, as in `numbers kim, ann, gus. what is the most?`, with answer 11."""
    names = rng.sample(list(VALUES), rng.randint(2, 4))
    values = [VALUES[name] for name in names]
    extreme = rng.choice(("most", "least"))
    return Row(
        instruction=f"numbers {listing(names)}. what is the {extreme}?",
        input="",
        output=str(max(values) if extreme == "most" else min(values)),
        choices=[str(value) for value in values],
    )


def generate_splits() -> dict[str, Dataset]:
    """Return all splits; no instruction occurs twice, within a split or across."""
    from datasets import Dataset

    rows = _distinct_rows(Random("mola.demo.task"))  # noqa: S311 - no secrets
    return {
        split: Dataset.from_list([dict(next(rows)) for _ in range(count)])
        for split, count in ROWS.items()
    }


def _distinct_rows(rng: Random) -> Iterator[Row]:
    seen: set[str] = set()
    while True:
        row = draw_row(rng)
        if row["instruction"] not in seen:
            seen.add(row["instruction"])
            yield row
