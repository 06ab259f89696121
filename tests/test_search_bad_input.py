"""What people mistype, and what they are sent, at the command line: one line, status 2."""

from __future__ import annotations

import importlib
import json
import shutil
import sqlite3
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import optuna
import pytest
from click.testing import CliRunner, Result
from optuna.distributions import FloatDistribution
from optuna.trial import create_trial
from pretend_pool import PretendPool, no_waiting_for_the_disk
from pretend_study import SPEC, empty_study, searched_study
from transformers import AutoTokenizer

import search.compare
import search.export
import search.job
import search.retrain
import search.run
import search.status
from search.config import check, read
from search.console.cli import LONGEST_ERROR, MOST_SEEDS, UserError
from search.workers.layout import plan_layout

__all__ = ["no_waiting_for_the_disk"]
pytestmark = pytest.mark.usefixtures("no_waiting_for_the_disk")
REPORT = importlib.import_module("search.report.__main__").main


def call(command: click.Command, *words: object) -> Result:
    return CliRunner().invoke(command, [str(word) for word in words])


def refusal(command: click.Command, *words: object) -> str:
    """The one line that a mistake gets."""
    result = call(command, *words)
    assert isinstance(result.exception, SystemExit), result.exception
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    (line,) = [text for text in result.stderr.splitlines() if not text.startswith("Model: ")]
    assert line.startswith("Error: ")
    assert len(line) <= LONGEST_ERROR + 7
    return line


HUGE = 10**18


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--budget", HUGE], "--budget"),
        (["--budget", -HUGE], "--budget"),
        (["--budget", "9" * 5000], "--budget"),
        (["--budget", 10**9], "is out of reach for 32 layers"),
        (["--budget", 100_000], "100000 experts to place in 32 layers"),
        (["--budget", 160, "--max-experts", HUGE], "must be at most 4096"),
        (["--budget", 160, "--max-experts", "1x99999"], "has more than 10000 layers"),
        (["--budget", 160, "--r", 60_000], "ranks in all; lower --r or --max-experts"),
        (["--budget", 160, "--r", HUGE], "--r"),
        (["--budget", 160, "--workers", 10**9], "--workers"),
        (["--budget", 160, "--seed", 2**31 - 1], "--seed"),
        (["--budget", 160, "--confirm-seeds", MOST_SEEDS + 1], "--confirm-seeds"),
        (["--budget", 160, "--batch-size", 10**9], "--batch-size"),
        (["--budget", 160, "--steps", HUGE], "--steps"),
        (["--budget", 160, "--trials", HUGE], "--trials"),
        (["--budget", 160, "--study", ""], "the study name '' cannot name a folder"),
        (["--budget", 160, "--study", "a" * 300], "1 to 200 bytes"),
        (["--budget", 160, "--study", "<script>"], "must not contain '<'"),
        (["--budget", 160, "--study", "a/b"], "must not contain '/'"),
        (["--budget", 160, "--prompt-template", "{0.__class__}"], "the fields are"),
    ],
)
def test_a_mistake_is_one_line(words: list[object], expected: str) -> None:
    assert expected in refusal(search.run.main, *words, "--dry-run")


RATES = ("--learning-rate", "--lora-alpha", "--lora-dropout", "--router-aux-loss-coef")


@pytest.mark.parametrize("flag", [*RATES, "--gpus-per-worker"])
@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "1e400", "-1", "", "x"])
def test_a_number_is_a_finite_one(flag: str, value: str) -> None:
    assert flag in refusal(search.run.main, "--budget", 160, flag, value, "--dry-run")


NAMES = ["", "..", "../x", "a/b", "a" * 300, "é" * 101, "<script>", "x\u202ey", "a\tb", "*", "C:"]


@pytest.mark.parametrize("name", NAMES)
def test_a_study_name_that_names_no_folder_is_refused_by_every_command(name: str) -> None:
    for command, words in (
        (search.status.main, []),
        (search.export.main, ["--out", "x.json"]),
        (search.compare.main, []),
        (REPORT, []),
    ):
        line = refusal(command, "--study", name, *words)
        assert "cannot name a folder" in line
        assert line.isprintable()


@pytest.mark.parametrize("workers", [17, 10**9])
def test_more_workers_than_the_cores_can_run_are_refused(workers: int) -> None:
    with pytest.raises(ValueError, match="2 cores run at most 16 workers"):
        plan_layout([{"CPU": 2.0}], workers=workers)


BOMB = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{b}: &{b} [{','.join([f'*{a}'] * 9)}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("c.yaml", BOMB + "steps: *i\n", "aliases (*name) are not supported"),
        ("c.yaml", "steps: 3\nsteps: 4\n", "'steps' is given twice"),
        ("c.yaml", "a: " + "[" * 20_000, "nested too deeply"),
        ("c.yaml", "!!python/object/apply:os.system [ls]\n", "could not determine a constructor"),
        ("c.yaml", "steps: 0x" + "f" * 5000, "a number of 20000 bits is out of range"),
        ("c.yaml", "min_experts: 0x" + "f" * 5000, "--min-experts"),
        ("c.yaml", "fix: [[0x" + "f" * 5000 + ", 1]]", "is not LAYER=N"),
        ("c.yaml", "steps: .nan\n", "steps must be a whole number, got nan"),
        ("c.yaml", "lora_alpha: .inf\n", "not a finite number"),
        ("c.yaml", "target_modules: [1, [2]]\n", "is not a list of texts"),
        ("c.yaml", "? [a, b]\n: 1\n", "found unhashable key"),
        ("c.yaml", "model: 2024-01-01\n", "model must be text"),
        ("c.toml", "x = " + "[" * 20_000, "nested too deeply"),
        ("c.toml", 'steps = "' + "x" * 100_000 + '"', "steps must be a whole number"),
        ("c.toml", "\x00", "c.toml"),
        ("c.ini", "steps = 3", "ends in .toml, .yaml or .yml"),
    ],
)
def test_a_hostile_file_of_settings_is_one_line(
    tmp_path: Path, name: str, text: str, expected: str
) -> None:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    line = refusal(search.run.main, "--budget", 160, "--config", path, "--dry-run")
    assert expected in line


@pytest.mark.parametrize("encoding", ["utf-16", "latin-1"])
def test_a_file_of_settings_in_another_encoding_is_one_line(tmp_path: Path, encoding: str) -> None:
    path = tmp_path / "c.toml"
    path.write_bytes('model = "größe"'.encode(encoding))
    with pytest.raises(UserError, match=r"c\.toml: 'utf-8' codec can't decode"):
        read(path)


def test_a_file_of_settings_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_bytes(b"\xef\xbb\xbfsteps = 3\n")
    path = tmp_path / "c.toml"
    assert check(read(path), search.run.main, path) == {"steps": 3}


def allocation_document(**changes: object) -> dict[str, Any]:
    """An allocation.json as the built-in model's search writes it, with changes."""
    study = {
        "name": "s",
        "trial": 1,
        "objective": "nats per row",
        "objective_mean": 1.0,
        "objective_standard_error": None,
        "seeds": 1,
        "accuracy": 0.5,
        "difference_to_uniform": None,
        "model": {"name": None, "revision": None, "dtype": "auto", "trust_remote_code": True},
        "model_fingerprint": "m",
        "data": "built-in task",
        "data_fingerprint": "d",
        "prompt_template": None,
        "max_length": 64,
        "train": {
            "steps": 4,
            "batch_size": 4,
            "micro_batch": None,
            "learning_rate": 1e-3,
            "warmup_steps": None,
            "max_grad_norm": 1.0,
            "gradient_checkpointing": False,
        },
        "seed": 0,
    }
    document: dict[str, Any] = {
        "format_version": 1,
        "base_model": "m",
        "num_layers": 32,
        "total_experts": 64,
        "experts_per_layer": [2] * 32,
        "top_k": 2,
        "r": 8,
        "lora_alpha": 16.0,
        "lora_dropout": 0.05,
        "target_modules": None,
        "router_aux_loss_coef": 0.0,
        "study": study,
        "versions": {},
        "upstream_args": None,
    }
    for key, value in changes.items():
        holder = study if key in study else document
        holder[key] = value
    return document


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"lora_alpha": 10**400}, "allocation.lora_alpha must be a finite number, got inf"),
        ({"lora_alpha": float("nan")}, "allocation.lora_alpha must be a finite number, got nan"),
        ({"lora_dropout": 2.0}, "lora_dropout=2.0 must be in [0, 1)"),
        ({"r": 10**18}, "r=1000000000000000000 must be from 1 to 65536"),
        ({"top_k": 0}, "top_k=0 must be at least 1"),
        ({"experts_per_layer": [10**18] * 32}, "experts of layer 0 must be at most 4096"),
        ({"experts_per_layer": "[" * 40}, "experts_per_layer must be a list"),
        ({"max_length": -5}, "max_length=-5"),
        ({"prompt_template": "{0.__class__}"}, "the fields are {instruction} and {input}"),
    ],
)
def test_a_hostile_allocation_file_is_one_line(
    tmp_path: Path, changes: dict[str, Any], expected: str
) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps(allocation_document(**changes)))
    line = refusal(search.retrain.main, "--allocation", path, "--out", tmp_path / "out")
    assert expected in line


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"\xff\xfe2\x00", "not UTF-8"),
        (b"2x" + b"9" * 5000, "a.txt"),
        (b"x" * 10_000_000, "is not a count of experts"),
        (b"", "is empty"),
        (b'{"format_version": 1, "a": ' + b"[" * 100_000, "nested too deeply"),
    ],
)
def test_a_file_of_no_allocation_is_one_line(tmp_path: Path, content: bytes, expected: str) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(content)
    words = ["--allocation", path, "--out", tmp_path / "out"]
    assert expected in refusal(search.retrain.main, *words)
    assert "a.txt" in refusal(search.run.main, "--budget", 160, "--prior", path, "--dry-run")


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The database of the study `mine`, in its place under the working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(search.job, "_open_pool", lambda *_: PretendPool())
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    return tmp_path / "runs" / "mine" / "study.db"


def foreign(path: Path) -> None:
    study = optuna.create_study(study_name="mine", storage=f"sqlite:///{path}")
    study.optimize(lambda trial: trial.suggest_float("x", 0, 1), n_trials=1)


def two_objectives(path: Path) -> None:
    directions = ["minimize", "maximize"]
    optuna.create_study(study_name="mine", storage=f"sqlite:///{path}", directions=directions)


def photos(path: Path) -> None:
    with sqlite3.connect(path) as database:
        database.execute("CREATE TABLE photos (id INTEGER)")


def alike(path: Path) -> None:
    with sqlite3.connect(path) as database:
        for table in ("studies", "version_info"):
            database.execute(f"CREATE TABLE {table} (id INTEGER)")


MADE: dict[str, Callable[[Path], object]] = {
    "text": lambda path: path.write_text("my notes\n" * 100),
    "a header alone": lambda path: path.write_bytes(b"SQLite format 3\0" + b"x" * 5000),
    "another program's": photos,
    "tables of the same names": alike,
    "a study of another program": foreign,
    "a study of two objectives": two_objectives,
}


@pytest.mark.parametrize("kind", MADE)
def test_a_store_of_another_program_is_one_line_everywhere(place: Path, kind: str) -> None:
    MADE[kind](place)
    refusal(search.status.main, "--study", "mine")
    refusal(search.export.main, "--study", "mine", "--out", "x.json")
    refusal(search.compare.main, "--study", "mine")
    refusal(REPORT, "--study", "mine")
    refusal(search.run.main, "--budget", 160, "--study", "mine")
    listing = call(search.status.main)
    assert listing.exit_code == 0
    assert ("not made by mola-search" in listing.stdout) != ("Warning: " in listing.stderr)


def test_one_broken_store_does_not_hide_the_others(place: Path) -> None:
    place.write_text("my notes")
    other = place.parent.parent / "other" / "study.db"
    other.parent.mkdir()
    searched_study("other", f"sqlite:///{other}", confirm_seeds=0)
    listing = call(search.status.main)
    assert listing.stdout.startswith("other: finished")
    assert listing.stderr.startswith("Warning: cannot use the storage sqlite:///runs/mine/study.db")


def changed_spec(**changes: object) -> str:
    return json.dumps({**json.loads(SPEC.to_json()), **changes})


DAMAGE: list[tuple[str, Any, str]] = [
    ("spec", 5, "was not made by mola-search"),
    ("spec", "[" * 100_000, "the study's spec is not JSON"),
    ("spec", changed_spec(num_layers=10**9), "contradicts itself: num_layers must be 1 to 10000"),
    ("spec", changed_spec(total=10**18), "contradicts itself: total=1000000000000000000 is out"),
    ("spec", changed_spec(high=10**18), "high must be at most 4096"),
    ("spec", changed_spec(low=[1, 2]), "low must be one number or one per layer"),
    ("conclusion", 5, "conclusion must be an object, got 5; another program"),
    ("conclusion", {}, "conclusion lacks text"),
    ("conclusion", {"text": "", "winner": "x"}, "conclusion.winner cannot be 'x'"),
    ("runs", {"a": 1}, "runs must be a list"),
    ("runs", [{"command": 1}], "runs[0].command cannot be 1"),
]


@pytest.mark.parametrize(("key", "value", "expected"), DAMAGE)
def test_attributes_that_another_program_wrote_are_one_line(
    place: Path, key: str, value: Any, expected: str
) -> None:
    study = searched_study("mine", f"sqlite:///{place}", confirm_seeds=0)
    study.set_user_attr(key, value)
    assert expected in refusal(search.status.main, "--study", "mine")
    assert expected in refusal(REPORT, "--study", "mine")
    listing = call(search.status.main)
    assert listing.exit_code == 0
    assert "cannot be read: " in listing.stdout


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("seed", "x"),
        ("label", 5),
        ("accuracy", "high"),
        ("accuracy", float("nan")),
        ("routing", [1]),
        ("train_seconds", None),
    ],
)
def test_a_trial_that_another_program_wrote_is_named(place: Path, key: str, value: Any) -> None:
    searched_study("mine", f"sqlite:///{place}", confirm_seeds=0)
    with sqlite3.connect(place) as database:
        database.execute(
            "UPDATE trial_user_attributes SET value_json = ? WHERE key = ?",
            (json.dumps(value), key),
        )
    assert f"{key} of trial 0 cannot be" in refusal(search.status.main, "--study", "mine")


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({f"experts_{i:02d}": 0.5 for i in range(6)}, "experts of layer 0 must be an integer"),
        ({f"experts_{i:02d}": 3.0 for i in range(6)}, "experts of layer 0 must be an integer"),
    ],
)
def test_a_trial_of_another_kind_is_named(
    place: Path, params: dict[str, float], expected: str
) -> None:
    study = empty_study("mine", f"sqlite:///{place}")
    ranges = dict.fromkeys(params, FloatDistribution(0, 9))
    study.add_trial(create_trial(value=0.1, params=params, distributions=ranges))
    assert f"trial 0: {expected}"[:30] in refusal(search.status.main, "--study", "mine")


def test_a_trial_that_was_completed_elsewhere_is_named(place: Path) -> None:
    study = searched_study("mine", f"sqlite:///{place}", confirm_seeds=0)
    done = study.trials[0]
    study.add_trial(create_trial(value=1.0, params=done.params, distributions=done.distributions))
    expected = "was completed by another program: it has no accuracy"
    assert expected in refusal(search.export.main, "--study", "mine", "--out", "x.json")


def test_control_characters_of_a_study_do_not_reach_the_terminal(place: Path) -> None:
    study = searched_study("mine", f"sqlite:///{place}", confirm_seeds=0)
    study.set_user_attr("spec", changed_spec(data="\x1b[2J\x07data"))
    said = call(search.status.main, "--study", "mine")
    assert said.exit_code == 0
    assert "\\x1b[2J\\x07data" in said.stdout
    assert "\x1b" not in said.output


def test_a_tokenizer_of_another_model_is_one_line(tiny_model_dir: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_model_dir, tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["zebra"])
    tokenizer.save_pretrained(folder)
    rows = tmp_path / "rows"
    rows.mkdir()
    row = json.dumps({"instruction": "a zebra", "output": "b"}) + "\n"
    (rows / "train.jsonl").write_text(row)
    (rows / "validation.jsonl").write_text(row.replace("a zebra", "c"))
    words = ["--budget", 8, "--model", folder, "--data", rows, "--dry-run"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        line = refusal(search.run.main, *words)
    assert "the tokenizer is another model's, or has tokens of its own" in line
