"""Say what a search would do, without doing it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import optuna

from mola.allocation import Allocation
from search.console.bars import spark
from search.plan import Plan, most_replicates
from search.priors.given import Prior
from search.priors.named import named_allocations
from search.priors.transfer import transfer
from search.race import BLOCKS
from search.sampler import make_sampler
from studies import encoding

PROPOSALS = 3


def describe(plan: Plan) -> str:
    """Write the plan for people: the space, the first allocations, the number of proxies."""
    settings, spec, budget = plan.settings, plan.spec, plan.spec.budget
    size, highest = budget.size(), max(budget.highs)
    goal = min(settings.trials, size)
    named = list(named_allocations(budget).items())[:goal]
    believed = [p for p in plan.priors if isinstance(p, Prior)]
    believed += [transfer(source, budget) for source in plan.sources]
    given = [p for p in believed if p.allocation not in dict(named)][: goal - len(named)]
    unknown = [p for p in plan.priors if isinstance(p, str)]
    lines = [
        f"Study {settings.study}: {spec.total} experts over {spec.num_layers} layers, "
        f"{min(budget.lows)} to {highest} in each: {_count(size)} allocations",
        f"A proxy: {settings.steps} steps of {settings.batch_size} rows, evaluated on "
        f"{len(set(plan.data.validation['row']))} rows"
        + (f", also after step {', '.join(map(str, spec.rungs))}" if spec.rungs else ""),
        f"Proxies: {goal} in the search, at most {most_replicates(settings, budget)} more to "
        "confirm its winner",
        f"Named allocations, which run first{_again(settings.confirm_seeds)}:",
        *(f"  {spark(a, highest)}  {','.join(names)}: {a}" for a, names in named),
    ]
    if believed or unknown:
        lines += ["Priors, which follow:"]
        lines += [f"  {spark(p.allocation, highest)}  {p.name}: {p.allocation}" for p in given]
        lines += [f"  {name}: measured on the model when the search starts" for name in unknown]
    first = [*(a for a, _ in named), *(p.allocation for p in given)]
    proposals = [
        f"  {spark(a, highest)}  {a}"
        for a in _proposals(plan, first, goal - len(first) - len(unknown))
    ]
    if proposals:
        lines += ["Proposals of the sampler as long as it has seen no result:", *proposals]
    return "\n".join(lines)


def _again(confirm_seeds: int) -> str:
    seeds = min(BLOCKS, confirm_seeds)
    return f", then on {seeds} of the fresh seeds, to measure the noise" if seeds else ""


def _proposals(plan: Plan, first: Sequence[Allocation], room: int) -> list[Allocation]:
    """Ask the sampler on a study in memory that has the first allocations running."""
    spec = plan.spec
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(
        sampler=make_sampler(plan.settings.sampler, spec.budget, plan.settings.seed)
    )
    distributions: dict[str, Any] = dict(encoding.distributions(spec.budget))
    for allocation in first:
        study.enqueue_trial(encoding.to_params(allocation))
        study.ask(distributions)
    return [
        encoding.from_params(study.ask(distributions).params)
        for _ in range(max(0, min(room, PROPOSALS)))
    ]


def _count(size: int) -> str:
    return f"{size:,}" if size < 10**9 else f"about {size:.1e}"
