"""Some cases of the fuzzer at each run of the tests; `python -m benchmarks.fuzz` runs more."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import PreTrainedModel

from benchmarks.fuzz import Targets, small_model
from mola.base import load_model
from mola.settings import ModelSource

CASES = 25
FIRST = 0


@pytest.fixture(scope="module")
def targets(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Targets:
    model: PreTrainedModel = load_model(ModelSource(str(tiny_model_dir)))
    return Targets(tmp_path_factory.mktemp("fuzz"), model, tiny_model_dir)


NAMES = (
    "adapter",
    "allocation",
    "allocation text",
    "command line",
    "config",
    "prior",
    "rows",
    "spec",
    "store",
    "upstream",
)


def test_each_reader_is_named_here(targets: Targets) -> None:
    assert tuple(targets.all) == NAMES


@pytest.mark.parametrize("target", NAMES)
def test_damaged_input_is_read_or_refused_in_one_line(targets: Targets, target: str) -> None:
    for seed in range(FIRST, FIRST + CASES):
        try:
            targets.case(target, seed)
        except Exception as error:
            raise AssertionError(f"benchmarks.fuzz --target {target!r} --seed {seed}") from error


def test_the_fuzzer_accepts_what_is_not_damaged(
    targets: Targets, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.fuzz.damaged", lambda document, rng: document)
    monkeypatch.setattr("benchmarks.fuzz.torn", lambda data, rng: data)
    for target in ("rows", "allocation", "prior", "spec"):
        assert targets.case(target, 1) == "accepted"


def test_the_fuzzer_notices_an_error_of_another_kind(
    targets: Targets, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(path: Path) -> None:
        raise KeyError("experts")

    monkeypatch.setattr("benchmarks.fuzz.read_allocation_file", broken)
    with pytest.raises(KeyError):
        targets.case("allocation", 0)


def test_the_fuzzers_own_model_is_small(tmp_path: Path) -> None:
    assert small_model(tmp_path).num_parameters() < 100_000
