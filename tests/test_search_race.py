"""Who runs on the next fresh seed: nobody who is clearly behind, and always uniform."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from mola.allocation import Allocation
from search.race import BLOCKS, still_racing

UNIFORM, GOOD, BAD = Allocation((2, 2)), Allocation((3, 1)), Allocation((1, 3))
FIELD = [UNIFORM, GOOD, BAD]


def race(values: dict[Allocation, list[float]], seeds: int) -> list[Allocation]:
    by_seed = {a: dict(enumerate(v, start=1)) for a, v in values.items()}
    return still_racing(by_seed, FIELD, range(1, seeds + 1), UNIFORM, 0.95)


def test_who_is_clearly_behind_drops_out() -> None:
    values = {UNIFORM: [1.0, 2.0, 1.5], GOOD: [0.9, 1.9, 1.4], BAD: [3.0, 4.0, 3.6]}
    assert race(values, 3) == [UNIFORM, GOOD]


def test_nobody_drops_out_before_the_noise_is_known() -> None:
    values = {UNIFORM: [1.0], GOOD: [0.9], BAD: [30.0]}
    assert BLOCKS == 2
    assert race(values, 0) == race(values, 1) == FIELD


def test_uniform_stays_however_bad_it_is() -> None:
    values = {UNIFORM: [30.0, 31.0, 30.5], GOOD: [0.9, 1.9, 1.4], BAD: [3.0, 4.0, 3.6]}
    assert race(values, 3) == [UNIFORM, GOOD]


def test_who_failed_on_a_seed_is_out() -> None:
    values = {UNIFORM: [1.0, 2.0, 1.5], GOOD: [0.9, 1.9], BAD: [1.0, 2.1, 1.4]}
    assert race(values, 3) == [UNIFORM, BAD]


@given(seed=st.integers(0, 10**6))
def test_the_leader_and_uniform_always_stay(seed: int) -> None:
    noise = np.random.default_rng(seed).normal(size=(3, 4))
    values = {a: row.tolist() for a, row in zip(FIELD, noise, strict=True)}
    stayed = race(values, 4)
    assert UNIFORM in stayed
    assert min(FIELD, key=lambda a: sum(values[a])) in stayed


def test_alike_allocations_seldom_drop_out() -> None:
    """At most 5 % of the time one of them does; 400 races, 8 sigma."""
    rng = np.random.default_rng(1)
    dropped = sum(
        len(race({a: rng.normal(size=4).tolist() for a in FIELD}, 4)) < 3 for _ in range(400)
    )
    assert dropped < 400 * 0.05 + 8 * (400 * 0.05 * 0.95) ** 0.5
