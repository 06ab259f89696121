"""Search where a model's experts belong: `python -m search.run --budget 160`."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from mola.demo import DEFAULTS
from search import config
from search.bounds import Fixed, PerLayer
from search.cli import (
    CommaList,
    Command,
    Number,
    Whole,
    adapter_options,
    data_options,
    model_options,
    option,
    positive,
    study_options,
    training_options,
    user_errors,
)
from search.command_line import given_options, module_command
from search.plan import Plan, Settings, prepare, with_demo_defaults
from search.signals import StopSignals
from search.terminal import calm_libraries, warnings_as_lines

if TYPE_CHECKING:
    import optuna

    from search.pool import Pool
    from search.priors.given import Prior
    from search.updates import Update

STOPPED_BY_FAILURES = 1
SAMPLERS = ("budget", "tpe", "gp", "cmaes", "random")  # search.sampler's and search.pruner's lists:
PRUNERS = ("median", "none")  # importing them takes longer than --help may


def _demo_defaults() -> str:
    """Say for the help which defaults are others with the built-in model."""
    settings = ", ".join(f"{k.replace('_', '-')} {v:g}" for k, v in DEFAULTS.items())
    return f"Without --model the defaults are those of the built-in one: {settings}."


@click.command(cls=Command, context_settings={"max_content_width": 100}, epilog=_demo_defaults())
@option(
    "Search",
    "--budget",
    type=positive,
    required=True,
    help="Number of experts over all layers.",
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
    default="median",
    help="median: stop a proxy that is worse at a rung than half of the others.",
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
    type=Whole(min=0),
    default=3,
    help="Number of fresh seeds; 0: the winner stays unconfirmed.",
)
@option(
    "Search",
    "--seed",
    type=Whole(min=0),
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
    type=positive,
    help="Proxies at a time.  [default: one per GPU, else one per core, at most 4]",
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
    help="Ray cluster to join, or auto.  [default: start Ray on this machine]",
)
@option(
    "Machines",
    "--max-failures",
    type=positive,
    default=5,
    help="Stop after so many failed proxies in a row.",
)
@option("Study", "--study", help="Name of the study.  [default: from model, data and budget]")
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
    with user_errors(), warnings_as_lines():
        settings = with_demo_defaults(Settings(**options), given)
        if settings.model is None and not settings.quiet:
            click.echo(
                "Model: the built-in demonstration model (choose yours by --model)", err=True
            )
        plan = prepare(settings)
        if dry_run:
            from search.dry_run import describe

            click.echo(describe(plan))
            return 0
        study, url = _open(plan)
        priors = _settle(plan, study)
    command = module_command("run", *given_options(ctx.command, vars(plan.settings), given))
    return _search(plan, study, url, command, priors)


def _open(plan: Plan) -> tuple[optuna.Study, str]:
    """Open the study, and write the settings beside it."""
    import optuna

    from search.pruner import make_pruner
    from search.results import study_folder
    from search.sampler import make_sampler
    from studies.storage import mask
    from studies.store import open_study, storage_url

    settings, name = plan.settings, str(plan.settings.study)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    url = storage_url(settings.root, name, settings.storage)
    sampler = make_sampler(settings.sampler, plan.spec.budget, settings.seed)
    pruner = make_pruner(settings.pruner)
    study = open_study(name, url, plan.spec, sampler=sampler, pruner=pruner)
    in_force = {field.name: getattr(settings, field.name) for field in fields(settings)}
    if settings.storage is not None and mask(settings.storage) != settings.storage:
        in_force["storage"] = None  # a file is no place for a password
    path = study_folder(settings) / "config.toml"
    config.write(path, in_force, "Settings of this study: python -m search.run --config FILE")
    return study, url


def _settle(plan: Plan, study: optuna.Study) -> tuple[Prior, ...]:
    """Measure the priors that need it, before a worker takes the GPU; tell study and sampler."""
    from search.priors.settle import settle
    from search.sampler import make_sampler

    settings = plan.settings
    gpus = settings.gpus_per_worker
    device = "cpu" if gpus == 0 else "auto" if gpus and gpus > 1 else "any"
    priors = settle(study, plan.spec, plan.data, plan.priors, device=device, quiet=settings.quiet)
    if priors:
        believed = [prior.allocation for prior in priors]
        study.sampler = make_sampler(settings.sampler, plan.spec.budget, settings.seed, believed)
    return priors


def _search(
    plan: Plan, study: optuna.Study, url: str, command: str, priors: tuple[Prior, ...]
) -> int:
    """Run the search to its end, and print what it found.

    Args:
        plan: What is to be done.
        study: Where it is recorded.
        url: Of the storage.
        command: Repeats this run.
        priors: What it begins with, beside the named allocations.

    Returns:
        The exit status.
    """
    from rich.console import Console

    from search.dashboard import Dashboard
    from search.display import Board, display
    from search.driver import Driver, Rules, StopRequestedError, TooManyFailuresError
    from search.plan import most_replicates
    from search.pool import PoolError
    from search.priors.named import named
    from search.results import continue_command
    from studies.store import records

    settings, budget = plan.settings, plan.spec.budget
    board = Board(
        title=study.study_name,
        uniform=named("5555", budget),
        steps=settings.steps,
        highest=max(budget.highs),
        later=most_replicates(settings, budget),
    )
    board.recall(records(study))
    rules = Rules(
        settings.trials, settings.finalists, settings.confirm_seeds, settings.max_failures
    )
    dashboard = Dashboard(study)
    with StopSignals() as signals:
        try:
            with display(board, Console(stderr=True), quiet=settings.quiet) as show:

                def notify(update: Update) -> None:
                    show(update)
                    dashboard.apply(update)

                driver = Driver(
                    study,
                    plan.spec,
                    lambda: _begin(plan, study, command, signals),
                    rules,
                    priors=priors,
                    notify=notify,
                    stop_requested=signals.requested,
                )
                conclusion = driver.run()
        except (StopRequestedError, TooManyFailuresError, PoolError) as error:
            stopped = signals.received
            click.echo(
                "Stopped; the trials under way start again." if stopped else f"Error: {error}",
                err=True,
            )
            click.echo(f"To go on: {continue_command(settings)}", err=True)
            return 128 + stopped if stopped else STOPPED_BY_FAILURES
    if not driver.started and not settings.quiet:
        click.echo(
            f"The study {study.study_name} is finished: {driver.goal} allocations are measured; "
            "a higher --trials goes on with it",
            err=True,
        )
    return _finish(plan, study, url, conclusion)


def _begin(plan: Plan, study: optuna.Study, command: str, signals: StopSignals) -> Pool:
    """Record that this command runs trials, and start the workers."""
    from search.plan import most_replicates
    from studies.provenance import note_run

    settings, budget = plan.settings, plan.spec.budget
    note_run(
        study,
        command,
        train_rows=len(plan.data.train),
        validation_rows=len(set(plan.data.validation["row"])),
        goal=min(settings.trials, budget.size()),
        replicates=most_replicates(settings, budget),
    )
    return _open_pool(plan, signals)


def _open_pool(plan: Plan, signals: StopSignals) -> Pool:
    """Start the workers."""
    from search.proxy import Task
    from search.workers import RayPool

    settings, spec = plan.settings, plan.spec
    task = Task(spec.model, spec.adapter, spec.train)
    with user_errors():
        pool = RayPool(
            task,
            plan.data,
            workers=settings.workers,
            gpus_per_worker=settings.gpus_per_worker,
            address=settings.address,
        )
    signals.install()  # Ray takes SIGTERM for itself
    return pool


def _finish(plan: Plan, study: optuna.Study, url: str, conclusion: dict[str, Any]) -> int:
    """Write the files of a finished search, and print its results."""
    from rich.console import Console

    from search.dashboard import refresh
    from search.report import write_report
    from search.results import print_results, study_folder
    from studies.export import allocation_document
    from studies.files import write_json_atomic
    from studies.store import write_trials_csv

    refresh(study)
    folder = study_folder(plan.settings)
    write_trials_csv(study, folder / "trials.csv")
    if conclusion["winner"] is None:
        click.echo(f"Error: {conclusion['text']}; see {folder / 'trials.csv'}", err=True)
        return STOPPED_BY_FAILURES
    write_json_atomic(folder / "allocation.json", allocation_document(study))
    write_report(study, plan.settings.root, plan.settings.storage)
    print_results(Console(), conclusion, plan.settings, plan.spec, url)
    return 0


if __name__ == "__main__":
    main()
