"""Search where a model's experts belong: `python -m search.run --budget 160`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from mola.demo import DEFAULTS
from search import config, job
from search.bounds import BudgetList, Fixed, PerLayer
from search.console.cli import (
    MOST_SEEDS,
    MOST_WORKERS,
    CommaList,
    Command,
    Number,
    Whole,
    adapter_options,
    data_options,
    first_seed,
    model_options,
    option,
    positive,
    rate,
    study_options,
    training_options,
    user_errors,
)
from search.console.command_line import given_options, module_command
from search.console.terminal import calm_libraries, warnings_as_lines
from search.plan import Settings, prepare, with_demo_defaults

PATIENCE = ("auto", "none")
# The lists of search.sampler and search.pruner, which take longer to import than --help may:
SAMPLERS = ("budget", "tpe", "gp", "cmaes", "random")
PRUNERS = ("learnt", "median", "none")


def _demo_defaults() -> str:
    """Say for the help which defaults are others with the built-in model."""
    settings = ", ".join(f"{k.replace('_', '-')} {v:g}" for k, v in DEFAULTS.items())
    return f"Without --model the defaults are those of the built-in one: {settings}."


@click.command(cls=Command, context_settings={"max_content_width": 100}, epilog=_demo_defaults())
@option(
    "Search",
    "--budget",
    type=BudgetList(),
    required=True,
    help="Number of experts over all layers. Several, 96,128,160, are searched one after the "
    "other, each as a study STUDY-N that begins with what the one before has found, and compared.",
)
@option(
    "Search",
    "--trials",
    type=positive,
    default=40,
    help="Distinct allocations to measure in all; named ones, priors and earlier runs included.",
)
@option("Search", "--steps", type=positive, default=40, help="Optimizer steps of a proxy.")
@option(
    "Search",
    "--min-experts",
    type=PerLayer(0),
    default=1,
    help="Fewest experts in a layer, or in each: 1,1,2,... or 1x16 2x16; 0 leaves layers frozen.",
)
@option(
    "Search",
    "--max-experts",
    type=PerLayer(1),
    help="Most experts in a layer, or in each.  [default: twice the mean, rounded up]",
)
@option(
    "Search",
    "--fix",
    type=Fixed(),
    default=(),
    help="Layers whose numbers of experts are given and not searched: 0=2,31=8.",
)
@option(
    "Search",
    "--prior",
    multiple=True,
    metavar="NAME|FILE",
    help="An allocation to begin with: 5555, 2468, 2882, 8642, 8228; alphalora (from the weights), "
    "gradient or representation (from some training rows as well), measured on the model before "
    "the search begins; a file with an allocation, or with a score per layer as JSON "
    '{"scores": [...]}, higher for more experts. Repeatable.',
)
@option(
    "Search",
    "--warm-from",
    multiple=True,
    metavar="STUDY",
    help="Another search to begin with, of another data set, model of the family, depth or budget: "
    "what its layers' experts were worth, which gives an allocation to try and a direction that "
    "the sampler follows as long as the trials agree. Taken once and kept. Repeatable.",
)
@option(
    "Search",
    "--sampler",
    type=click.Choice(SAMPLERS),
    default="budget",
    help="budget: this project's own; random: uniform over the budget; the others are Optuna's, "
    "projected onto the budget.",
)
@option(
    "Search",
    "--pruner",
    type=click.Choice(PRUNERS),
    default="learnt",
    help="learnt: stop a proxy whose rung says with 90 % probability that it ends in the worse "
    "half, by how rungs foretold ends so far; median: one that is worse at a rung than half of the "
    "others.",
)
@option(
    "Search",
    "--patience",
    type=click.Choice(PATIENCE),
    default="none",
    help="auto: stop before --trials once the best allocation that is left would gain less than "
    "the confirmation can tell from nothing.",
)
@option(
    "Search",
    "--rungs",
    type=CommaList(int),
    help="Steps after which a proxy is evaluated on the way, or none.  [default: half of steps]",
)
@option(
    "Search",
    "--finalists",
    type=positive,
    default=3,
    help="The best so many allocations run again on fresh seeds, as do the named ones and priors.",
)
@option(
    "Search",
    "--confirm-seeds",
    type=Whole(0, MOST_SEEDS),
    default=3,
    help="Number of fresh seeds. The named allocations run on two of them at the beginning, which "
    "tells how noisy a proxy is. 0: the winner stays unconfirmed.",
)
@option(
    "Search",
    "--seed",
    type=first_seed,
    default=0,
    help="Seed of proxies and sampler; the fresh seeds follow it.",
)
@model_options
@data_options
@adapter_options
@training_options
@option(
    "Machines",
    "--workers",
    type=Whole(1, MOST_WORKERS),
    help="Proxies at a time.  [default: one per GPU, else one per core, at most 4, and more on the "
    "nodes that join a cluster later]",
)
@option(
    "Machines",
    "--gpus-per-worker",
    type=Number(min=0),
    help="GPUs of a worker: 0.5 packs two on a GPU, 2 shards the model over two.  "
    "[default: 1 if there is any]",
)
@option(
    "Machines",
    "--address",
    metavar="HOST:PORT|auto",
    help="Ray cluster to join, of which this machine is a part.  [default: start Ray on this "
    "machine]",
)
@option(
    "Machines",
    "--max-failures",
    type=positive,
    default=5,
    help="Stop after so many failed proxies in a row.",
)
@option(
    "Machines",
    "--trial-timeout",
    type=rate,
    metavar="SECONDS",
    help="End a proxy that takes longer, with its process, and try it once more.  [default: 10 "
    "times the slowest so far, at least 10 minutes; or after an hour of silence, or as long as the "
    "slowest]",
)
@option(
    "Study",
    "--study",
    help="Name of the study, or the beginning of the names of several budgets.  "
    "[default: from model, data and budget]",
)
@study_options
@option(
    "Other",
    "--config",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    is_eager=True,
    callback=config.use_config,
    help="TOML or YAML file with any of these settings; flags win.",
)
@option("Other", "--quiet", is_flag=True, help="Show nothing but errors and the results.")
@option("Other", "--dry-run", is_flag=True, help="Print what would be done, and write nothing.")
@click.pass_context
def main(ctx: click.Context, /, **options: Any) -> int:
    """Search how many LoRA experts each layer deserves, under a fixed total.

    Short fine-tunes (proxies) of allocations run on Ray workers and are recorded in an Optuna
    study. The same command goes on with the study, whatever ended the last run.
    """
    calm_libraries()
    options.pop("config")
    dry_run = options.pop("dry_run")
    given = {name for name in options if ctx.get_parameter_source(name) != ParameterSource.DEFAULT}
    budget: int | tuple[int, ...] = options.pop("budget")
    totals = (budget,) if isinstance(budget, int) else budget
    with user_errors(), warnings_as_lines():
        settings = with_demo_defaults(Settings(budget=totals[0], **options), given)
        if settings.model is None and not settings.quiet:
            click.echo(
                "Model: the built-in demonstration model (choose yours by --model)", err=True
            )
    if len(totals) > 1:
        return _several(settings, totals, ctx, given, dry_run)
    return _one(settings, ctx, given, dry_run)


def _one(settings: Settings, ctx: click.Context, given: set[str], dry_run: bool) -> int:
    """Search one budget, or say what would be done."""
    with user_errors(), warnings_as_lines():
        from search.budgets.members import check_single

        plan = prepare(settings)
        if dry_run:
            from search.dry_run import describe

            click.echo(describe(plan))
            return 0
        check_single(str(plan.settings.study), settings.root, settings.storage)
        opened = ctx.with_resource(job.open_study(plan))
        priors = job.settle_priors(plan, opened.study)
    line = module_command("run", *given_options(ctx.command, vars(plan.settings), given))
    return job.search(plan, opened, line, priors)


def _several(
    settings: Settings,
    totals: tuple[int, ...],
    ctx: click.Context,
    given: set[str],
    dry_run: bool,
) -> int:
    """Search several budgets, or say what would be done."""
    from search.budgets import job as budgets

    with user_errors(), warnings_as_lines():
        group = budgets.plan_budgets(settings, totals)
        if dry_run:
            click.echo(budgets.describe(group))
            return 0
        opened = ctx.with_resource(budgets.open_studies(group))
    line = module_command("run", *given_options(ctx.command, group.in_force(), given))
    return budgets.search(group, opened, line)


if __name__ == "__main__":
    main()
