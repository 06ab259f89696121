"""Fine-tune a study's winner and others in full, and compare them: `python -m search.compare`."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from search.console.cli import (
    MOST_SEEDS,
    MOST_WORKERS,
    Command,
    Number,
    Whole,
    first_seed,
    option,
    rate,
    study_options,
    user_errors,
)
from search.console.signals import StopSignals
from search.console.terminal import calm_libraries, warnings_as_lines
from search.deadline import Deadline
from search.full.options import full_training_options
from search.full.plan import Options, Plan, prepare

if TYPE_CHECKING:
    import optuna

    from search.console.trouble import StoreTrouble
    from search.full.compare_job import Wanted
    from search.full.worker import FullJob

FAILED = 1
FOLDER = "full"  # in the study's folder


@click.command(cls=Command, context_settings={"max_content_width": 100})
@click.argument("more", nargs=-1, metavar="[NAME|FILE]...")
@option("Comparison", "--study", required=True, metavar="NAME", help="Name of the study.")
@option(
    "Comparison",
    "--with",
    "against",
    multiple=True,
    metavar="NAME|FILE ...",
    help="Compare with these: 5555, 2468, 2882, 8642, 8228, scaled to the same total, or "
    "allocation files, of any total.  [default: 5555]",
)
@option(
    "Comparison",
    "--trial",
    type=Whole(min=0),
    metavar="N",
    help="Compare this complete trial.  [default: the winner]",
)
@option(
    "Comparison",
    "--seeds",
    type=Whole(2, MOST_SEEDS),
    default=5,
    help="Number of seeds; each has its own data order, the same for all allocations.",
)
@option(
    "Comparison",
    "--seed",
    type=first_seed,
    default=10,
    help="First seed. None that a search uses by default.",
)
@option(
    "Data",
    "--data",
    metavar="DIR|ID",
    help="Folder or data set id, as for search.run.  [default: the built-in task with the "
    "built-in model]",
)
@option(
    "Data",
    "--trust-remote-code",
    is_flag=True,
    help="Let code that comes with the model run on this machine.",
)
@full_training_options
@option(
    "Machines",
    "--workers",
    type=Whole(1, MOST_WORKERS),
    help="Fine-tunes at a time, as for search.run.",
)
@option(
    "Machines",
    "--gpus-per-worker",
    type=Number(min=0),
    help="GPUs of a worker, as for search.run.",
)
@option(
    "Machines",
    "--address",
    metavar="HOST:PORT|auto",
    help="Ray cluster to join, as for search.run.",
)
@option(
    "Machines",
    "--trial-timeout",
    type=rate,
    metavar="SECONDS",
    help="End a fine-tune that takes longer, with its process, and go on with it once more from "
    "its checkpoint, written every 30 s.  [default: as for search.run]",
)
@study_options
@click.pass_context
def main(ctx: click.Context, /, **values: Any) -> int:
    """Fine-tune a study's winner in full beside other allocations, and say which is better.

    All run on the same seeds with the same data order, on Ray workers. The same command goes on
    with what was interrupted; results are kept in the store, in a study NAME.full. The test split
    is read once by each fine-tune, at its end.
    """
    calm_libraries()
    with user_errors(), warnings_as_lines():
        plan = _plan(values)
        trouble, comparison, wanted = _open(values, plan)
        from search.full.compare_job import missing_runs

        jobs = missing_runs(comparison, wanted)
        if jobs:
            from studies.claim import claim
            from studies.store import storage_url

            url = storage_url(values["root"], values["study"], values["storage"])
            ctx.with_resource(claim(comparison, url, trouble.say))
    if jobs:
        status = _run(values, plan, comparison, jobs, trouble)
        if status:
            return status
    _report(comparison, plan)
    return 0


def _plan(values: dict[str, Any]) -> Plan:
    """Export the allocation, and plan as for a retrain of it."""
    from studies.export import allocation_document
    from studies.files import write_json_atomic
    from studies.store import load_study, storage_url

    url = storage_url(values["root"], values["study"], values["storage"])
    document = allocation_document(load_study(values["study"], url), values["trial"])
    folder = _folder(values)
    exported = folder / f"trial-{document['study']['trial']}.json"
    write_json_atomic(exported, document)
    from_study = dict.fromkeys(("model", "revision", "dtype", "prompt_template", "max_length"))
    names = {field.name for field in fields(Options)}
    given = {name: value for name, value in values.items() if name in names}
    options = Options(
        **{
            **from_study,
            **given,
            "allocation": exported,
            "out": folder,
            "compare": (*values["against"], *values["more"]) or ("5555",),
        }
    )
    plan = prepare(options, mixed_precision="as the frozen weights", processes=1)
    # Other allocations may join later, and more seeds.
    return replace(plan, conditions=replace(plan.conditions, experts=()))


def _open(values: dict[str, Any], plan: Plan) -> tuple[StoreTrouble, optuna.Study, Wanted]:
    import optuna

    from search.console.trouble import StoreTrouble
    from search.full.compare_job import StopRequestedError, Wanted
    from search.full.store import open_comparison
    from studies.store import storage_url

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    url = storage_url(values["root"], values["study"], values["storage"])
    trouble = StoreTrouble(StopRequestedError)
    comparison = open_comparison(values["study"], url, plan.conditions, trouble)
    steps = plan.conditions.train.steps
    wanted = Wanted(plan.allocations, plan.seeds, steps, _folder(values).resolve())
    return trouble, comparison, wanted


def _folder(values: dict[str, Any]) -> Path:
    root: Path = values["root"]
    return root / str(values["study"]) / FOLDER


def _run(
    values: dict[str, Any],
    plan: Plan,
    comparison: optuna.Study,
    jobs: list[FullJob],
    trouble: StoreTrouble,
) -> int:
    """Run what is missing.

    Returns:
        The exit status, 0 if everything is done.
    """
    from search.full.compare_job import StopRequestedError, finish_runs
    from search.workers.pool import PoolError

    def say(line: str) -> None:
        click.echo(line, err=True)

    steps = plan.conditions.train.steps
    say(f"{len(jobs)} fine-tunes of {steps} steps to run")
    with StopSignals() as signals:
        trouble.stop_requested = signals.requested
        try:
            pool = _open_pool(values, plan, signals)
            try:
                deadline = Deadline(values["trial_timeout"])
                lost = finish_runs(comparison, jobs, steps, pool, say, signals.requested, deadline)
            finally:
                pool.close()
        except StopRequestedError as error:
            say(f"{error}; the same command goes on")
            return 128 + (signals.received or 0)
        except PoolError as error:
            say(f"Error: {error}")
            return FAILED
    if lost:
        _report(comparison, plan)
        failed = "1 fine-tune" if len(lost) == 1 else f"{len(lost)} fine-tunes"
        say(f"Error: {failed} failed; the same command goes on")
        return FAILED
    return 0


def _open_pool(values: dict[str, Any], plan: Plan, signals: StopSignals) -> Any:
    """Start the workers."""
    from search.full.worker import FullWorker
    from search.workers.proxy import Task
    from search.workers.ray_pool import RayPool

    conditions = plan.conditions
    with user_errors():
        pool = RayPool(
            Task(conditions.model, conditions.adapter, conditions.train),
            plan.data,
            workers=values["workers"],
            gpus_per_worker=values["gpus_per_worker"],
            address=values["address"],
            worker=FullWorker,
        )
    signals.install()  # Ray takes SIGTERM for itself
    return pool


def _report(comparison: optuna.Study, plan: Plan) -> None:
    """Print what the seeds say that all allocations have run on; nothing if there is none."""
    from rich.console import Console

    from search.full.print_comparison import print_comparison
    from search.full.store import runs_of

    wanted = {allocation.experts for allocation in plan.allocations.values()}
    runs = [run for run in runs_of(comparison) if run.experts in wanted]
    done = {(run.experts, run.seed) for run in runs}
    whole = {seed for seed in plan.seeds if all((experts, seed) in done for experts in wanted)}
    if whole:
        runs = [run for run in runs if run.seed in whole]
        print_comparison(Console(), plan.conditions, plan.allocations, runs)


if __name__ == "__main__":
    main()
