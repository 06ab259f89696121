import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mola.allocation import ExpertBudget
from mola.settings import DTYPES, AdapterSettings, ModelSource, TrainSettings
from studies.spec import StudySpec

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
    seed=0,
    objective="nats per row",
)

text = st.text(max_size=20)


@st.composite
def sets(draw):
    """What is searched: bounds for all layers or each, and a total between their sums."""
    if draw(st.booleans()):
        low, extra, count = draw(
            st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(1, 99))
        )
        total = draw(st.integers(count * low, count * (low + extra)))
        return {"num_layers": count, "total": total, "low": low, "high": low + extra}
    pairs = draw(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=9))
    lows, highs = tuple(map(min, pairs)), tuple(map(max, pairs))
    total = draw(st.integers(sum(lows), sum(highs)))
    return {"num_layers": len(pairs), "total": total, "low": lows, "high": highs}


specs = st.builds(
    dataclasses.replace,
    st.just(SPEC),
    model=st.builds(
        ModelSource,
        name=st.none() | text,
        revision=st.none() | text,
        dtype=st.sampled_from(DTYPES),
        trust_remote_code=st.booleans(),
    ),
    model_fingerprint=text,
    data=text,
    data_fingerprint=text,
    prompt_template=st.none() | text,
    max_length=st.integers(1, 9999),
    adapter=st.builds(
        AdapterSettings,
        lora_alpha=st.floats(0.1, 99),
        target_modules=st.none() | st.lists(text, max_size=3).map(tuple),
    ),
    train=st.builds(
        TrainSettings, learning_rate=st.floats(1e-6, 1), warmup_steps=st.none() | st.integers(0, 9)
    ),
    rungs=st.lists(st.integers(1, 99), max_size=3).map(tuple),
    seed=st.integers(0, 2**31),
    objective=st.sampled_from(["nats per row", "nats per output token"]),
)


@given(specs, sets())
def test_json_gives_back_the_same_spec(spec, searched):
    spec = dataclasses.replace(spec, **searched)
    assert StudySpec.from_json(spec.to_json()) == spec


def test_json_is_plain_and_has_a_version():
    document = json.loads(SPEC.to_json())
    assert document["format_version"] == 1
    assert document["adapter"]["r"] == 8


def test_budget_is_the_set_that_is_searched():
    assert SPEC.budget == ExpertBudget(4, 8, 1, 4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.pop("seed"), "spec lacks seed"),
        (lambda d: d.update(colour="red"), "spec has unknown keys: colour"),
        (lambda d: d["adapter"].pop("r"), "spec.adapter lacks r"),
        (lambda d: d["train"].update(epochs=3), "spec.train has unknown keys: epochs"),
        (lambda d: d.update(total="8"), "spec.total must be an integer, got '8'"),
        (lambda d: d.update(total=True), "spec.total must be an integer, got True"),
        (lambda d: d.update(rungs=[1, "x"]), r"spec.rungs\[1\] must be an integer, got 'x'"),
        (lambda d: d.update(low=[1, None]), r"spec.low\[1\] must be an integer"),
        (lambda d: d.update(low="all"), "spec.low must be an integer or a list"),
        (lambda d: d.update(model="x"), "spec.model must be an object"),
        (lambda d: d["model"].update(dtype="int4"), "dtype='int4' is unknown"),
        (lambda d: d.update(format_version=2), "format_version 2"),
        (lambda d: d.pop("format_version"), "format_version None"),
    ],
)
def test_from_json_names_what_is_wrong(change, message):
    document = json.loads(SPEC.to_json())
    change(document)
    with pytest.raises(ValueError, match=message):
        StudySpec.from_json(json.dumps(document))


@pytest.mark.parametrize("broken", ["", "{", "[]", "null", "3"])
def test_from_json_refuses_other_text(broken):
    with pytest.raises(ValueError, match="the study's spec"):
        StudySpec.from_json(broken)


@given(specs)
def test_a_spec_does_not_differ_from_itself(spec):
    try:
        _ = spec.budget
    except ValueError:
        return  # bounds that no allocation meets are never stored
    assert spec.differences(spec) == []


def test_differences_name_setting_flag_and_both_values():
    other = dataclasses.replace(SPEC, total=9, train=TrainSettings(steps=7), prompt_template="chat")
    assert SPEC.differences(other) == [
        "budget (--budget): 8 here, 9 in the study",
        "prompt template (--prompt-template): the default here, 'chat' in the study",
        "steps (--steps): 40 here, 7 in the study",
    ]


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(StudySpec)])
def test_every_field_of_the_spec_can_make_a_difference(field):
    changes = {
        "num_layers": 5,
        "total": 9,
        "low": 0,
        "high": 5,
        "model": ModelSource(dtype="bfloat16"),
        "adapter": AdapterSettings(r=4),
        "train": TrainSettings(batch_size=4),
        "rungs": (),
        "max_length": 64,
        "seed": 1,
    }
    if field == "data":
        return  # a name: the fingerprint decides
    other = dataclasses.replace(SPEC, **{field: changes.get(field, "other")})
    assert len(SPEC.differences(other)) == 1


@pytest.mark.parametrize("settings", ["adapter", "train"])
def test_every_setting_of_a_trial_can_make_a_difference(settings):
    ours = getattr(SPEC, settings)
    for field in dataclasses.fields(ours):
        value = {"target_modules": ("q_proj",), "micro_batch": 4, "warmup_steps": 1}.get(
            field.name, 0.5 if field.type == "float" else 39
        )
        changed = dataclasses.replace(ours, **{field.name: value})
        count = len(SPEC.differences(dataclasses.replace(SPEC, **{settings: changed})))
        assert count == (field.name != "gradient_checkpointing"), field.name


def test_settings_that_mean_the_same_are_no_difference():
    same = dataclasses.replace(
        SPEC,
        low=(1, 1, 1, 1),
        high=(4, 4, 4, 4),
        train=TrainSettings(micro_batch=8, warmup_steps=4, gradient_checkpointing=True),
    )
    assert SPEC.differences(same) == []


def test_a_model_or_data_set_may_move():
    moved = dataclasses.replace(SPEC, model=ModelSource(name="/elsewhere"), data="elsewhere")
    assert SPEC.differences(moved) == []


def test_changed_files_under_the_same_name_are_told_as_such():
    (line,) = SPEC.differences(dataclasses.replace(SPEC, data_fingerprint="d2"))
    assert line.startswith("data (--data, --validation-rows): what is read from task is not")
    (line,) = SPEC.differences(dataclasses.replace(SPEC, model_fingerprint="m2"))
    assert line.startswith("model (--model): what is read from built-in demonstration model")


def test_another_template_is_not_reported_as_other_data():
    other = dataclasses.replace(SPEC, prompt_template="chat", data_fingerprint="d2")
    (line,) = SPEC.differences(other)
    assert line.startswith("prompt template")
