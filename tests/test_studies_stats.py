import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mola.allocation import Allocation
from studies.stats import compare, spread, t_quantile

UNIFORM, LOW, TOP = Allocation([2, 2]), Allocation([3, 1]), Allocation([1, 3])


# Two-sided 95 %, 99 % and one-sided 95 % points from printed tables.
@pytest.mark.parametrize(
    ("p", "df", "expected"),
    [
        (0.975, 1, 12.7062),
        (0.975, 2, 4.30265),
        (0.975, 3, 3.18245),
        (0.975, 4, 2.77645),
        (0.975, 10, 2.22814),
        (0.975, 30, 2.04227),
        (0.975, 120, 1.97993),
        (0.995, 1, 63.6567),
        (0.995, 2, 9.92484),
        (0.995, 10, 3.16927),
        (0.95, 7, 1.89458),
        (0.9995, 3, 12.9240),
    ],
)
def test_t_quantile_agrees_with_printed_tables(p, df, expected):
    assert t_quantile(p, df) == pytest.approx(expected, rel=5e-6)


@given(st.floats(0.51, 0.99999), st.integers(1, 200))
def test_t_quantile_inverts_the_integrated_density(p, df):
    t = t_quantile(p, df)
    # t = sqrt(df) tan(a) turns the density into cos(a)^(df - 1) up to a constant.
    angle = np.linspace(0, math.atan(t / math.sqrt(df)), 4001)
    log_constant = math.lgamma((df + 1) / 2) - math.lgamma(df / 2) - 0.5 * math.log(math.pi)
    height = np.cos(angle) ** (df - 1)
    area = float((height[:-1] + height[1:]).sum() / 2 * (angle[1] - angle[0]))
    # The trapezoid rule's error with 4000 pieces is below 1e-6.
    assert 0.5 + math.exp(log_constant) * area == pytest.approx(p, abs=1e-6)


@pytest.mark.parametrize(("p", "df"), [(0.5, 3), (1.0, 3), (0.3, 3), (0.975, 0)])
def test_t_quantile_refuses_arguments_out_of_range(p, df):
    with pytest.raises(ValueError, match="expected 0.5 < p < 1"):
        t_quantile(p, df)


def test_two_allocations_give_the_paired_t_interval():
    uniform, low = [1.0, 1.5, 1.1, 1.9], [0.8, 1.4, 1.0, 1.5]
    row = _by(compare(_table({UNIFORM: uniform, LOW: low}), UNIFORM), LOW)
    paired = np.subtract(low, uniform)
    half = t_quantile(0.975, 3) * paired.std(ddof=1) / 2
    assert row.difference == pytest.approx(paired.mean())
    assert (row.low, row.high) == pytest.approx((paired.mean() - half, paired.mean() + half))


@given(
    st.integers(2, 5).flatmap(
        lambda a: st.integers(2, 5).flatmap(
            lambda s: st.lists(
                st.lists(st.floats(-5, 5), min_size=s, max_size=s), min_size=a, max_size=a
            )
        )
    )
)
def test_margin_agrees_with_a_least_squares_fit(rows):
    y = np.array(rows)
    a, s = y.shape
    allocations = [Allocation([1, 1 + i]) for i in range(a)]
    design = np.zeros((a, s, 1 + a + s))  # [A, S, constant | allocation | seed]
    design[:, :, 0] = 1
    for i in range(a):
        design[i, :, 1 + i] = 1
    for j in range(s):
        design[:, j, 1 + a + j] = 1
    x = design.reshape(a * s, -1)
    fitted = x @ np.linalg.lstsq(x, y.ravel(), rcond=None)[0]
    df = (a - 1) * (s - 1)
    mean_square = ((y.ravel() - fitted) ** 2).sum() / df
    half = t_quantile(1 - 0.1 / 2 / (a - 1), df) * math.sqrt(2 * mean_square / s)

    values = dict(zip(allocations, (dict(enumerate(row)) for row in rows), strict=True))
    for row in compare(values, allocations[0], confidence=0.9):
        if row.allocation != allocations[0]:
            # Both sides sum squares of values up to 5: rounding stays below 1e-6.
            assert (row.high - row.low) / 2 == pytest.approx(half, abs=1e-6)


@given(st.lists(st.floats(-100, 100), min_size=3, max_size=3))
def test_what_a_seed_does_to_all_allocations_cancels(shifts):
    base = {UNIFORM: [1.0, 1.2, 1.1], LOW: [0.9, 1.0, 1.05], TOP: [1.3, 1.2, 1.4]}
    moved = {a: list(np.add(row, shifts)) for a, row in base.items()}
    before, after = (compare(_table(v), UNIFORM) for v in (base, moved))
    for allocation in (LOW, TOP):
        x, y = _by(before, allocation), _by(after, allocation)
        assert (y.difference, y.low, y.high) == pytest.approx((x.difference, x.low, x.high))


def test_more_comparisons_widen_the_interval():
    values = _table({UNIFORM: [1.0, 1.5, 1.1], LOW: [0.8, 1.4, 1.0]})
    widths = [_width(compare(values, UNIFORM, comparisons=k)) for k in (1, 3, 10)]
    assert widths == sorted(widths)
    assert len(set(widths)) == 3


def test_intervals_cover_the_truth_as_often_as_they_claim():
    # 2000 experiments, 95 % each with three simultaneous differences. Bonferroni covers at least
    # 95 %; below 92.5 % the binomial tail is under 1e-6.
    rng = np.random.default_rng(0)
    truth = {UNIFORM: 0.0, LOW: -0.1, TOP: 0.2, Allocation([4, 0]): 0.0}
    covered = 0
    for _ in range(2000):
        seeds = rng.normal(0, 3, size=3)
        values = {
            a: dict(enumerate(mean + seeds + rng.normal(0, 1, 3))) for a, mean in truth.items()
        }
        rows = compare(values, UNIFORM)
        covered += all(row.low <= truth[row.allocation] <= row.high for row in rows)
    assert covered / 2000 > 0.925


def test_the_reference_differs_from_itself_by_nothing():
    row = _by(compare(_table({UNIFORM: [1.0, 2.0], LOW: [3.0, 2.0]}), UNIFORM), UNIFORM)
    assert (row.difference, row.low, row.high) == (0, 0, 0)
    assert (row.mean, row.seeds) == (1.5, 2)
    assert row.standard_error == pytest.approx(0.5)


def test_one_seed_gives_a_difference_without_an_end():
    row = _by(compare({UNIFORM: {1: 2.0}, LOW: {1: 1.5}}, UNIFORM), LOW)
    assert row.difference == -0.5
    assert (row.low, row.high, row.standard_error) == (-math.inf, math.inf, math.inf)


def test_seeds_that_one_allocation_lacks_are_left_out():
    rows = compare({UNIFORM: {1: 1.0, 2: 9.0, 3: 2.0}, LOW: {1: 1.0, 3: 3.0, 4: 7.0}}, UNIFORM)
    assert [row.seeds for row in rows] == [2, 2]
    assert _by(rows, LOW).difference == 0.5
    assert _by(rows, UNIFORM).mean == 1.5


def test_rows_come_with_the_best_first():
    rows = compare(_table({UNIFORM: [2.0, 2.0], LOW: [1.0, 1.5], TOP: [3.0, 2.5]}), UNIFORM)
    assert [row.allocation for row in rows] == [LOW, UNIFORM, TOP]


@pytest.mark.parametrize(
    ("values", "options", "message"),
    [
        ({LOW: {1: 1.0}}, {}, "has no values to compare with"),
        ({UNIFORM: {1: 1.0}, LOW: {2: 1.0}}, {}, "no seed was run by all"),
        ({UNIFORM: {1: math.nan}}, {}, "not finite"),
        ({UNIFORM: {1: 1.0}}, {"confidence": 1.0}, "between 0 and 1"),
        ({UNIFORM: {1: 1.0}}, {"comparisons": 0}, "at least 1"),
    ],
)
def test_compare_refuses_what_cannot_be_compared(values, options, message):
    with pytest.raises(ValueError, match=message):
        compare(values, UNIFORM, **options)


def _table(rows):
    return {allocation: dict(enumerate(row)) for allocation, row in rows.items()}


def _by(rows, allocation):
    return next(row for row in rows if row.allocation == allocation)


def _width(rows):
    row = _by(rows, LOW)
    return row.high - row.low


def test_spread_recovers_what_the_values_were_made_of() -> None:
    """Standard deviations 3 and 1 of 200 allocations on 5 seeds: within a fifth, 8 sigma."""
    rng = np.random.default_rng(0)
    allocations = [Allocation((1, n)) for n in range(200)]
    true = rng.normal(0, 3, 200)
    shift = rng.normal(0, 10, 5)  # the seeds' common effect, which is no noise
    values = {
        a: {s: float(true[i] + shift[s] + rng.normal()) for s in range(5)}
        for i, a in enumerate(allocations)
    }
    found = spread(values)
    assert found is not None
    assert found.signal == pytest.approx(float(true.std()), rel=0.2)
    assert found.noise == pytest.approx(1, rel=0.2)


def test_spread_of_alike_allocations_has_no_signal() -> None:
    values = {Allocation((1, n)): {0: float(n % 2), 1: float((n + 1) % 2)} for n in range(4)}
    found = spread(values)
    assert found is not None
    assert found.signal == 0
    assert found.noise > 0


def test_spread_needs_two_allocations_on_two_seeds() -> None:
    assert spread({}) is None
    assert spread({Allocation((1, 1)): {0: 1.0, 1: 2.0}}) is None
    assert spread({Allocation((1, 1)): {0: 1.0}, Allocation((1, 2)): {0: 1.0}}) is None
