"""Nothing that people can be sent runs code here, and no password gets out."""

from __future__ import annotations

import ast
import importlib
import json
import pickle
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import optuna
import pytest
from click.testing import CliRunner
from optuna.trial import create_trial
from pretend_pool import PretendPool, no_waiting_for_the_disk
from pretend_study import SPEC, run_one, searched_study

import search.export
import search.job
import search.run
import search.status
import studies.storage
from mola.allocation import Allocation, ExpertBudget
from mola.base import load_config, load_model, load_tokenizer
from mola.rows import load_splits
from mola.settings import AdapterSettings, ModelSource
from search.report.write import write_report
from search.sampler import make_sampler
from search.sampler.cma import read_state
from studies.encoding import distributions
from studies.note import study_note
from studies.patient import PatientStorage
from studies.provenance import note_run
from studies.records import SPEC_ATTR

__all__ = ["no_waiting_for_the_disk"]
ROOT = Path(__file__).parent.parent
SOURCES = [p for package in ("mola", "studies", "search") for p in (ROOT / package).rglob("*.py")]
PICKLES = "search/sampler/cma.py"  # reads Optuna's own, by an unpickler that makes nothing else
FORBIDDEN_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__", "unsafe_load", "full_load"}
FORBIDDEN_CALLS |= {"yaml.load", "os.system", "os.popen", "torch.hub.load"}


def weaknesses(tree: ast.AST) -> Iterator[str]:
    """Find what can run code that data brings along."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [alias.name for alias in node.names]
            names += [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
            yield from sorted({name.split(".")[0] for name in names} & FORBIDDEN_MODULES)
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        values = {k.arg: k.value for k in node.keywords}
        if name == "yaml.load" and [ast.unparse(a) for a in node.args][1:] == ["Loader"]:
            continue  # search.config's, made of the safe loader; it has a test of its own
        if name in FORBIDDEN_CALLS or name.rsplit(".", 1)[-1] in {"unsafe_load", "full_load"}:
            yield name
        if name == "torch.load" and not is_true(values.get("weights_only")):
            yield "torch.load without weights_only"
        if is_true(values.get("shell")) or is_true(values.get("allow_pickle")):
            yield f"{name} with shell or allow_pickle"
        if is_true(values.get("trust_remote_code")):
            yield f"{name} with trust_remote_code"


def is_true(value: ast.expr | None) -> bool:
    return isinstance(value, ast.Constant) and value.value is True


def test_no_source_runs_code_that_data_brings_along() -> None:
    found = {
        str(path.relative_to(ROOT)): list(weaknesses(ast.parse(path.read_text(encoding="utf-8"))))
        for path in SOURCES
    }
    assert len(found) > 80
    assert {path: w for path, w in found.items() if w} == {PICKLES: ["pickle"]}


@pytest.mark.parametrize(
    "line",
    [
        "import pickle",
        "from joblib import load",
        "eval(text)",
        "yaml.load(text, yaml.Loader)",
        "yaml.unsafe_load(text)",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "numpy.load(path, allow_pickle=True)",
        "subprocess.run(text, shell=True)",
        "AutoTokenizer.from_pretrained(name, trust_remote_code=True)",
    ],
)
def test_the_scan_finds_a_weakness(line: str) -> None:
    assert list(weaknesses(ast.parse(line)))


EVIL = "from pathlib import Path\nPath({mark!r}).touch()\nfrom transformers import *\n"


@pytest.mark.parametrize("load", [load_config, load_tokenizer, load_model])
def test_code_that_comes_with_a_model_does_not_run(
    load: Callable[[ModelSource], object], tmp_path: Path
) -> None:
    mark = tmp_path / "ran"
    names = ("AutoConfig", "AutoTokenizer", "AutoModelForCausalLM")
    auto_map: dict[str, Any] = dict.fromkeys(names, "evil.Evil")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "e", "auto_map": auto_map}))
    auto_map["AutoTokenizer"] = ["evil.Evil", None]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"auto_map": auto_map}))
    (tmp_path / "evil.py").write_text(EVIL.format(mark=str(mark)))
    with pytest.raises(ValueError, match="it is there, but cannot be loaded") as caught:
        load(ModelSource(str(tmp_path)))
    assert "\n" not in str(caught.value)
    assert not mark.exists()


def test_code_that_comes_with_a_data_set_does_not_run(tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    folder = tmp_path / "rows"
    folder.mkdir()
    for name in ("rows.py", "train.py"):
        (folder / name).write_text(EVIL.format(mark=str(mark)))
    with pytest.raises(ValueError, match="no train file"):
        load_splits(str(folder))
    assert not mark.exists()


class Evil:
    """A pickle of it makes a file when it is read."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.mark,)


def test_a_study_cannot_bring_code_along_as_the_state_of_a_sampler(tmp_path: Path) -> None:
    """Optuna unpickles CMA-ES's optimizer from the attributes of trials."""
    mark, budget = tmp_path / "ran", ExpertBudget(4, 12)
    study = optuna.create_study(sampler=make_sampler("cmaes", budget, 0))
    for _ in range(16):
        trial = study.ask(distributions(budget))
        study.tell(trial, float(trial.params["experts_00"]))
    states = [k for t in study.trials for k in t.system_attrs if k.startswith("cma:optimizer")]
    assert states, "CMA-ES has begun"
    evil = pickle.dumps(Evil(mark)).hex()
    make_sampler("cmaes", budget, 0).check(study)  # type: ignore[attr-defined]
    latest = create_trial(
        value=1.0,
        params=study.trials[-1].params,
        distributions=study.trials[-1].distributions,
        system_attrs={states[0]: evil},
    )
    study.add_trial(latest)
    sampler = make_sampler("cmaes", budget, 0)
    with pytest.raises(ValueError, match=r"cmaes cannot be read: it asks for .*; use another"):
        sampler.check(study)  # type: ignore[attr-defined]
    study.sampler = sampler
    with pytest.raises(ValueError, match="cannot be read"):
        study.ask(distributions(budget))
    assert not mark.exists()


@pytest.mark.parametrize("stored", ["", "zz", "80", "None"])
def test_a_damaged_state_of_a_sampler_is_one_line(stored: str) -> None:
    with pytest.raises(ValueError, match=r"the state|state of the sampler cmaes") as caught:
        read_state(stored)
    assert "\n" not in str(caught.value)


SECRET = "hunter2"
ADDRESSES = [
    f"postgresql://me:{SECRET}@127.0.0.1/db",
    f"postgresql://127.0.0.1/db?user=me&password={SECRET}",
    f"mysql+pymysql://me:x@{SECRET}@127.0.0.1/db",  # an unescaped @ in it
]


@pytest.mark.usefixtures("no_waiting_for_the_disk")
@pytest.mark.parametrize("url", ADDRESSES)
def test_a_password_is_in_no_file_and_no_output(
    url: str,
    tiny_model_dir: Path,
    choices_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The server is an SQLite file, which stands for any database."""
    monkeypatch.chdir(tmp_path)
    server = tmp_path / "server.db"

    def pretend(url: str, **others: Any) -> PatientStorage:
        return PatientStorage(f"sqlite:///{server}", **{**others, "engine_kwargs": {}})

    monkeypatch.setattr(studies.storage, "PatientStorage", pretend)
    monkeypatch.setattr(search.job, "_open_pool", lambda *_: PretendPool())
    report = importlib.import_module("search.report.__main__")
    place = ["--study", "mine", "--storage", url]
    settings = ["--model", str(tiny_model_dir), "--data", str(choices_dir), "--budget", "12"]
    settings += ["--trials", "5", "--steps", "4", "--confirm-seeds", "0", *place]
    said = ""
    for command, words in (
        (search.run.main, settings),
        (search.status.main, place),
        (search.export.main, [*place, "--out", "winner.json"]),
        (report.main, place),
        (search.status.main, ["--study", "other", "--storage", url]),
    ):
        result = CliRunner().invoke(command, words)
        assert result.exit_code == (2 if "other" in words else 0), result.output
        said += result.output
    assert "***" in said, "the place of the study is told"
    assert SECRET not in said
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    names = {"report.html", "report.md", "trials.csv", "allocation.json", "config.toml"}
    assert names | {"winner.json", "server.db"} <= {path.name for path in files}
    assert [path for path in files if SECRET.encode() in path.read_bytes()] == []


@pytest.mark.parametrize("url", [*ADDRESSES, f"postgresql:/me:{SECRET}@h/db", f"a:{SECRET}@h"])
@pytest.mark.parametrize("text", ["{}", "{}\n", "x{}?password={}", "{}&sslpassword={}"])
def test_a_mistyped_address_shows_no_password(url: str, text: str) -> None:
    mistyped = text.replace("{}", url, 1).replace("{}", SECRET)
    assert SECRET not in studies.storage.mask(mistyped)


HOSTILE = "`x` [a](javascript:1) <img src=x onerror=alert(1)> | $\\foo$ **b**\n# c\n<script>"


def test_hostile_names_stay_text_in_reports_and_notes(tmp_path: Path) -> None:
    """Of models, data, prompts, priors, failures and commands; study names cannot be so."""
    study = searched_study()
    adapter = AdapterSettings(target_modules=(HOSTILE,))
    spec = replace(SPEC, model=ModelSource(HOSTILE), data=HOSTILE, prompt_template=HOSTILE)
    spec = replace(spec, adapter=adapter, objective=HOSTILE, model_fingerprint=HOSTILE)
    study.set_user_attr(SPEC_ATTR, spec.to_json())
    note_run(study, HOSTILE, train_rows=1, validation_rows=1, goal=5, replicates=0)
    run_one(study, Allocation([2, 2, 5, 3, 3, 3]), label=f"prior {HOSTILE}")
    run_one(study, Allocation([2, 2, 3, 5, 3, 3]), end="fail")
    html = write_report(study, tmp_path, None)
    page, text = html.read_text("utf-8"), html.with_suffix(".md").read_text("utf-8")
    assert "<img" not in page
    assert "<script" not in page
    outside = [line for line in text.splitlines() if not line.startswith("    ")]
    assert "\\<img src=x onerror=alert(1)\\>" in "\n".join(outside)
    for line in outside:
        assert not line.startswith(("# c", "<"))
        for sign in ("<img", "[a](", "**b", "`x"):
            assert sign not in line.replace("\\" + sign[0], "")
    note = study_note(spec, [HOSTILE])
    assert not set("<>[]`$") & set(note)
