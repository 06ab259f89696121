import dataclasses
import json
import math
import re
import shlex

import optuna
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mola.allocation import Allocation
from mola.events import Finished
from mola.settings import AdapterSettings, ModelSource, TrainSettings
from studies import store
from studies.encoding import distributions, to_params
from studies.export import allocation_document, read_allocation_file, upstream_args
from studies.files import write_json_atomic
from studies.spec import StudySpec

UNIFORM, WINNER = Allocation([2, 2, 2, 2]), Allocation([1, 2, 2, 3])
SPEC = StudySpec(
    num_layers=4,
    total=8,
    low=1,
    high=4,
    model=ModelSource("some/model"),
    model_fingerprint="m1",
    data="task",
    data_fingerprint="d1",
    prompt_template="Q: {instruction}",
    max_length=128,
    adapter=AdapterSettings(target_modules=("q_proj", "v_proj")),
    train=TrainSettings(),
    rungs=(),
    seed=0,
    objective="nats per row",
)
REST = {"names": [], "trial": 1, "mean": 1.6, "standard_error": 0.1, "seeds": 3, "accuracy": 0.5}
CONCLUSION = {
    "text": "better than uniform",
    "winner": 1,
    "confidence": 0.95,
    "fresh_seeds": [1, 2],
    "table": [
        {**REST, "experts": [1, 2, 2, 3], "difference": -0.5, "low": -0.8, "high": -0.2},
        {**REST, "experts": [2, 2, 2, 2], "difference": 0.0, "low": 0.0, "high": 0.0},
    ],
}


@pytest.fixture(scope="module")
def searched():
    """A study of two allocations on three seeds, its conclusion, and a pruned trial."""
    study = _study(SPEC)
    for seed, label in ((0, "search"), (1, "replicate"), (2, "replicate")):
        for allocation, objective in ((UNIFORM, 2.0), (WINNER, 1.5)):
            trial = _ask(study, allocation, label, seed)
            event = Finished(40, objective + 0.1 * seed, 0.5, 0.1, 3.0, 1.0)
            store.complete(study, trial, event)
    pruned = _ask(study, Allocation([3, 2, 2, 1]), "search", 0)
    pruned.report(9.0, 10)
    store.prune(study, pruned)
    store.set_conclusion(study, CONCLUSION)
    return study


def test_the_winner_is_described_with_how_it_was_measured(searched):
    document = allocation_document(searched)
    assert list(document)[:5] == [
        "format_version",
        "base_model",
        "num_layers",
        "total_experts",
        "experts_per_layer",
    ]
    assert document["experts_per_layer"] == (1, 2, 2, 3)
    assert (document["num_layers"], document["total_experts"]) == (4, 8)
    assert (document["base_model"], document["top_k"], document["r"]) == ("some/model", 2, 8)
    assert (document["lora_alpha"], document["lora_dropout"]) == (16, 0.05)
    assert document["target_modules"] == ("q_proj", "v_proj")
    study = document["study"]
    assert (study["name"], study["trial"], study["seeds"]) == ("demo", 1, 3)
    assert study["objective_mean"] == pytest.approx(1.6)
    assert study["objective_standard_error"] == pytest.approx(0.1 / math.sqrt(3))
    assert study["difference_to_uniform"] == {
        "mean": -0.5,
        "low": -0.8,
        "high": -0.2,
        "confidence": 0.95,
        "seeds": 2,
    }
    assert (study["data"], study["prompt_template"]) == ("task", "Q: {instruction}")
    assert study["train"]["steps"] == 40
    assert {"python", "torch", "peft", "optuna"} <= set(document["versions"])


def test_another_complete_trial_can_be_described(searched):
    document = allocation_document(searched, 0)
    assert document["experts_per_layer"] == (2, 2, 2, 2)
    assert document["study"]["trial"] == 0


@pytest.mark.parametrize(("number", "state"), [(6, "is PRUNED"), (99, "does not exist")])
def test_only_a_complete_trial_can_be_described(searched, number, state):
    with pytest.raises(ValueError, match=f"trial {number} of the study 'demo' {state}"):
        allocation_document(searched, number)


def test_a_search_that_is_not_over_has_no_winner():
    study = _study(SPEC)
    with pytest.raises(ValueError, match="no winner yet"):
        allocation_document(study)
    store.complete(study, _ask(study, UNIFORM, "search", 0), Finished(40, 2.0, 0.5, 0.1, 3, 1))
    document = allocation_document(study, 0)
    assert document["study"]["objective_standard_error"] is None
    assert document["study"]["difference_to_uniform"] is None


def test_an_exported_file_is_read_back(searched, tmp_path):
    document = allocation_document(searched)
    write_json_atomic(tmp_path / "allocation.json", document)
    allocation, read = read_allocation_file(tmp_path / "allocation.json")
    assert allocation == WINNER
    assert read == json.loads(json.dumps(document))


@given(
    st.lists(st.integers(0, 12), min_size=1, max_size=40).map(Allocation), st.sampled_from("jtr")
)
def test_lists_of_counts_are_read(tmp_path_factory, allocation, form):
    path = tmp_path_factory.getbasetemp() / "counts"
    texts = {
        "j": json.dumps(allocation.experts),
        "t": ",".join(map(str, allocation.experts)) + "\n",
        "r": str(allocation),
    }
    path.write_text(texts[form], encoding="utf-8-sig")
    assert read_allocation_file(path) == (allocation, {})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.pop("r"), "the allocation lacks r$"),
        (lambda d: d.update(colour=1), "the allocation has unknown keys: colour"),
        (lambda d: d.update(format_version=9), "format_version is 9"),
        (lambda d: d.pop("format_version"), "format_version is None"),
        (lambda d: d.update(total_experts=9), "total_experts is 9, but experts_per_layer has 8"),
        (lambda d: d.update(num_layers=5), "num_layers is 5, but experts_per_layer has 4"),
        (lambda d: d.update(experts_per_layer=[1, 2.5, 2, 3]), r"experts_per_layer\[1\] must be"),
        (lambda d: d.update(experts_per_layer=[-1, 4, 2, 3]), "at least 0"),
        (lambda d: d.update(experts_per_layer="2,2,2,2"), "experts_per_layer must be a list"),
        (lambda d: d.update(r="8"), "the allocation.r must be an integer, got '8'"),
        (lambda d: d["study"].pop("data"), "the allocation.study lacks data"),
        (lambda d: d["study"]["model"].update(dtype="x"), "dtype='x' is unknown"),
        (lambda d: d["versions"].update(torch=2), "versions.torch must be text"),
    ],
)
def test_a_broken_document_is_refused_with_file_and_field(searched, tmp_path, change, message):
    document = json.loads(json.dumps(allocation_document(searched)))
    change(document)
    path = tmp_path / "allocation.json"
    path.write_text(json.dumps(document))
    with pytest.raises(ValueError, match=message) as caught:
        read_allocation_file(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"two,2", "'two'"),
        (b'{"format_version": 1,\n"r": }', "line 2: it is not JSON"),
        (b"[1, 2", "is not a count"),
        (b"\xff\xfe1", "not UTF-8"),
        (b"{" * 100_000, "it is not JSON|nested too deeply"),
        (b'{"a":' * 100_000, "it is not JSON|nested too deeply"),
    ],
)
def test_other_files_are_refused_in_one_line(tmp_path, content, message):
    path = tmp_path / "counts.txt"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message) as caught:
        read_allocation_file(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert len(str(caught.value).splitlines()) == 1


def test_a_missing_file_and_a_folder_are_refused(tmp_path):
    with pytest.raises(ValueError, match="No such file"):
        read_allocation_file(tmp_path / "x.json")
    with pytest.raises(ValueError, match="directory"):
        read_allocation_file(tmp_path)


def test_upstream_arguments_say_the_same_adapter():
    adapter = AdapterSettings(r=4, lora_alpha=16.0, top_k=2, target_modules=("q_proj", "v_proj"))
    words = shlex.split(upstream_args(WINNER, adapter))
    assert dict(zip(words[::2], words[1::2], strict=True)) == {
        "--number_experts": "1,2,2,3",
        "--top_k": "1,2,2,2",
        "--lora_r": "4,4,4,4",
        "--lora_alpha": "16",
        "--lora_dropout": "0.05",
        "--lora_target_modules": "q_proj,v_proj",
    }


def test_upstream_arguments_name_all_linear_layers_where_none_are_named():
    assert re.search(r'modules "q_proj,.*down_proj"', upstream_args(WINNER, AdapterSettings()))


def test_upstream_has_no_layer_without_experts():
    assert upstream_args(Allocation([0, 2]), AdapterSettings()) is None


def test_the_built_in_model_has_a_name_in_the_file():
    study = _study(dataclasses.replace(SPEC, model=ModelSource()))
    store.complete(study, _ask(study, UNIFORM, "search", 0), Finished(40, 2.0, 0.5, 0.1, 3, 1))
    document = allocation_document(study, 0)
    assert document["base_model"] == "built-in demonstration model"
    assert document["study"]["model"]["name"] is None


def _study(spec):
    study = optuna.create_study(study_name="demo")
    study.set_user_attr("spec", spec.to_json())
    return study


def _ask(study, allocation, label, seed):
    study.enqueue_trial(to_params(allocation))
    trial = study.ask(distributions(SPEC.budget))
    store.mark(trial, label=label, seed=seed)
    return trial
