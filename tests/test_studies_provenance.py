"""What a study remembers of the runs that made it."""

from __future__ import annotations

import json

import optuna

from studies.provenance import MOST_RUNS, RUNS_ATTR, machine, note_run, run_notes, versions


def note(study: optuna.Study, command: str) -> None:
    note_run(study, command, train_rows=1000, validation_rows=300, goal=40, replicates=24)


def test_a_run_leaves_its_command_versions_machine_and_rows() -> None:
    study = optuna.create_study()
    note(study, "python -m search.run --budget 160")
    (found,) = run_notes(study)
    assert found.command == "python -m search.run --budget 160"
    assert (found.train_rows, found.validation_rows) == (1000, 300)
    assert (found.goal, found.replicates) == (40, 24)
    assert found.versions == versions()
    assert found.machine == machine()
    assert found.began.endswith("+00:00")
    assert {"system", "processor", "cores", "GPUs"} <= set(found.machine)
    json.dumps(study.user_attrs[RUNS_ATTR], allow_nan=False)


def test_the_first_run_and_the_latest_are_kept() -> None:
    study = optuna.create_study()
    for number in range(MOST_RUNS + 5):
        note(study, f"run {number}")
    commands = [found.command for found in run_notes(study)]
    assert len(commands) == MOST_RUNS
    assert commands[0] == "run 0"
    assert commands[1:] == [f"run {n}" for n in range(6, MOST_RUNS + 5)]


def test_a_study_of_an_older_version_has_no_runs() -> None:
    assert run_notes(optuna.create_study()) == []


def test_packages_that_matter_have_their_versions() -> None:
    found = versions()
    assert found["optuna"] == optuna.__version__
    assert {"python", "torch", "ray", "peft", "mola-search"} <= set(found)
