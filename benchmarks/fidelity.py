"""Ask how well short proxies order allocations, and which pruner pays.

    python -m benchmarks.fidelity                       the tables, from the recorded curves
    python -m benchmarks.fidelity record demo           run and record the built-in model's proxies
    python -m benchmarks.fidelity take NAME --study S   record the curves of a search, not pruned

A curve is a validation objective by step, of a fine-tune of some length (the learning rate falls to
zero over the length, so that a short fine-tune is not the beginning of a long one). Orders are
compared by Spearman's rank correlation, with a bootstrap interval over allocations. A pruner is
replayed on a search's curves in their order: what it saves, and how often it loses the best.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from statistics import median

import numpy as np
import pandas as pd
from accelerate import Accelerator

from mola.allocation import ExpertBudget
from mola.base import load_model, load_tokenizer
from mola.data import encode_splits, load_splits
from mola.demo import DEFAULTS
from mola.events import Finished, Rung
from mola.settings import AdapterSettings, ModelSource, TrainSettings
from mola.trial import run_trial
from search.priors.named import NAMES, named
from search.pruner import ends_behind
from search.sampler.rungs import Passed
from studies import store

STARTUP = 8  # trials before a pruner acts, and the fewest that are worth a correlation
RECORDED = Path(__file__).parent / "recorded"
LENGTHS = (7, 14, 28, 84)  # of the built-in model's fine-tunes; a proxy has 28 steps
COLUMNS = ["allocation", "seed", "length", "step", "objective"]


def record_demo(path: Path, random: int, seeds: int) -> None:
    """Run proxies of every length on the built-in model; a table that is there is continued."""
    source = ModelSource()
    model = load_model(source)
    data = encode_splits(
        load_splits(None, limit_validation=int(DEFAULTS["validation_rows"])),
        load_tokenizer(source),
        prompt_template=None,
        max_length=int(DEFAULTS["max_length"]),
        name="the built-in task",
    )
    budget, rng = ExpertBudget(32, 160, low=int(DEFAULTS["min_experts"])), np.random.default_rng(0)
    allocations = [named(name, budget) for name in NAMES]
    allocations += [budget.uniform(rng) for _ in range(random)]
    table = pd.read_csv(path) if path.exists() else pd.DataFrame(columns=COLUMNS)
    done = set(zip(table["allocation"], table["seed"], table["length"], strict=True))
    for seed in range(seeds):
        for allocation in allocations:
            for length in LENGTHS:
                if (str(allocation), seed, length) in done:
                    continue
                train = TrainSettings(
                    steps=length,
                    batch_size=int(DEFAULTS["batch_size"]),
                    learning_rate=float(DEFAULTS["learning_rate"]),
                )
                rungs = tuple(s for s in LENGTHS if s < length)
                events = run_trial(
                    model, data, allocation, AdapterSettings(), train,
                    seed=seed, accelerator=Accelerator(), rungs=rungs,
                )  # fmt: skip
                rows = [
                    (str(allocation), seed, length, event.step, event.objective)
                    for event in events
                    if isinstance(event, (Rung, Finished))
                ]
                frame = pd.DataFrame(rows, columns=COLUMNS)
                frame.to_csv(path, mode="a", header=not path.exists(), index=False)
                print(
                    f"seed {seed}  {length:>3} steps  {allocation}  {rows[-1][-1]:.4f}", flush=True
                )


def take_study(path: Path, name: str, storage: str) -> None:
    """Write the curves of a search's complete trials."""
    study = store.load_study(name, storage)
    spec = store.study_spec(study)
    rows = []
    for record in store.records(study):
        if record.state == "COMPLETE":
            curve = {**record.rungs, spec.train.steps: record.objective}
            rows += [
                (str(record.allocation), record.seed, spec.train.steps, step, objective)
                for step, objective in sorted(curve.items())
            ]
    pd.DataFrame(rows, columns=COLUMNS).to_csv(path, index=False)


def interval(x: np.ndarray, y: np.ndarray, draws: int = 2000) -> tuple[float, float, float]:
    """Return Spearman's correlation and its 95 % bootstrap interval over the pairs."""

    def of(index: np.ndarray) -> float:
        a, b = pd.Series(x[index]).rank(), pd.Series(y[index]).rank()
        return float(np.corrcoef(a, b)[0, 1]) if a.std() and b.std() else math.nan

    rng = np.random.default_rng(0)
    everything = np.arange(len(x))
    samples = [of(rng.choice(everything, len(x))) for _ in range(draws)]
    low, high = np.nanquantile(samples, [0.025, 0.975])
    return of(everything), float(low), float(high)


def print_orders(table: pd.DataFrame) -> None:
    """Print how each (length, step) orders allocations against the ends of each length.

    Objectives are means over the seeds that all allocations have.
    """
    by_seed = table.pivot_table(index="seed", columns="allocation", values="objective").notna()
    seeds = by_seed.index[by_seed.all(axis=1)]  # a mean over other seeds is another level
    table = table[table["seed"].isin(seeds)]
    means = table.groupby(["length", "step", "allocation"])["objective"].mean()
    ends = [(length, length) for length in sorted(table["length"].unique())]
    print(f"{'order after':<22}{'as after':<14}{'Spearman':>9}   95 % interval")
    for length, step in means.index.droplevel("allocation").unique():
        for whole in ends:
            if (
                whole[0] < length
                or whole == (length, step)
                or (whole[0] > length and step < length)
            ):
                continue
            both = pd.concat([means[length, step], means[whole]], axis=1).dropna().to_numpy()
            if len(both) < 5:
                continue
            value, low, high = interval(both[:, 0], both[:, 1])
            print(
                f"step {step:>3} of {length:<12}step {whole[0]:<9}{value:>9.2f}   "
                f"[{low:.2f}, {high:.2f}]  {len(both)} allocations, {len(seeds)} seeds"
            )


def print_seeds(table: pd.DataFrame) -> None:
    """Print how one seed's order agrees with another's, which bounds all of the above."""
    for length in sorted(table["length"].unique()):
        ends = table[(table["length"] == length) & (table["step"] == length)]
        by_seed = ends.pivot_table(index="allocation", columns="seed", values="objective").dropna()
        if by_seed.shape[1] < 2 or len(by_seed) <= STARTUP:
            continue
        pairs = [
            interval(by_seed[a].to_numpy(), by_seed[b].to_numpy())[0]
            for i, a in enumerate(by_seed.columns)
            for b in by_seed.columns[i + 1 :]
        ]
        print(f"step {length:>3}: one seed's order against another's {np.mean(pairs):>6.2f}")


def print_pruners(table: pd.DataFrame) -> None:
    """Replay pruners on the curves of each length and seed, in random orders of the trials."""
    print(f"{'pruner':<10}{'rungs':<12}{'steps saved':>12}{'best kept':>11}{'loss':>9}")
    for length in sorted(table["length"][table["step"] < table["length"]].unique()):
        curves = table[table["length"] == length].pivot_table(
            index=["seed", "allocation"], columns="step", values="objective"
        )
        curves = curves.dropna().groupby(level="seed").filter(lambda group: len(group) > STARTUP)
        rungs = [int(s) for s in curves.columns if s < length]
        if curves.empty:
            continue
        for chosen in [(r,) for r in rungs] + ([tuple(rungs)] if len(rungs) > 1 else []):
            for name, rule in RULES.items():
                saved, kept, loss = _replay(curves, chosen, length, rule)
                title = ",".join(map(str, chosen))
                print(f"{name:<10}{title:<12}{saved:>12.0%}{kept:>11.0%}{loss:>9.4f}   of {length}")


def _median(value: float, passed: list[tuple[float, float | None]]) -> bool:
    return len(passed) >= STARTUP and value > median(at_rung for at_rung, _ in passed)


def _learnt(value: float, passed: list[tuple[float, float | None]]) -> bool:
    complete = np.array([(at_rung, end) for at_rung, end in passed if end is not None])
    return len(complete) >= STARTUP and ends_behind(value, Passed(complete[:, 0], complete[:, 1]))


RULES = {"median": _median, "learnt": _learnt}  # search.pruner's decisions, without a study


def _replay(
    curves: pd.DataFrame,
    rungs: tuple[int, ...],
    length: int,
    prunes: Callable[[float, list[tuple[float, float | None]]], bool],
) -> tuple[float, float, float]:
    """Run the trials of each seed in random orders under a pruner, one at a time.

    Returns:
        The part of the steps saved, how often the best trial survives, and what the best survivor
        is worse by. What the evaluations at the rungs cost is not in the first.
    """
    rng = np.random.default_rng(0)
    saved, kept, loss = [], [], []
    for _, group in curves.groupby(level="seed"):
        for _ in range(200):
            seen: dict[int, list[tuple[float, float | None]]] = {rung: [] for rung in rungs}
            spent, survivors = 0, []
            for row in group.to_numpy()[rng.permutation(len(group))]:
                values = dict(zip(group.columns, row, strict=True))
                stop = next((r for r in rungs if prunes(values[r], seen[r])), length)
                spent += stop
                end = values[length] if stop == length else None
                survivors += [end] if end is not None else []
                for rung in rungs:
                    if rung <= stop:
                        seen[rung].append((values[rung], end))
            best = float(group[length].min())
            saved.append(1 - spent / (length * len(group)))
            kept.append(min(survivors) == best)
            loss.append(min(survivors) - best)
    return float(np.mean(saved)), float(np.mean(kept)), float(np.mean(loss))


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("action", nargs="?", choices=("show", "record", "take"), default="show")
    parser.add_argument("name", nargs="?", help="of the table; default: all of them")
    parser.add_argument("--random", type=int, default=10, help="random allocations (default: 10)")
    parser.add_argument("--seeds", type=int, default=2, help="seeds of each (default: 2)")
    parser.add_argument("--study", help="name of the search whose curves are taken")
    parser.add_argument("--root", type=Path, default=Path("runs"), help="folder of the studies")
    options = parser.parse_args()
    path = RECORDED / f"{options.name}.csv"
    if options.action == "record":
        record_demo(path, options.random, options.seeds)
    elif options.action == "take":
        url = store.storage_url(options.root, options.study, None)
        take_study(path, options.study, url)
    for table_path in sorted(RECORDED.glob("*.csv")) if options.name is None else [path]:
        table = pd.read_csv(table_path)
        print(f"\n{table_path.stem}: {len(table)} evaluations")
        print_orders(table)
        print_seeds(table)
        print_pruners(table)


if __name__ == "__main__":
    main()
