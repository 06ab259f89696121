"""Run a prepared search: open its study, settle its priors, start its workers, write its files.

What is imported late is what takes long, so that `--help` and mistakes are answered at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from search import config
from search.console.cli import one_line, user_errors
from search.console.signals import StopSignals
from search.plan import Plan, Settings

if TYPE_CHECKING:
    import signal

    import optuna

    from search.budgets.pool import Workers
    from search.console.display import Board
    from search.console.trouble import StoreTrouble
    from search.driver import Rules
    from search.priors.given import Prior
    from search.updates import Update
    from search.workers.pool import Pool
    from studies.claim import Claim

STOPPED_BY_FAILURES = 1


@dataclass(frozen=True)
class Opened:
    """A study that this process alone works on.

    Attributes:
        study: Where the search is recorded.
        url: Of its storage.
        claim: To be checked now and then.
        trouble: Told of trouble with the storage.
    """

    study: optuna.Study
    url: str
    claim: Claim
    trouble: StoreTrouble


@contextmanager
def open_study(plan: Plan) -> Iterator[Opened]:
    """Open the study for this process alone, and write the settings beside it.

    Raises:
        ValueError: It is another search, its storage cannot be used, or another process has it.
    """
    import optuna

    from search.console.results import study_folder
    from search.console.trouble import StoreTrouble
    from search.pruner import make_pruner
    from search.sampler import make_sampler
    from search.sampler.projected import ProjectedSampler
    from search.trials import StopRequestedError
    from studies import store
    from studies.claim import claim

    settings, name = plan.settings, str(plan.settings.study)
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    url = store.storage_url(settings.root, name, settings.storage)
    sampler = make_sampler(settings.sampler, plan.spec.budget, settings.seed)
    pruner = make_pruner(settings.pruner)
    trouble = StoreTrouble(StopRequestedError)
    study = store.open_study(
        name, url, plan.spec, sampler=sampler, pruner=pruner, on_trouble=trouble
    )
    if isinstance(sampler, ProjectedSampler):
        sampler.check(study)
    with claim(study, url, trouble.say) as held:
        path = study_folder(settings) / "config.toml"
        heading = "Settings of this study: python -m search.run --config FILE"
        write_settings(path, vars(settings), heading)
        yield Opened(study, url, held, trouble)


def write_settings(path: Path, settings: Mapping[str, Any], heading: str) -> None:
    """Write settings as a file that `--config` reads."""
    from studies.storage import mask

    storage = settings["storage"]
    if storage is not None and mask(storage) != storage:
        settings = {**settings, "storage": None}  # a file is no place for a password
    config.write(path, settings, heading)


def settle_priors(
    plan: Plan, study: optuna.Study, measured: Mapping[str, Any] | None = None
) -> tuple[Prior, ...]:
    """Measure the priors that need it, before a worker takes the GPU; tell study and sampler.

    Args:
        plan: What is to be done.
        study: Where it is recorded.
        measured: Priors that another study of the same model and data has recorded.
    """
    from search.priors.settle import settle

    settings = plan.settings
    gpus = settings.gpus_per_worker
    device = "cpu" if gpus == 0 else "auto" if gpus and gpus > 1 else "any"
    priors = settle(
        study,
        plan.spec,
        plan.data,
        plan.priors,
        device=device,
        quiet=settings.quiet,
        measured=measured or {},
    )
    return begin_with_sources(plan, study, priors)


def begin_with_sources(
    plan: Plan, study: optuna.Study, priors: tuple[Prior, ...]
) -> tuple[Prior, ...]:
    """Add what other searches have found to the priors, and tell the sampler of all of them."""
    from search.priors.settle import settle_sources
    from search.sampler import make_sampler

    settings = plan.settings
    priors = tuple(prior for prior in priors if prior.source is None)
    priors += settle_sources(study, plan.spec, plan.sources)
    if priors:
        believed = [prior.belief for prior in priors]
        study.sampler = make_sampler(settings.sampler, plan.spec.budget, settings.seed, believed)
    return priors


def search(
    plan: Plan,
    opened: Opened,
    command: str,
    priors: tuple[Prior, ...],
    *,
    workers: Workers | None = None,
    go_on: str | None = None,
) -> int:
    """Run the search to its end, and print what it found.

    Args:
        plan: What is to be done.
        opened: Where it is recorded.
        command: Repeats this run.
        priors: What it begins with, beside the named allocations.
        workers: Give the workers, who stay for the next search; None: started for this one.
        go_on: Command that goes on after an interruption; None: with this study alone.

    Returns:
        The exit status.
    """
    from rich.console import Console

    from search.console.display import display
    from search.driver import Driver
    from search.report.dashboard import Dashboard
    from search.trials import StopRequestedError, TooManyFailuresError
    from search.updates import Note
    from search.workers.pool import PoolError
    from studies.patient import StoreError
    from studies.records import ForeignDataError

    settings, study = plan.settings, opened.study
    dashboard = Dashboard(study)
    with StopSignals() as signals:
        try:
            with display(_board(plan, study), Console(stderr=True), quiet=settings.quiet) as show:

                def notify(update: Update) -> None:
                    show(update)
                    dashboard.apply(update)

                def stop_requested() -> bool:
                    opened.claim.check()
                    return signals.requested()

                opened.trouble.say = lambda text: show(Note(text))
                opened.trouble.stop_requested = stop_requested

                driver = Driver(
                    study,
                    plan.spec,
                    lambda: _begin(plan, study, command, signals, workers),
                    _rules(settings),
                    priors=priors,
                    notify=notify,
                    stop_requested=stop_requested,
                )
                conclusion = driver.run()
        except (StoreError, ForeignDataError) as error:
            return _stopped(plan, error, go_on=go_on)
        except (KeyboardInterrupt, StopRequestedError, TooManyFailuresError, PoolError) as error:
            return _stopped(plan, error, signals.received, go_on)
    if not driver.trials.started and not settings.quiet:
        done = f"{driver.goal} allocations are measured; a higher --trials goes on with it"
        if driver.settled:
            done = "nothing is left to gain; --patience none goes on with it"
        click.echo(f"The study {study.study_name} is finished: {done}", err=True)
    status = _finish(plan, study, opened.url, conclusion)
    # It came too late to stop this search; those of other budgets do not begin.
    return 128 + signals.received if signals.received and status == 0 else status


def _board(plan: Plan, study: optuna.Study) -> Board:
    """Collect what a display shows of a search, as the study stands."""
    from search.console.display import Board
    from search.plan import most_replicates
    from search.priors.named import named
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
    return board


def _rules(settings: Settings) -> Rules:
    from search.driver import Rules

    return Rules(
        settings.trials,
        settings.finalists,
        settings.confirm_seeds,
        settings.max_failures,
        settings.trial_timeout,
        stop_early=settings.patience == "auto",
    )


def _stopped(
    plan: Plan, error: BaseException, by: signal.Signals | None = None, go_on: str | None = None
) -> int:
    """Say why the search stopped and how to go on.

    Args:
        plan: What is not finished.
        error: What happened.
        by: The signal that asked for it.
        go_on: Command that goes on with it; None: with this study alone.

    Returns:
        The exit status.
    """
    from search.console.results import continue_command

    why = "Stopped; the trials under way start again." if by else f"Error: {one_line(error)}"
    click.echo(why, err=True)
    click.echo(f"To go on: {go_on or continue_command(plan.settings)}", err=True)
    return 128 + by if by else STOPPED_BY_FAILURES


def _begin(
    plan: Plan, study: optuna.Study, command: str, signals: StopSignals, workers: Workers | None
) -> Pool:
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
    if workers is not None:
        return workers.get(lambda: _open_pool(plan, signals))
    return _open_pool(plan, signals)


def _open_pool(plan: Plan, signals: StopSignals) -> Pool:
    """Start the workers."""
    from search.workers.proxy import Task
    from search.workers.ray_pool import RayPool

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

    from search.console.results import print_results, study_folder

    try:
        _write_files(plan, study, conclusion)
    except OSError as error:  # what is known is in the store; the same command writes the rest
        return _stopped(plan, error)
    if conclusion["winner"] is None:
        table = study_folder(plan.settings) / "trials.csv"
        click.echo(f"Error: {conclusion['text']}; see {table}", err=True)
        return STOPPED_BY_FAILURES
    print_results(Console(), conclusion, plan.settings, plan.spec, url)
    return 0


def _write_files(plan: Plan, study: optuna.Study, conclusion: dict[str, Any]) -> None:
    """Write the table of trials and, if there is a winner, its file and the report.

    Raises:
        OSError: A file cannot be written, or the store is out of reach.
    """
    from search.console.results import study_folder
    from search.report.dashboard import refresh
    from search.report.write import write_report
    from studies.export import allocation_document
    from studies.files import write_json_atomic
    from studies.store import write_trials_csv

    refresh(study)
    folder = study_folder(plan.settings)
    write_trials_csv(study, folder / "trials.csv")
    if conclusion["winner"] is not None:
        write_json_atomic(folder / "allocation.json", allocation_document(study))
        write_report(study, plan.settings.root, plan.settings.storage)
