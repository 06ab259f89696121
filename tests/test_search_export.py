import json
import subprocess
import sys

import optuna
import pytest
from click.testing import CliRunner

from mola.allocation import Allocation
from mola.events import Finished
from search.export import main
from studies import store
from studies.export import read_allocation_file
from tests.test_studies_export import CONCLUSION, SPEC, UNIFORM, WINNER, _ask


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A root with one study that has named its winner."""
    root = tmp_path_factory.mktemp("my runs")
    study = store.open_study(
        "demo",
        store.storage_url(root, "demo", None),
        SPEC,
        sampler=optuna.samplers.RandomSampler(),
        pruner=optuna.pruners.NopPruner(),
    )
    for allocation in (UNIFORM, WINNER):
        trial = _ask(study, allocation, "search", 0)
        store.complete(study, trial, Finished(40, 2.0, 0.5, 0.1, 3.0, 1.0))
    store.set_conclusion(study, CONCLUSION)
    return root


def test_the_winner_is_written(root, tmp_path):
    result = _run("--study", "demo", "--out", tmp_path / "new" / "a.json", "--root", root)
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout == f"wrote trial 1 of demo to {tmp_path / 'new' / 'a.json'}\n"
    assert read_allocation_file(tmp_path / "new" / "a.json")[0] == WINNER


def test_another_trial_is_written_and_replaces_the_file(root, tmp_path):
    out = tmp_path / "a.json"
    out.write_text("old")
    assert _run("--study", "demo", "--out", out, "--root", root, "--trial", 0).exit_code == 0
    assert json.loads(out.read_text())["experts_per_layer"] == list(UNIFORM.experts)


def test_a_study_at_a_storage_url_is_found(root, tmp_path):
    url = store.storage_url(root, "demo", None)
    result = _run("--study", "demo", "--out", tmp_path / "a.json", "--storage", url)
    assert result.exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--study", "other"], "known studies: 'demo'"),
        (["--study", "../demo"], "cannot name a folder"),
        (["--study", "demo", "--trial", "7"], "does not exist; choose a complete one"),
        (["--study", "demo", "--trial", "x"], "--trial"),
        (["--study", "demo", "--storage", "nonsense"], "not a database URL"),
        (["--study", "demo", "--storage", "postgresql://a:s3cr3t@127.0.0.1:1/b"], "a:***@"),
        ([], "--study"),
    ],
)
def test_a_users_mistake_is_one_line_and_exit_status_2(root, tmp_path, arguments, message):
    result = _run(*arguments, "--out", tmp_path / "a.json", "--root", root)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("Error: ")
    assert message in result.stderr
    assert "s3cr3t" not in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert not (tmp_path / "a.json").exists()


def test_a_place_that_cannot_be_written_to_is_an_error(root, tmp_path):
    (tmp_path / "file").write_text("")
    result = _run("--study", "demo", "--out", tmp_path / "file" / "a.json", "--root", root)
    assert result.exit_code == 2
    assert len(result.stderr.splitlines()) == 1


def test_help_and_export_load_no_heavy_library(root, tmp_path):
    script = (
        "import sys; from search.export import main\n"
        "try: main(sys.argv[1:])\n"
        "except SystemExit: pass\n"
        "print([m for m in ('torch', 'transformers', 'ray', 'optuna') if m in sys.modules])"
    )
    out = str(tmp_path / "a.json")
    for arguments, loaded in (
        (["--help"], "[]"),
        (["--study", "demo", "--out", out, "--root", str(root)], "['optuna']"),
    ):
        command = [sys.executable, "-c", script, *arguments]
        printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        assert printed.splitlines()[-1] == loaded


def _run(*arguments):
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def test_the_allocation_is_the_one_of_the_trial(root, tmp_path):
    _run("--study", "demo", "--out", tmp_path / "a.json", "--root", root)
    document = json.loads((tmp_path / "a.json").read_text())
    assert Allocation(document["experts_per_layer"]) == WINNER
    assert document["study"]["difference_to_uniform"]["low"] == -0.8
