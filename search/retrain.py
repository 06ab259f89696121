"""Fine-tune an exported allocation in full: `python -m search.retrain --allocation FILE`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mola.settings import DTYPES
from search.console.cli import (
    MOST_SEEDS,
    Command,
    Whole,
    first_seed,
    one_line,
    option,
    positive,
    user_errors,
)
from search.console.signals import StopSignals
from search.console.terminal import calm_libraries, warnings_as_lines
from search.full.options import full_training_options
from search.full.plan import Options, Plan, prepare

if TYPE_CHECKING:
    from mola.events import Step
    from search.full.results import Results

FAILED = 1


@click.command(cls=Command, context_settings={"max_content_width": 100})
@option(
    "Allocation",
    "--allocation",
    required=True,
    type=click.Path(path_type=Path, dir_okay=False),
    help="File that search.run or search.export wrote, or a list of counts, layer 0 first.",
)
@option(
    "Allocation",
    "--out",
    required=True,
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder of the adapter, of results.json, and of the compared adapters.",
)
@option(
    "Allocation",
    "--compare",
    multiple=True,
    metavar="NAME|FILE",
    help="Fine-tune this one, too, on the same seeds: 5555, 2468, 2882, 8642, 8228 or alphalora, "
    "scaled to the same total, or an allocation file. Repeatable.",
)
@option(
    "Allocation",
    "--seeds",
    type=Whole(1, MOST_SEEDS),
    default=1,
    help="Number of seeds of each allocation.",
)
@option(
    "Allocation",
    "--seed",
    type=first_seed,
    default=10,
    help="First seed. The default is the paper's, and none that a search uses by default.",
)
@option(
    "Model",
    "--model",
    metavar="ID|DIR",
    help="Frozen base model: a Hugging Face id or a local folder.  [default: as in the file]",
)
@option("Model", "--revision", help="Branch, tag or commit.  [default: as in the file]")
@option(
    "Model",
    "--dtype",
    type=click.Choice(DTYPES),
    help="Dtype of the frozen weights.  [default: as in the file]",
)
@option(
    "Model",
    "--trust-remote-code",
    is_flag=True,
    help="Let code that comes with the model run on this machine; no file can ask for it.",
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
    "--prompt-template",
    metavar="TEXT|chat",
    help="As for search.run.  [default: as in the file]",
)
@option("Data", "--max-length", type=positive, help="As for search.run.  [default: as in the file]")
@full_training_options
def main(**values: Any) -> int:
    """Fine-tune an exported allocation in full, and compare it with others.

    The defaults are the MoLA paper's. The same command goes on with what was interrupted, and
    does nothing twice. Runs under `accelerate launch` for several processes or mixed precision.
    """
    calm_libraries()
    options = Options(**values)
    with user_errors(), warnings_as_lines():
        from search.full.retrain_job import finish_runs, open_results
        from search.full.run import StopRequestedError, TrainingError, make_accelerator

        accelerator = make_accelerator()
        with accelerator.main_process_first():  # which may measure what the others then read
            plan = prepare(
                options,
                mixed_precision=accelerator.mixed_precision,
                processes=accelerator.num_processes,
            )
        results = open_results(plan, options.out, accelerator)
        with StopSignals() as signals:
            try:
                show = progress if accelerator.is_main_process else _no_progress
                results = finish_runs(plan, results, options.out, show, signals.requested)
            except StopRequestedError as error:
                if accelerator.is_main_process:
                    click.echo(f"{one_line(error)}; the same command goes on", err=True)
                return 128 + (signals.received or 0)
            except TrainingError as error:
                click.echo(f"Error: {one_line(error)}", err=True)
                return FAILED
    if accelerator.is_main_process:
        _report(results, plan, options.out)
    return 0


@contextmanager
def progress(title: str, steps: int) -> Iterator[Callable[[Step], None]]:
    """Show a fine-tune on stderr: a bar on a terminal, now and then a line elsewhere."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda step: _print_now_and_then(title, steps, step)
        return
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as bar:
        task = bar.add_task(title, total=steps, loss="")
        yield lambda step: bar.update(task, completed=step.step, loss=f"{step.loss:.4f}")


@contextmanager
def _no_progress(title: str, steps: int) -> Iterator[Callable[[Step], None]]:
    yield lambda step: None


def _print_now_and_then(title: str, steps: int, step: Step) -> None:
    if step.step % max(1, steps // 10) == 0 or step.step == steps:
        click.echo(f"{title}: step {step.step} of {steps}, loss {step.loss:.4f}", err=True)


def _report(results: Results, plan: Plan, out: Path) -> None:
    from rich.console import Console

    from search.full.print_runs import print_report

    print_report(Console(), results, plan.allocations, out)


if __name__ == "__main__":
    main()
