"""Do the fine-tunes of a retrain, each once, and record every result as it comes.

They run in this process, so that there is no worker to be given up: whoever waits ends it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

from accelerate import Accelerator
from transformers import PreTrainedModel

from mola.base import load_model
from mola.evaluate import evaluate
from mola.events import Step
from search.full.plan import Plan, results_path
from search.full.results import (
    CHECKPOINT,
    FORMAT_VERSION,
    Results,
    Scores,
    differences,
    read_results,
    write_results,
)
from search.full.run import full_run, make_accelerator, scores, to_the_end

Show = Callable[[str, int], AbstractContextManager[Callable[[Step], None]]]


def open_results(plan: Plan, out: Path, accelerator: Accelerator) -> Results:
    """Read what is done already, or begin anew.

    Raises:
        ValueError: The folder was made under other conditions; names each.
    """
    results = read_results(results_path(out))
    if results is not None and (changed := differences(plan.conditions, results.conditions)):
        raise ValueError(
            f"{out} was made under other conditions ({'; '.join(changed)}); choose another --out"
        )
    accelerator.wait_for_everyone()  # every process has looked before one of them writes
    if results is None:
        results = Results(FORMAT_VERSION, plan.conditions, {}, ())
        if accelerator.is_main_process:
            write_results(results_path(out), results)
    return results


def finish_runs(
    plan: Plan, results: Results, out: Path, show: Show, stop_requested: Callable[[], bool]
) -> Results:
    """Do what is not done yet, seed by seed.

    Args:
        plan: What is to be done.
        results: What is done.
        out: Folder of the exported allocation's adapter at the first seed; the others' are in it.
        show: Opens the display of a fine-tune, given its title and its number of steps.
        stop_requested: Asked after each step.

    Returns:
        The results with everything that the plan asks for.

    Raises:
        StopRequestedError: A stop was requested.
        TrainingError: A fine-tune cannot go on.
        ValueError: Model or checkpoint cannot be used.
    """
    done = {(run.seed, run.experts) for run in results.runs}
    todo = [
        (seed, name)
        for seed in plan.seeds
        for name, allocation in plan.allocations.items()
        if (seed, allocation.experts) not in done
    ]
    if not todo:
        return results
    accelerator = make_accelerator()
    model = load_model(plan.conditions.model, accelerator.device)
    if not results.frozen:
        results = replace(results, frozen=_score_frozen(model, plan, accelerator))
    exported = (plan.conditions.seed, next(iter(plan.allocations)))
    for seed, name in todo:
        folder = out if (seed, name) == exported else out / f"{name}-seed-{seed}"
        accelerator = make_accelerator()
        steps = full_run(
            model,
            plan.data,
            name,
            plan.allocations[name],
            plan.conditions.adapter,
            plan.conditions.train,
            seed=seed,
            folder=folder,
            accelerator=accelerator,
            stop_requested=stop_requested,
        )
        with show(f"{name}, seed {seed}", plan.conditions.train.steps) as on_step:
            run = to_the_end(steps, on_step)
        results = replace(results, runs=(*results.runs, run))
        if accelerator.is_main_process:
            write_results(results_path(out), results)
            (folder / CHECKPOINT).unlink(missing_ok=True)
    return results


def _score_frozen(
    model: PreTrainedModel, plan: Plan, accelerator: Accelerator
) -> dict[str, Scores]:
    """Evaluate the base model alone, in the precision of the fine-tunes."""
    splits = {"validation": plan.data.validation, "test": plan.data.test}
    with accelerator.autocast():
        return {
            split: scores(evaluate(model, data, accelerator=accelerator))
            for split, data in splits.items()
            if data is not None
        }
