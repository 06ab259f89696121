"""Search several budgets one after the other, on the same workers, each with what is known.

Each budget is a study of its own, like any other: it can be looked at, exported and continued
alone. A budget's search begins with what the one before has found, as by `--warm-from`; what was
taken is recorded in the study, so that going on changes nothing of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from search import job
from search.budgets.members import find_members, join, member_name
from search.budgets.pool import Workers
from search.console.command_line import module_command
from search.plan import Plan, Settings, check_budgets, default_study_name, prepare, with_budget

if TYPE_CHECKING:
    import optuna

    from search.job import Opened
    from search.priors.given import Prior


@dataclass(frozen=True)
class Group:
    """A search over several budgets that could start.

    Attributes:
        name: What the studies' names begin with.
        totals: The budgets, in the order of their searches.
        plans: One per budget.
    """

    name: str
    totals: tuple[int, ...]
    plans: tuple[Plan, ...]

    @property
    def settings(self) -> Settings:
        """The settings of the first budget, most of which are those of all."""
        return self.plans[0].settings

    @property
    def folder(self) -> Path:
        """Where the settings and the report of all budgets are."""
        return self.settings.root / self.name

    def in_force(self) -> dict[str, Any]:
        """Give the settings of all budgets together, as the command takes them."""
        return vars(self.settings) | {"budget": self.totals, "study": self.name}


def plan_budgets(settings: Settings, totals: Sequence[int]) -> Group:
    """Check everything that can be checked without training, for all budgets.

    Args:
        settings: of all budgets; `study` is what the studies' names begin with.
        totals: the budgets.

    Raises:
        ValueError: a setting is wrong, a budget is out of reach, or model or data are missing.
    """
    check_budgets(settings, totals)
    name = settings.study or default_study_name(settings, with_total=False)
    first, *others = totals
    plan = prepare(replace(settings, budget=first, study=member_name(name, first)))
    plans = [plan, *(with_budget(plan, total, member_name(name, total)) for total in others)]
    for place, before in enumerate(totals[:-1], 1):
        warm_from = (*settings.warm_from, member_name(name, before))
        plans[place] = replace(
            plans[place], settings=replace(plans[place].settings, warm_from=warm_from)
        )
    return Group(name, tuple(totals), tuple(plans))


def describe(group: Group) -> str:
    """Write the plans for people."""
    from search import dry_run

    names = [str(plan.settings.study) for plan in group.plans]
    parts = [
        f"{len(group.plans)} budgets, one after the other, on the same workers: "
        f"{', '.join(names)}. From the second on each begins with what the one before has found."
    ]
    return "\n\n".join([*parts, *(dry_run.describe(plan) for plan in group.plans)])


@contextmanager
def open_studies(group: Group) -> Iterator[list[tuple[Opened, tuple[Prior, ...]]]]:
    """Open all studies and measure their priors, before a worker takes the GPU.

    Yields:
        Per budget the study, which is this process's alone, and its priors.

    Raises:
        ValueError: a study is another search, a prior cannot be measured, or a study bears the
            name of all budgets together.
    """
    from mola.count import parameters_per_expert
    from studies.records import get_priors

    _check_free(group)
    parameters = parameters_per_expert(group.plans[0].spec.model, group.plans[0].spec.adapter)
    opened = []
    measured: Mapping[str, Any] = {}
    with ExitStack() as stack:
        for plan in group.plans:
            one = stack.enter_context(job.open_study(plan))
            join(one.study, group.name, parameters)
            opened.append((one, job.settle_priors(plan, one.study, measured)))
            measured = get_priors(one.study)
        group.folder.mkdir(parents=True, exist_ok=True)
        heading = "Settings of all budgets: python -m search.run --config FILE"
        job.write_settings(group.folder / "config.toml", group.in_force(), heading)
        yield opened


def search(group: Group, opened: Sequence[tuple[Opened, tuple[Prior, ...]]], command: str) -> int:
    """Search budget after budget, and say at the end how many experts pay.

    Args:
        group: what is to be done.
        opened: see `open_studies`.
        command: repeats this run.

    Returns:
        The exit status: of the first budget whose search did not end well, else 0.
    """
    go_on = module_command("run", "--config", str(group.folder / "config.toml"))
    before: optuna.Study | None = None
    with Workers() as workers:
        for plan, (one, priors) in zip(group.plans, opened, strict=True):
            study = one.study
            if not plan.settings.quiet:
                click.echo(f"Budget {plan.spec.total}: the study {study.study_name}", err=True)
            if before is not None:
                plan, priors = _begin_with(before, plan, study, priors)
            status = job.search(plan, one, command, priors, workers=workers, go_on=go_on)
            if status != 0:
                return status
            before = study
    _finish(group)
    return 0


def _begin_with(
    before: optuna.Study, plan: Plan, study: optuna.Study, priors: tuple[Prior, ...]
) -> tuple[Plan, tuple[Prior, ...]]:
    """Take what the search before has found, unless the study has begun with it already."""
    from search.priors.transfer import read_source

    if any(p.source is not None and p.source.study == before.study_name for p in priors):
        return plan, priors
    try:
        source = read_source(before, plan.spec.objective)
    except ValueError as error:  # too little was measured
        if not plan.settings.quiet:
            click.echo(str(error), err=True)
        return plan, priors
    plan = replace(plan, sources=(*plan.sources, source))
    return plan, job.begin_with_sources(plan, study, priors)


def _finish(group: Group) -> None:
    """Write the report of all budgets, and print what they say together."""
    from rich.console import Console

    from search.budgets.compare import read_budgets
    from search.budgets.print import print_budgets
    from search.budgets.report import write_budgets_report

    settings = group.settings
    members = find_members(group.name, settings.root, settings.storage)
    budgets = read_budgets(group.name, members)
    path = write_budgets_report(budgets, settings.root, settings.storage)
    print_budgets(Console(), budgets, path)


def _check_free(group: Group) -> None:
    """Refuse a name that is a study's own, whose report and settings would be lost."""
    from studies.store import load_study, storage_url

    settings = group.settings
    try:
        load_study(group.name, storage_url(settings.root, group.name, settings.storage))
    except ValueError:
        return
    raise ValueError(
        f"--study {group.name}: there is a study of this name with one budget; use another name "
        "for several budgets"
    )
