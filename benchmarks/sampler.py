"""Compare samplers on artificial landscapes of different kinds; prints a table of regrets.

    python benchmarks/sampler.py --seeds 2

Each search starts, like a real one, with the named allocations. Values carry noise of 15 % of the
gap between uniform and the optimum. Regret is what the incumbent truly loses, in units of that gap:
1 is uniform, 0 the optimum, so that 1 means no gain from searching. The incumbent is the best
posterior mean among the tried allocations for `budget`, the best value seen for the others. Most
landscapes have 32 layers and 160 experts, 1 to 10 each; benchmarks/landscapes.py has them all, and
says which were held out. All is deterministic, the stock samplers' own randomness included.

With `--parallel 8` eight trials run at a time. `--priors` adds searches that are told, and start
with, an allocation believed good: one near the optimum, and that one with its depth reversed.
`--warm` adds searches that begin with another one of 40 trials, as by `--warm-from`: on the same
landscape with other noise (`warm same`), with 0.6 times the budget (`warm budget`), at half the
depth (`warm depth`), and, to mislead, with its depth reversed or with the opposite sign.
`--time` measures the seconds of a proposal instead.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence

import numpy as np
import optuna
from landscapes import LANDSCAPES, Landscape

from mola.allocation import Allocation, ExpertBudget
from search.priors.given import Prior
from search.priors.named import named_allocations
from search.priors.transfer import Source, learn_worth, transfer
from search.sampler import SAMPLERS, make_sampler, posterior_means
from search.sampler.moves import Floats, Ints
from studies.encoding import distributions, from_params, to_params

NOISE = 0.15  # of the gap
PRIORS = ("good prior", "bad prior")
WARM = ("warm same", "warm budget", "warm depth", "warm reversed", "warm opposite")
SOURCE_TRIALS = 40


def search(
    problem: Landscape, column: str, seed: int, trials: Sequence[int], parallel: int
) -> list[float]:
    """Run one search by a sampler, or by `budget` with a prior, and give the incumbents' regrets.

    Returns:
        The incumbent's regret after each number of trials.
    """
    rng = np.random.default_rng([2, seed])
    priors = _priors(problem, column, seed)
    sampler = "budget" if priors else column
    believed = [prior.belief for prior in priors]
    study = optuna.create_study(sampler=make_sampler(sampler, problem.budget, seed, believed))
    first = [*named_allocations(problem.budget), *(prior.allocation for prior in priors)]
    for allocation in first:
        study.enqueue_trial(to_params(allocation))
    space = dict(distributions(problem.budget))
    regrets: list[float] = []
    asked = 0
    while asked < max(trials):
        size = min(parallel, max(trials) - asked)
        running = [study.ask(space) for _ in range(size)]  # type: ignore[arg-type]
        asked += size
        for trial in running:
            truth = _truth(problem, from_params(trial.params))
            study.tell(trial, truth + NOISE * problem.gap * rng.normal())
            if trial.number + 1 in trials:
                lost = _truth(problem, _incumbent(study, problem, sampler))
                regrets.append((lost - problem.best) / problem.gap)
    return regrets


def time_proposals(layers: int, trials: int) -> tuple[float, float]:
    """Measure the slowest of six proposals after a number of finished trials.

    Returns:
        Seconds of wall clock, and of processor time, which other programs' load does not stretch.
    """
    budget = ExpertBudget(layers, 5 * layers)
    rng = np.random.default_rng(0)
    weights = rng.normal(size=layers)
    study = optuna.create_study(sampler=make_sampler("budget", budget, 0))
    space = dict(distributions(budget))
    for _ in range(trials):
        allocation = budget.uniform(rng)
        value = float(weights @ np.log1p(allocation.experts)) + rng.normal()
        params = to_params(allocation)
        study.add_trial(optuna.create_trial(params=params, distributions=space, value=value))
    seconds = []
    for _ in range(6):  # an attempt is among them
        wall, processor = time.perf_counter(), time.process_time()
        study.ask(space)
        seconds.append((time.perf_counter() - wall, time.process_time() - processor))
    return max(wall for wall, _ in seconds), max(processor for _, processor in seconds)


def _priors(problem: Landscape, column: str, seed: int) -> list[Prior]:
    if column in WARM:
        return [_warm(problem, column, seed)]
    if column not in PRIORS:
        return []
    noise = np.random.default_rng([3, seed]).normal(size=len(problem.optimum))
    good = problem.budget.project(problem.optimum * np.exp(0.4 * noise))
    return [Prior(column, good if column == "good prior" else Allocation(good.experts[::-1]))]


def _warm(problem: Landscape, column: str, seed: int) -> Prior:
    """Search a relative of a landscape, and take over what was found."""
    budget, value = _relative(problem, column)
    rng = np.random.default_rng([4, seed])
    study = optuna.create_study(sampler=make_sampler("budget", budget, seed + 1))
    for allocation in named_allocations(budget):
        study.enqueue_trial(to_params(allocation))
    for _ in range(SOURCE_TRIALS):
        trial = study.ask(dict(distributions(budget)))
        counts = np.array([from_params(trial.params).experts])
        study.tell(trial, float(value(counts)[0]) + NOISE * problem.gap * rng.normal())
    worth, _ = learn_worth(study, budget)
    source = Source(column, "", "", "", budget.total, SOURCE_TRIALS, worth)
    return transfer(source, problem.budget)


def _relative(problem: Landscape, column: str) -> tuple[ExpertBudget, Callable[[Ints], Floats]]:
    budget, value = problem.budget, problem.value
    layers, total = budget.num_layers, budget.total
    if column == "warm budget":
        return ExpertBudget(layers, round(0.6 * total), budget.low), value
    if column == "warm depth":  # each layer stands for two
        half = ExpertBudget(layers // 2, total // 2, budget.low, budget.high)
        return half, lambda counts: value(np.repeat(counts, 2, axis=1))
    if column == "warm reversed":
        return budget, lambda counts: value(counts[:, ::-1])
    if column == "warm opposite":
        return budget, lambda counts: -value(counts)
    return budget, value


def _truth(problem: Landscape, allocation: Allocation) -> float:
    return float(problem.value(np.array([allocation.experts]))[0])


def _incumbent(study: optuna.Study, problem: Landscape, sampler: str) -> Allocation:
    if sampler != "budget":
        return from_params(study.best_params)
    means = posterior_means(study, problem.budget)
    return min(means, key=lambda allocation: means[allocation])


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samplers", nargs="+", default=["budget", "tpe", "random"])
    parser.add_argument("--landscapes", nargs="+", default=list(LANDSCAPES), choices=LANDSCAPES)
    parser.add_argument("--seeds", type=int, default=2, help="searches per landscape")
    parser.add_argument("--trials", nargs="+", type=int, default=[30, 60, 100])
    parser.add_argument("--parallel", type=int, default=1, help="trials that run at a time")
    parser.add_argument("--priors", action="store_true", help="add searches with priors")
    parser.add_argument("--warm", action="store_true", help="add searches that begin with others")
    parser.add_argument("--time", action="store_true", help="measure proposals instead")
    args = parser.parse_args()
    if unknown := set(args.samplers) - set(SAMPLERS):
        parser.error(f"unknown samplers {sorted(unknown)}; expected some of {', '.join(SAMPLERS)}")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    if args.time:
        for layers in (32, 126):
            for trials in (30, 100, 1000):
                wall, processor = time_proposals(layers, trials)
                print(f"{layers:4} layers {trials:5} trials {wall:6.2f} s, {processor:.2f} s CPU")
        return
    columns = [*args.samplers, *(PRIORS if args.priors else ()), *(WARM if args.warm else ())]
    _print_table(columns, args.landscapes, args.seeds, sorted(args.trials), args.parallel)


def _print_table(
    columns: Sequence[str],
    names: Sequence[str],
    seeds: int,
    trials: Sequence[int],
    parallel: int,
) -> None:
    print(f"regret after {trials} trials, {parallel} at a time; mean of {seeds} searches")
    print(f"{'':12}", *(f"{c:>{6 * len(trials)}}" for c in columns))
    totals: dict[str, list[Floats]] = {c: [] for c in columns}
    for name in names:
        kind = list(LANDSCAPES).index(name)
        problems = [LANDSCAPES[name](np.random.default_rng([1, kind, s])) for s in range(seeds)]
        for column in columns:
            runs = [search(p, column, seed, trials, parallel) for seed, p in enumerate(problems)]
            totals[column].append(np.mean(runs, axis=0))
        print(f"{name:12}", *(_cells(totals[c][-1]) for c in columns), flush=True)
    print(f"{'mean':12}", *(_cells(np.mean(totals[c], axis=0)) for c in columns))
    print(f"{'worst':12}", *(_cells(np.max(totals[c], axis=0)) for c in columns))


def _cells(regrets: Floats) -> str:
    return "".join(f"{regret:6.2f}" for regret in regrets)


if __name__ == "__main__":
    main()
