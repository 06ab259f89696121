"""Write the small reasoning and pattern exercises that the built-in model is pretrained on.

Each family draws a `Passage`: a context and a few questions about it with their answers. A passage
becomes text in one of two shapes: prose in which several questions follow one context, or
Alpaca's instruction and response, which is the shape of a fine-tuning row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from random import Random

NAMES = (
    "ann",
    "bob",
    "cat",
    "dan",
    "eve",
    "fay",
    "gus",
    "hal",
    "ian",
    "joe",
    "kim",
    "leo",
    "mia",
    "ned",
    "oli",
    "pam",
)
THINGS = (
    "red",
    "blue",
    "green",
    "black",
    "white",
    "pink",
    "brown",
    "gold",
    "dog",
    "cow",
    "pig",
    "hen",
    "cup",
    "hat",
    "box",
    "key",
)
DAYS = ("monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday")
NUMBERS = 20  # the numbers are 0 to 19

PREAMBLE = (
    "Below is an instruction that describes a task. Write a response that appropriately completes"
    " the request.\n\n### Instruction:\n"
)
RESPONSE = "\n\n### Response:\n"


@dataclass(frozen=True)
class Passage:
    """A context (may be empty) and questions about it with their answers."""

    context: str
    questions: tuple[tuple[str, str], ...]


Family = Callable[[Random], Passage]


def listing(words: list[str]) -> str:
    """Join words with commas: `red, blue, red`."""
    return ", ".join(words)


def holdings(names: list[str], amounts: list[int]) -> str:
    """State who has how many: `ann has 7, bob has 3.`."""
    return listing([f"{n} has {a}" for n, a in zip(names, amounts, strict=True)]) + "."


def _lookup(rng: Random) -> Passage:
    size = rng.randint(2, 5)
    names, amounts = rng.sample(NAMES, size), rng.sample(range(NUMBERS), size)
    questions = []
    for i in rng.choices(range(size), k=size):
        if rng.random() < 0.5:
            questions.append((f"how many has {names[i]}?", str(amounts[i])))
        else:
            questions.append((f"who has {amounts[i]}?", names[i]))
    return Passage(holdings(names, amounts), tuple(questions))


def _owner(rng: Random) -> Passage:
    size = rng.randint(2, 5)
    names, things = rng.sample(NAMES, size), rng.sample(THINGS, size)
    questions = []
    for i in rng.choices(range(size), k=size):
        if rng.random() < 0.5:
            questions.append((f"what has {names[i]}?", things[i]))
        else:
            questions.append((f"who has {things[i]}?", names[i]))
    return Passage(
        listing([f"{n} has {t}" for n, t in zip(names, things, strict=True)]) + ".",
        tuple(questions),
    )


def _compare(rng: Random) -> Passage:
    questions = []
    for _ in range(3):
        a, b = rng.sample(range(NUMBERS), 2)
        if rng.random() < 0.5:
            questions.append((f"which is more, {a} or {b}?", str(max(a, b))))
        else:
            questions.append((f"which is less, {a} or {b}?", str(min(a, b))))
    return Passage("", tuple(questions))


def _judge(rng: Random) -> Passage:
    questions = []
    for _ in range(3):
        a, b = rng.sample(range(NUMBERS), 2)
        if rng.random() < 0.5:
            questions.append((f"is {a} more than {b}?", "yes" if a > b else "no"))
        else:
            questions.append((f"is {a} less than {b}?", "yes" if a < b else "no"))
    return Passage("", tuple(questions))


def _extreme(rng: Random) -> Passage:
    size = rng.randint(2, 5)
    amounts = rng.sample(range(NUMBERS), size)
    questions = [
        ("what is the most?", str(max(amounts))),
        ("what is the least?", str(min(amounts))),
    ]
    rng.shuffle(questions)
    return Passage(f"numbers {listing([str(a) for a in amounts])}.", tuple(questions))


def _arithmetic(rng: Random) -> Passage:
    questions = []
    for _ in range(3):
        a = rng.randrange(10)
        b = rng.randrange(10)
        if rng.random() < 0.5:
            questions.append((f"what is {a} plus {b}?", str(a + b)))
        else:
            questions.append((f"what is {a + b} minus {b}?", str(a)))
    return Passage("", tuple(questions))


def _neighbour(rng: Random) -> Passage:
    questions = []
    for _ in range(3):
        row = rng.choice((NAMES, DAYS, tuple(str(n) for n in range(NUMBERS))))
        i = rng.randrange(len(row) - 1)
        if rng.random() < 0.5:
            questions.append((f"what comes after {row[i]}?", row[i + 1]))
        else:
            questions.append((f"what comes before {row[i + 1]}?", row[i]))
    return Passage("", tuple(questions))


def _parity(rng: Random) -> Passage:
    numbers = [rng.randrange(NUMBERS) for _ in range(3)]
    return Passage("", tuple((f"is {n} odd or even?", "odd" if n % 2 else "even") for n in numbers))


def _count(rng: Random) -> Passage:
    kinds = rng.sample(THINGS, rng.randint(2, 3))
    words = [rng.choice(kinds) for _ in range(rng.randint(3, 7))]
    return Passage(
        f"things {listing(words)}.",
        tuple((f"how many {kind}?", str(words.count(kind))) for kind in kinds),
    )


def _majority(rng: Random) -> Passage:
    first, second = rng.sample(THINGS, 2)
    size = rng.choice((3, 5, 7))
    many = rng.randint(size // 2 + 1, size)
    words = [first] * many + [second] * (size - many)
    rng.shuffle(words)
    return Passage(f"things {listing(words)}.", (("which is common?", first),))


def _member(rng: Random) -> Passage:
    words = rng.sample(THINGS, rng.randint(2, 5))
    questions = []
    for _ in range(3):
        word = rng.choice(words) if rng.random() < 0.5 else rng.choice(THINGS)
        questions.append((f"is {word} there?", "yes" if word in words else "no"))
    return Passage(f"things {listing(words)}.", tuple(questions))


def _order(rng: Random) -> Passage:
    words = rng.sample(THINGS, rng.randint(2, 5))
    questions = [("which is first?", words[0]), ("which is last?", words[-1])]
    questions += [(f"which follows {a}?", b) for a, b in pairwise(words)]
    rng.shuffle(questions)
    return Passage(f"things {listing(words)}.", tuple(questions))


def _rewrite(rng: Random) -> Passage:
    kind = rng.choice(("copy", "reverse", "sort"))
    size = rng.randint(2, 5)
    if kind == "sort":
        numbers = sorted(rng.sample(range(NUMBERS), size))
        shuffled = rng.sample(numbers, size)
        return Passage(
            "",
            ((f"sort {listing([str(n) for n in shuffled])}.", listing([str(n) for n in numbers])),),
        )
    words = rng.sample(THINGS, size)
    answer = words if kind == "copy" else words[::-1]
    return Passage("", ((f"{kind} {listing(words)}.", listing(answer)),))


def _chain(rng: Random) -> Passage:
    size = rng.randint(2, 5)
    names = rng.sample(NAMES, size + 1)
    links = [f"{a} calls {b}" for a, b in pairwise(names)]
    rng.shuffle(links)
    questions = []
    for _ in range(4):
        hops = rng.randint(1, min(size, 3))
        start = rng.randrange(size + 1 - hops)
        questions.append((f"from {names[start]} go {hops}?", names[start + hops]))
    return Passage(f"{listing(links)}.", tuple(questions))


def _switch(rng: Random) -> Passage:
    state = rng.random() < 0.5
    start = "on" if state else "off"
    moves = [rng.choice(("flip", "keep")) for _ in range(rng.randint(1, 5))]
    state ^= moves.count("flip") % 2 == 1
    return Passage(
        f"the lamp is {start}, {listing(moves)}.", (("how is the lamp?", "on" if state else "off"),)
    )


def _walk(rng: Random) -> Passage:
    total = rng.randrange(10)
    parts = [f"start at {total}"]
    for _ in range(rng.randint(1, 3)):
        step = rng.randint(1, 5)
        if (rng.random() < 0.5 and total >= step) or total + step >= NUMBERS:
            parts.append(f"minus {step}")
            total -= step
        else:
            parts.append(f"plus {step}")
            total += step
    return Passage(f"{listing(parts)}.", (("what is the end?", str(total)),))


FAMILIES: dict[str, Family] = {
    "lookup": _lookup,
    "owner": _owner,
    "compare": _compare,
    "judge": _judge,
    "extreme": _extreme,
    "arithmetic": _arithmetic,
    "neighbour": _neighbour,
    "parity": _parity,
    "count": _count,
    "majority": _majority,
    "member": _member,
    "order": _order,
    "rewrite": _rewrite,
    "chain": _chain,
    "switch": _switch,
    "walk": _walk,
}


# Finding something in a context is the hardest to learn, so these come more often.
WEIGHTS: dict[str, int] = {
    name: 3 if name in ("lookup", "owner", "order", "rewrite", "chain") else 1 for name in FAMILIES
}


def segments(passage: Passage, *, alpaca: bool) -> list[tuple[str, bool]]:
    """Lay a passage out as text.

    Args:
        passage: What to write.
        alpaca: Alpaca's shape with the first question alone, else prose with all questions.

    Returns:
        Pieces in order, each with whether it is an answer; joined they are the text.
    """
    lead = f"{passage.context} " if passage.context else ""
    if alpaca:
        question, answer = passage.questions[0]
        return [(f"{PREAMBLE}{lead}{question}{RESPONSE}", False), (answer, True)]
    pieces = []
    for question, answer in passage.questions:
        pieces += [(f"{lead}{question}", False), (f"{answer}.", True)]
        lead = ""
    return pieces
