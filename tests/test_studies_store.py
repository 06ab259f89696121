import dataclasses
import math
import shutil
import sqlite3
import subprocess
import sys
from urllib.parse import quote

import optuna
import pandas as pd
import pytest
from optuna.trial import TrialState
from optuna_dashboard._note import get_note

from mola.allocation import Allocation
from mola.events import Finished
from mola.settings import AdapterSettings, ModelSource, TrainSettings
from studies import outcomes, store
from studies.encoding import distributions, to_params
from studies.spec import StudySpec
from studies.storage import sqlite_path, sqlite_url

SPEC = StudySpec(
    num_layers=4,
    total=8,
    low=1,
    high=4,
    model=ModelSource(),
    model_fingerprint="m1",
    data="task",
    data_fingerprint="d1",
    prompt_template=None,
    max_length=128,
    adapter=AdapterSettings(),
    train=TrainSettings(),
    rungs=(10, 20),
    seed=5,
    objective="nats per row",
)
UNIFORM, LOW = Allocation([2, 2, 2, 2]), Allocation([3, 2, 2, 1])
RESULT = Finished(40, 1.5, 0.25, 0.1, 3.0, 1.0, {"load": [[0.5, 0.5]]})


@pytest.fixture
def url(tmp_path):
    return store.storage_url(tmp_path / "my runs", "größe", None)


@pytest.fixture(scope="module")
def fresh_store(tmp_path_factory):
    """The file of a study without trials: making one takes Optuna longer than copying it."""
    path = tmp_path_factory.mktemp("fresh") / "study.db"
    _open(sqlite_url(path))
    return path


@pytest.fixture
def study(url, fresh_store):
    path = sqlite_path(url)
    path.parent.mkdir(parents=True)
    shutil.copy(fresh_store, path)
    return _load(url)


def test_a_study_lies_in_a_folder_of_its_name(tmp_path):
    assert store.storage_url(tmp_path, "demo", None) == f"sqlite:///{tmp_path}/demo/study.db"
    assert store.storage_url(tmp_path, "demo", "postgresql://h/d") == "postgresql://h/d"


@pytest.mark.parametrize(("name", "url"), [("../x", None), ("x", "runs/x.db"), ("a/b", "a://b")])
def test_storage_url_refuses_unsafe_names_and_other_text(tmp_path, name, url):
    with pytest.raises(ValueError, match="cannot name a folder|not a database URL"):
        store.storage_url(tmp_path, name, url)


def test_a_study_is_created_once_and_then_loaded(url):
    first = _open(url)
    store.enqueue(first, UNIFORM, label="named 5555", seed=5)
    again = _open(url)
    assert again.direction.name == "MINIMIZE"
    assert store.study_spec(again) == SPEC
    assert len(store.records(again)) == 1


def test_another_search_under_the_same_name_is_refused_with_its_differences(url):
    _open(url)
    before = get_note(_load(url))
    other = dataclasses.replace(SPEC, total=9, train=TrainSettings(steps=7))
    with pytest.raises(ValueError) as caught:
        _open(url, other)
    message = str(caught.value)
    assert "budget (--budget): 9 here, 8 in the study" in message
    assert "steps (--steps): 7 here, 40 in the study" in message
    assert len(message.splitlines()) == 1
    assert get_note(_load(url)) == before


def test_a_study_that_maximizes_is_refused(tmp_path, url):
    _open(url)
    optuna.create_study(storage=url, study_name="other", direction="maximize")
    with pytest.raises(ValueError, match="does not minimize"):
        _open(url, name="other")


def test_a_study_of_another_program_is_refused(url):
    _open(url)
    other = optuna.create_study(storage=url, study_name="other")
    other.enqueue_trial({"x": 1})
    with pytest.raises(ValueError, match="was not made by mola-search"):
        _open(url, name="other")
    with pytest.raises(ValueError, match="was not made by mola-search"):
        store.records(_load(url, "other"))


def test_a_study_whose_driver_was_killed_before_it_wrote_the_spec_goes_on(url):
    _open(url)
    optuna.create_study(storage=url, study_name="other")
    assert store.study_spec(_open(url, name="other")) == SPEC


def test_a_store_that_cannot_be_written_to_is_refused(url, monkeypatch):
    _open(url)
    path = quote(str(sqlite_path(url)))
    # As root, file modes stop nobody: SQLite itself is told to open the file read-only.
    connect = sqlite3.connect
    monkeypatch.setattr(
        sqlite3.dbapi2,
        "connect",
        lambda name, **options: connect(f"file:{path}?mode=ro", uri=True, **options),
    )
    with pytest.raises(ValueError, match="readonly database") as caught:
        _open(url)
    assert len(str(caught.value).splitlines()) == 1
    assert store.study_spec(_load(url)) == SPEC


def test_an_unknown_study_is_refused_with_the_known_ones(tmp_path, url):
    _open(url)
    with pytest.raises(ValueError, match="no study 'x'.*known studies: 'größe'"):
        _load(url, "x")
    with pytest.raises(ValueError, match=r"no study 'x'.*study.db does not exist.*'größe'"):
        _load(store.storage_url(tmp_path / "my runs", "x", None), "x")
    assert not (tmp_path / "my runs" / "x").exists()


def test_the_note_shows_the_settings_and_no_markup_of_the_user(url):
    spec = dataclasses.replace(SPEC, data="<script>1</script> `x` [a](b)\n# big")
    note = get_note(_open(url, spec))
    assert "8 experts over 4 layers" in note
    assert "built-in demonstration model" in note
    assert "<script>" not in note
    assert "\n# big" not in note
    assert "- **data**: &#60;script&#62;1&#60;/script&#62; &#96;x&#96; &#91;a&#93;" in note


def test_enqueue_adds_an_allocation_and_seed_once(study):
    assert store.enqueue(study, UNIFORM, label="named 5555", seed=5)
    assert not store.enqueue(study, UNIFORM, label="named 5555", seed=5)
    assert store.enqueue(study, UNIFORM, label="replicate", seed=6)
    assert [(r.allocation, r.seed, r.label, r.state) for r in store.records(study)] == [
        (UNIFORM, 5, "named 5555", "WAITING"),
        (UNIFORM, 6, "replicate", "WAITING"),
    ]


@pytest.mark.parametrize("state", ["RUNNING", "COMPLETE", "PRUNED", "FAIL"])
def test_enqueue_adds_again_only_what_has_failed(study, state):
    trial = _run(study, UNIFORM)
    _end(study, trial, state)
    assert store.enqueue(study, UNIFORM, label="replicate", seed=5) == (state == "FAIL")


def test_an_enqueued_trial_keeps_its_label_and_seed_when_it_runs(study):
    store.enqueue(study, LOW, label="named 2468", seed=9)
    trial = study.ask(distributions(SPEC.budget))
    store.mark(trial, label="named 2468", seed=9)
    (record,) = store.records(study)
    assert (record.state, record.allocation, record.seed) == ("RUNNING", LOW, 9)


def test_a_complete_trial_has_all_its_results(study):
    trial = _run(study, UNIFORM)
    trial.report(2.5, 10)
    store.complete(study, trial, RESULT)
    (record,) = store.records(study)
    assert record.state == "COMPLETE"
    assert (record.objective, record.accuracy, record.standard_error) == (1.5, 0.25, 0.1)
    assert record.rungs == {10: 2.5}
    assert record.seconds is not None
    assert study.trials[0].user_attrs["routing"] == {"load": [[0.5, 0.5]]}


def test_a_driver_killed_while_it_completes_a_trial_leaves_it_running(study, monkeypatch):
    trial = _run(study, UNIFORM)
    monkeypatch.setattr(study, "tell", _killed)
    with pytest.raises(KeyboardInterrupt):
        store.complete(study, trial, RESULT)
    (record,) = store.records(study)
    assert (record.state, record.accuracy) == ("RUNNING", 0.25)


@pytest.mark.parametrize("name", ["objective", "accuracy"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_result_that_is_not_finite_cannot_complete_a_trial(study, name, value):
    trial = _run(study, UNIFORM)
    with pytest.raises(ValueError, match="fail it"):
        store.complete(study, trial, dataclasses.replace(RESULT, **{name: value}))
    assert store.records(study)[0].state == "RUNNING"


def test_a_pruned_trial_keeps_the_value_of_its_last_rung(study):
    trial = _run(study, UNIFORM)
    trial.report(2.5, 10)
    store.prune(study, trial)
    (record,) = store.records(study)
    assert (record.state, record.objective, record.accuracy) == ("PRUNED", 2.5, None)


def test_a_trial_that_breaks_runs_again_once(study):
    store.fail(study, _run(study, UNIFORM), "worker killed", retry=True)
    first, second = store.records(study)
    assert (first.state, first.reason) == ("FAIL", "worker killed")
    assert (second.state, second.retry_of) == ("WAITING", first.number)
    assert (second.allocation, second.seed, second.label) == (UNIFORM, 5, "search")

    store.fail(study, study.ask(distributions(SPEC.budget)), "worker killed", retry=True)
    assert [r.state for r in store.records(study)] == ["FAIL", "FAIL"]


def test_a_trial_that_would_break_again_is_not_run_again(study):
    store.fail(study, _run(study, UNIFORM), "the loss is NaN", retry=False)
    assert [r.state for r in store.records(study)] == ["FAIL"]


def test_an_interruption_does_not_count_as_a_failure(study):
    for _ in range(3):
        store.interrupt(study, _run(study, UNIFORM), "stopped by the user")
    store.fail(study, study.ask(distributions(SPEC.budget)), "worker killed", retry=True)
    assert [r.state for r in store.records(study)] == ["FAIL"] * 4 + ["WAITING"]


def test_a_very_long_reason_is_cut(study):
    store.fail(study, _run(study, UNIFORM), "x" * 10_000, retry=False)
    assert len(store.records(study)[0].reason) == 2000


def test_reconcile_fails_what_was_left_running_and_enqueues_it_once(study):
    _end(study, _run(study, LOW), "COMPLETE")
    _run(study, UNIFORM, label="named 5555")
    assert store.reconcile(study) == 1
    assert store.reconcile(study) == 0
    done, left, again = store.records(study)
    assert done.state == "COMPLETE"
    assert (left.state, left.reason) == ("FAIL", "driver stopped")
    assert (again.state, again.label, again.retry_of) == ("WAITING", "named 5555", left.number)
    assert (again.allocation, again.seed) == (UNIFORM, 5)


@pytest.mark.parametrize("last_write", ["_enqueue", "tell"])
def test_reconcile_that_is_killed_itself_adds_no_second_successor(study, monkeypatch, last_write):
    _run(study, UNIFORM)
    with monkeypatch.context() as patch:
        target = study if last_write == "tell" else outcomes
        patch.setattr(target, last_write, _killed)
        with pytest.raises(KeyboardInterrupt):
            store.reconcile(study)
    store.reconcile(study)
    assert [r.state for r in store.records(study)] == ["FAIL", "WAITING"]


def test_reconcile_enqueues_nothing_that_waits_or_is_done_already(study):
    _end(study, _run(study, UNIFORM), "COMPLETE")
    _run(study, UNIFORM)
    store.reconcile(study)
    assert [r.state for r in store.records(study)] == ["COMPLETE", "FAIL"]


def test_two_equal_trials_left_running_have_one_successor(study):
    _run(study, UNIFORM)
    _run(study, UNIFORM)
    assert store.reconcile(study) == 2
    assert [r.state for r in store.records(study)] == ["FAIL", "FAIL", "WAITING"]


def test_a_proposal_that_was_cut_off_is_failed_and_left_out(study):
    trial = study.ask()
    for name, distribution in list(distributions(SPEC.budget).items())[:3]:
        trial._suggest(name, distribution)
    assert store.reconcile(study) == 1
    assert store.records(study) == []
    assert [t.state for t in study.trials] == [TrialState.FAIL]


def test_a_conclusion_is_read_back(url, study):
    assert store.get_conclusion(study) is None
    row = {"experts": [2] * SPEC.num_layers, "names": ["5555"], "trial": 3, "mean": 1.5}
    row |= {"standard_error": None, "seeds": 1, "accuracy": 0.5}
    row |= {"difference": None, "low": None, "high": None}
    conclusion = {"text": "t", "winner": 3, "confidence": 0.95, "fresh_seeds": [], "table": [row]}
    store.set_conclusion(study, conclusion)
    assert store.get_conclusion(_load(url)) == conclusion


def test_trials_csv_has_a_row_per_trial(study, tmp_path):
    trial = _run(study, UNIFORM)
    trial.report(2.5, 10)
    store.complete(study, trial, RESULT)
    store.fail(study, _run(study, LOW), 'worker "killed",\nby hand', retry=True)
    path = tmp_path / "out" / "trials.csv"
    store.write_trials_csv(study, path)
    table = pd.read_csv(path, dtype={"retry_of": "Int64"})
    assert list(table["number"]) == [0, 1, 2]
    assert list(table["state"]) == ["COMPLETE", "FAIL", "WAITING"]
    assert [Allocation.parse(text) for text in table["allocation"]] == [UNIFORM, LOW, LOW]
    assert table["rung_10"][0] == 2.5
    assert list(table["retry_of"])[2] == 1
    assert [list(table[f"experts_{i:02d}"])[1] for i in range(4)] == [3, 2, 2, 1]


def test_trials_csv_of_an_empty_study_has_its_columns(study, tmp_path):
    store.write_trials_csv(study, tmp_path / "trials.csv")
    assert list(pd.read_csv(tmp_path / "trials.csv").columns)[:3] == [
        "number",
        "state",
        "allocation",
    ]


def test_a_killed_process_loses_no_finished_trial(url):
    script = f"""
import os, signal
from mola.events import Finished
from studies import store
from studies.encoding import distributions
from tests.test_studies_store import LOW, RESULT, SPEC, UNIFORM, _open, _run
study = _open({url!r})
store.complete(study, _run(study, LOW), RESULT)
_run(study, UNIFORM)
os.kill(os.getpid(), signal.SIGKILL)
"""
    killed = subprocess.run([sys.executable, "-c", script], check=False, capture_output=True)
    assert killed.returncode == -9, killed.stderr
    study = _open(url)
    assert store.reconcile(study) == 1
    states = [(r.state, r.allocation) for r in store.records(study)]
    assert states == [("COMPLETE", LOW), ("FAIL", UNIFORM), ("WAITING", UNIFORM)]
    with sqlite3.connect(sqlite_path(url)) as database:
        assert database.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def _open(url, spec=SPEC, name="größe"):
    return store.open_study(
        name,
        url,
        spec,
        sampler=optuna.samplers.RandomSampler(),
        pruner=optuna.pruners.NopPruner(),
    )


def _load(url, name="größe"):
    return store.load_study(name, url)


def _run(study, allocation, label="search"):
    """Ask for a trial of an allocation, as the driver does."""
    if not any(r.state == "WAITING" for r in store.records(study)):
        study.enqueue_trial(to_params(allocation))
    trial = study.ask(distributions(SPEC.budget))
    store.mark(trial, label=label, seed=5)
    return trial


def _end(study, trial, state):
    if state == "COMPLETE":
        store.complete(study, trial, RESULT)
    elif state == "PRUNED":
        trial.report(1.0, 10)
        store.prune(study, trial)
    elif state == "FAIL":
        store.fail(study, trial, "broken", retry=False)


def _killed(*_, **__):
    raise KeyboardInterrupt
