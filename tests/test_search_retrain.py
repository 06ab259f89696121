from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import search.full.run
from mola.allocation import Allocation, ExpertBudget
from mola.base import load_model, load_tokenizer
from mola.demo import DEFAULTS
from mola.model import load_mola_model
from mola.settings import AdapterSettings, ModelSource, TrainSettings
from search.full.plan import Options, Plan, _train, prepare
from search.full.print_runs import differences_to_baselines
from search.full.results import Run, Scores, read_results
from search.priors.measure import Request, compute
from search.priors.scores import allocate
from search.retrain import main
from studies.allocation_file import AllocationFile, Origin

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")


def arguments(out: Path, model: Path, data: Path, *more: str, counts: str = "1 2 3 2") -> list[str]:
    allocation = out.parent / "winner.json"
    allocation.write_text(counts)
    given = {
        "--allocation": allocation,
        "--out": out,
        "--model": model,
        "--data": data,
        "--epochs": 1,
        "--batch-size": 8,
        "--learning-rate": 1e-2,
    }
    return [*(str(word) for pair in given.items() for word in pair), *more]


def retrain(args: list[str]) -> int:
    with pytest.raises(SystemExit) as stopped:
        main(args)
    assert isinstance(stopped.value.code, int)
    return stopped.value.code


def test_a_retrain_saves_an_adapter_and_compares_it(
    tmp_path: Path,
    tiny_model_dir: Path,
    choices_dir: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out = tmp_path / "out"
    args = arguments(out, tiny_model_dir, choices_dir, "--compare", "5555", "--seeds", "2")
    assert retrain(args) == 0
    printed = capsys.readouterr().out
    assert "winner - 5555 on test: " in printed
    assert "95% interval" in printed
    results = read_results(out / "results.json")
    assert results is not None
    assert [(run.name, run.seed) for run in results.runs] == [
        ("winner", 10),
        ("5555", 10),
        ("winner", 11),
        ("5555", 11),
    ]
    assert set(results.frozen) == {"validation", "test"}
    assert results.conditions.train.steps == 4
    config = json.loads((out / "adapter_config.json").read_text())
    assert config["experts"] == [1, 2, 3, 2]
    others = ["5555-seed-10", "5555-seed-11", "winner-seed-11"]
    assert sorted(path.name for path in out.iterdir() if path.is_dir()) == others
    assert not list(out.rglob("unfinished*"))

    # a second time, nothing is done again
    monkeypatch.setattr("search.full.retrain_job.full_run", None)
    assert retrain(args) == 0
    assert capsys.readouterr().out == printed


def test_the_saved_adapter_has_the_logits_of_the_trained_one(
    tmp_path: Path, tiny_model_dir: Path, text_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = torch.arange(3, 20)[None]
    logits = {}
    evaluate = search.full.run.evaluate

    def spy(model: Any, *args: Any, **kwargs: Any) -> Any:
        result = evaluate(model, *args, **kwargs)
        with torch.inference_mode():
            logits["trained"] = model(tokens).logits
        return result

    monkeypatch.setattr(search.full.run, "evaluate", spy)
    assert retrain(arguments(tmp_path / "out", tiny_model_dir, text_dir)) == 0
    loaded = load_mola_model(str(tiny_model_dir), tmp_path / "out")
    with torch.inference_mode():
        assert torch.equal(loaded(tokens).logits, logits["trained"])


def test_without_a_test_split_it_says_what_the_result_rests_on(
    tmp_path: Path, tiny_model_dir: Path, text_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = arguments(tmp_path / "out", tiny_model_dir, text_dir, "--compare", "8642")
    assert retrain(args) == 0
    printed = capsys.readouterr().out
    assert "rests on validation" in printed
    assert "winner - 8642 on validation" in printed
    assert "one seed gives no interval" in printed


class StopAfter:
    """Asks for a stop after so many steps."""

    def __init__(self, steps: int) -> None:
        self.left = steps

    def __call__(self) -> bool:
        self.left -= 1
        return self.left == 0


@pytest.mark.parametrize("stop_after", [1, 3])
def test_going_on_gives_what_an_uninterrupted_run_gives(
    tmp_path: Path, tiny_model_dir: Path, choices_dir: Path, stop_after: int
) -> None:
    from mola.data import encode_splits, load_splits

    source = ModelSource(str(tiny_model_dir))
    data = encode_splits(
        load_splits(str(choices_dir)),
        load_tokenizer(source),
        prompt_template=None,
        max_length=256,
        name="choices",
    )
    model = load_model(source)

    def run(folder: Path, stop: Any) -> Run:
        steps = search.full.run.full_run(
            model,
            data,
            "winner",
            Allocation((1, 2, 3, 2)),
            AdapterSettings(r=2),
            TrainSettings(steps=4, batch_size=8, micro_batch=4, learning_rate=1e-2),
            seed=1,
            folder=folder,
            accelerator=search.full.run.make_accelerator(),
            stop_requested=stop,
        )
        return search.full.run.to_the_end(steps, on_step=lambda _: None)

    whole = run(tmp_path / "whole", lambda: False)
    with pytest.raises(search.full.run.StopRequestedError, match=f"after step {stop_after} of 4"):
        run(tmp_path / "parts", StopAfter(stop_after))
    continued = run(tmp_path / "parts", lambda: False)
    assert replace(continued, train_seconds=0) == replace(whole, train_seconds=0)
    weights = [load_file(tmp_path / f / "adapter_model.safetensors") for f in ("whole", "parts")]
    assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])


@pytest.mark.timeout(300)
def test_a_killed_retrain_is_continued_by_the_same_command(
    tmp_path: Path, tiny_model_dir: Path, choices_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "killed"
    args = [*arguments(out, tiny_model_dir, choices_dir), "--epochs", "8"]  # the last one counts
    program = (
        "import search.full.run as f; f.full_run.__kwdefaults__['checkpoint_seconds'] = 0;"
        "from search.retrain import main; main()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program, *args], stderr=subprocess.DEVNULL, start_new_session=True
    )
    checkpoint = out / "unfinished.safetensors"
    while not checkpoint.exists() and process.poll() is None:
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert checkpoint.exists(), "the retrain ended before it could be killed"
    assert retrain(args) == 0
    assert not checkpoint.exists()
    assert ": step 1 of 32" not in capsys.readouterr().err
    assert retrain([*args, "--out", str(tmp_path / "whole")]) == 0
    first, second = (read_results(tmp_path / f / "results.json") for f in ("killed", "whole"))
    assert first is not None
    assert second is not None
    assert first.runs[0].validation == second.runs[0].validation
    assert first.runs[0].test == second.runs[0].test


@pytest.mark.timeout(300)
def test_two_processes_share_the_batches(
    tmp_path: Path, tiny_model_dir: Path, choices_dir: Path
) -> None:
    args = arguments(tmp_path / "out", tiny_model_dir, choices_dir, "--compare", "5555")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*launch, "-m", "search.retrain", *args],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("winner - 5555 on test") == 1
    results = read_results(tmp_path / "out" / "results.json")
    assert results is not None
    assert results.conditions.processes == 2
    assert [run.name for run in results.runs] == ["winner", "5555"]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--compare", "7777"], "cannot compare with 7777: expected one of 5555, 2468"),
        (["--model", "no/such/model"], "no/such/model"),
        (["--max-length", "1000"], "the model's context is 512 tokens"),
        (["--prompt-template", "{question}"], "{question}"),
        (["--micro-batch", "9"], "micro_batch=9 must be between 1 and batch_size=8"),
        (["--seeds", "0"], "--seeds"),
        (["--allocation", "none.json"], "none.json: No such file"),
    ],
)
def test_a_wrong_option_is_one_line_and_status_2(
    tmp_path: Path,
    tiny_model_dir: Path,
    choices_dir: Path,
    capsys: pytest.CaptureFixture[str],
    more: list[str],
    message: str,
) -> None:
    assert retrain([*arguments(tmp_path / "out", tiny_model_dir, choices_dir), *more]) == 2
    error = capsys.readouterr().err
    assert error.startswith("Error: ")
    assert message in error
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_an_allocation_for_another_depth_is_refused(
    tmp_path: Path, tiny_model_dir: Path, choices_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = arguments(tmp_path / "out", tiny_model_dir, choices_dir, counts="[2, 2]")
    assert retrain(args) == 2
    assert "'winner' has 2 layers, but the model" in capsys.readouterr().err


def test_a_folder_made_under_other_conditions_is_refused(
    tmp_path: Path, tiny_model_dir: Path, choices_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = arguments(tmp_path / "out", tiny_model_dir, choices_dir)
    assert retrain(args) == 0
    assert retrain([*args, "--learning-rate", "1e-3", "--epochs", "2"]) == 2
    error = capsys.readouterr().err
    assert "train.learning_rate: 0.001 here, 0.01 there" in error
    assert "train.steps: 8 here, 4 there" in error
    assert retrain([*args, "--seeds", "2"]) == 0  # more of the same is welcome
    (tmp_path / "out" / "results.json").unlink()
    assert retrain(args) == 2
    assert "holds another adapter" in capsys.readouterr().err


def test_a_diverging_training_ends_with_advice(
    tmp_path: Path, tiny_model_dir: Path, choices_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = arguments(tmp_path / "out", tiny_model_dir, choices_dir, "--learning-rate", "1e30")
    assert retrain(args) == 1
    assert "try a lower --learning-rate" in capsys.readouterr().err


def test_help_needs_no_torch() -> None:
    program = (
        "import sys; from search.retrain import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False)
    assert done.returncode == 0
    assert b"--allocation" in done.stdout


def document(model: Path, **study: Any) -> dict[str, Any]:
    origin = Origin(
        name="ours",
        trial=3,
        objective="nats per row",
        objective_mean=1.0,
        objective_standard_error=None,
        seeds=1,
        accuracy=None,
        difference_to_uniform=None,
        model=ModelSource(str(model), trust_remote_code=True),
        model_fingerprint="",
        data="choices",
        data_fingerprint="",
        prompt_template="{instruction}\n",
        max_length=77,
        train=TrainSettings(),
        seed=0,
    )
    file = AllocationFile(
        format_version=1,
        base_model=str(model),
        num_layers=4,
        total_experts=8,
        experts_per_layer=(1, 2, 3, 2),
        top_k=1,
        r=4,
        lora_alpha=9,
        lora_dropout=0.0,
        target_modules=("q_proj",),
        router_aux_loss_coef=0.5,
        study=replace(origin, **study),
        versions={},
        upstream_args=None,
    )
    return asdict(file)


def plan(tmp_path: Path, file: dict[str, Any], **options: Any) -> Plan:
    path = tmp_path / "allocation.json"
    path.write_text(json.dumps(file))
    given: dict[str, Any] = {
        "allocation": path,
        "out": tmp_path / "out",
        "compare": (),
        "seeds": 1,
        "seed": 10,
        "model": None,
        "revision": None,
        "dtype": None,
        "trust_remote_code": False,
        "data": None,
        "prompt_template": None,
        "max_length": None,
        "epochs": 3,
        "learning_rate": 3e-4,
        "batch_size": 10,
        "micro_batch": None,
        "warmup_steps": None,
        "gradient_checkpointing": False,
    }
    return prepare(Options(**{**given, **options}), mixed_precision="no", processes=1)


def test_the_file_gives_the_defaults(
    tmp_path: Path, tiny_model_dir: Path, choices_dir: Path
) -> None:
    conditions = plan(tmp_path, document(tiny_model_dir), data=str(choices_dir)).conditions
    assert conditions.model.name == str(tiny_model_dir)
    assert (conditions.prompt_template, conditions.max_length) == ("{instruction}\n", 77)
    assert conditions.adapter == AdapterSettings(4, 9, 0.0, ("q_proj",), 1, 0.5)
    assert conditions.train == TrainSettings(
        steps=10, batch_size=10, micro_batch=8, learning_rate=3e-4
    )


def test_the_built_in_model_has_defaults_of_its_own(tmp_path: Path) -> None:
    names = Options.__dataclass_fields__
    given = {
        **dict.fromkeys(names),
        "epochs": 2,
        "batch_size": 128,
        "gradient_checkpointing": False,
    }
    train = _train(Options(**given), ModelSource(), 1000)  # type: ignore[arg-type]
    assert (train.micro_batch, train.learning_rate) == (None, DEFAULTS["learning_rate"])
    train = _train(Options(**given), ModelSource("other"), 1000)  # type: ignore[arg-type]
    assert (train.steps, train.micro_batch, train.learning_rate) == (16, 8, 3e-4)


def test_a_file_cannot_make_a_models_code_run(
    tmp_path: Path, tiny_model_dir: Path, choices_dir: Path
) -> None:
    file = document(tiny_model_dir)
    assert file["study"]["model"]["trust_remote_code"]
    made = plan(tmp_path, file, data=str(choices_dir))
    assert not made.conditions.model.trust_remote_code


def test_data_that_the_file_only_names_must_be_given(tmp_path: Path, tiny_model_dir: Path) -> None:
    with pytest.raises(ValueError, match=r"by --data .*; the study's data set is called 'choices'"):
        plan(tmp_path, document(tiny_model_dir))


def test_baselines_have_the_total_of_the_exported_allocation(
    tmp_path: Path, tiny_model_dir: Path, choices_dir: Path
) -> None:
    other = tmp_path / "other.txt"
    other.write_text("0 0 3 9")
    made = plan(
        tmp_path, document(tiny_model_dir), data=str(choices_dir), compare=("8642", str(other))
    )
    assert {name: a.experts for name, a in made.allocations.items()} == {
        "allocation": (1, 2, 3, 2),
        "8642": (3, 2, 2, 1),
        "other": (0, 0, 3, 9),
    }


def test_alphalora_is_a_baseline_that_is_measured_once(
    tmp_path: Path, tiny_model_dir: Path, choices_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"data": str(choices_dir), "compare": ("alphalora",)}
    made = plan(tmp_path, document(tiny_model_dir), **options)
    baseline = made.allocations["alphalora"]
    source = ModelSource(str(tiny_model_dir))
    request = Request("alphalora", source, "cpu")
    expected = compute(request, lambda layer: None)
    total = next(iter(made.allocations.values())).total
    assert baseline == allocate(expected, ExpertBudget(4, total))

    def refuse(*_: object) -> None:
        raise AssertionError("measured again")

    monkeypatch.setattr("search.priors.measure.measure", refuse)
    assert plan(tmp_path, document(tiny_model_dir), **options).allocations == made.allocations


def test_a_comparison_with_itself_is_left_out(
    tmp_path: Path, tiny_model_dir: Path, choices_dir: Path
) -> None:
    file = {**document(tiny_model_dir), "experts_per_layer": [2, 2, 2, 2]}
    with pytest.warns(UserWarning, match="5555 is not compared"):
        made = plan(tmp_path, file, data=str(choices_dir), compare=("5555",))
    assert list(made.allocations) == ["allocation"]


def test_differences_are_exported_minus_baseline_on_test() -> None:
    def runs(name: str, experts: tuple[int, ...], objectives: list[float]) -> list[Run]:
        other = Scores(9.0, 0.5, None, 4)
        return [
            Run(name, experts, seed, 1, 0.0, other, Scores(objective, 0.5, None, 4))
            for seed, objective in enumerate(objectives)
        ]

    lines = differences_to_baselines(
        {
            "winner": runs("winner", (1, 3), [1.0, 2.0, 3.1]),
            "5555": runs("5555", (2, 2), [1.1, 2.1, 3.3]),
        },
        "nats per row",
        has_test=True,
    )
    # differences -0.1, -0.1, -0.2: mean -0.1333, s / sqrt(3) = 0.03333, t(0.975, 2) = 4.3027
    assert lines == [
        "winner - 5555 on test: -0.1333 nats per row, 95% interval [-0.2768, +0.0101] over 3 seeds"
    ]
