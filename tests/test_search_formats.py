"""The forms of an exported allocation: each is read by what it was written for, or refused."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import optuna
import pytest
import yaml
from click.testing import CliRunner
from peft import PeftConfig
from transformers import PreTrainedModel

import search.export
from mola import MolaConfig, get_mola_model
from mola.allocation import Allocation
from mola.events import Finished
from mola.settings import AdapterSettings, ModelSource
from search import formats
from studies import store
from studies.export import allocation_document, read_allocation_file, upstream_args
from tests.test_studies_export import CONCLUSION, SPEC, UNIFORM, WINNER, _ask


@pytest.fixture
def export(tmp_path: Path, tiny_model_dir: Path) -> Any:
    """Export a study of the tiny model, with changes of its spec."""

    def run(form: str, out: str, **adapter: Any) -> Any:
        changed = replace(SPEC.adapter, **adapter)
        source = ModelSource(str(tiny_model_dir))
        spec = replace(SPEC, adapter=changed, model=source)
        study = store.open_study(
            "it's mine",
            f"sqlite:///{tmp_path}/study.db",
            spec,
            sampler=optuna.samplers.RandomSampler(),
            pruner=optuna.pruners.NopPruner(),
        )
        for allocation in (UNIFORM, WINNER):
            event = Finished(40, 2.0, 0.5, 0.1, 3.0, 1.0)
            store.complete(study, _ask(study, allocation, "search", 0), event)
        store.set_conclusion(study, CONCLUSION)
        document = allocation_document(study)
        formats.write(document, form, tmp_path / out)
        return document

    return run


def test_yaml_holds_the_same_as_json(export: Any, tmp_path: Path) -> None:
    export("json", "a.json")
    export("yaml", "a.yaml")
    read = yaml.safe_load((tmp_path / "a.yaml").read_text(encoding="utf-8"))
    assert read == json.loads((tmp_path / "a.json").read_text(encoding="utf-8"))
    assert read_allocation_file(tmp_path / "a.json")[0] == WINNER


@pytest.mark.timeout(300)  # loads torch in a process of its own
def test_the_program_attaches_the_adapter(export: Any, tmp_path: Path) -> None:
    export("python", "attach.py", target_modules=None, top_k=1)
    code = f"exec(open({str(tmp_path / 'attach.py')!r}).read()); c = model.peft_config['default']\n"
    code += "print(c.experts, c.r, c.lora_alpha, c.lora_dropout, c.top_k)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[-1] == "(1, 2, 2, 3) 8 16.0 0.05 1"
    assert lines[-2].startswith("trainable params: ")


def test_the_program_for_the_built_in_model_names_no_folder_of_this_machine() -> None:
    source = {"name": None, "revision": None, "dtype": "auto"}
    origin = {"trial": 1, "name": "mine", "seed": 0, "model": source}
    numbers = {"r": 8, "lora_alpha": 16, "lora_dropout": 0.05, "top_k": 2}
    document = {
        "study": origin,
        "experts_per_layer": [1, 3],
        "total_experts": 4,
        "num_layers": 2,
        "target_modules": None,
        "router_aux_loss_coef": 0,
        **numbers,
    }
    text = formats.as_python(document)
    compile(text, "attach.py", "exec")
    assert "from_pretrained(MODEL_DIR)" in text


def test_peft_reads_the_configuration_of_a_fresh_adapter(
    export: Any, tmp_path: Path, tiny_model: PreTrainedModel
) -> None:
    export("peft", "adapter", lora_alpha=32)
    assert [p.name for p in (tmp_path / "adapter").iterdir()] == ["adapter_config.json"]
    config = PeftConfig.from_pretrained(str(tmp_path / "adapter"))
    assert isinstance(config, MolaConfig)
    assert (config.allocation, config.lora_alpha) == (WINNER, 32)
    assert config.base_model_name_or_path == tiny_model.name_or_path
    assert get_mola_model(tiny_model, config).peft_config["default"].experts == WINNER.experts


def test_upstream_arguments_are_those_of_the_document(export: Any, tmp_path: Path) -> None:
    document = export("upstream", "args.txt")
    text = (tmp_path / "args.txt").read_text()
    assert text == document["upstream_args"] + "\n"
    words = shlex.split(text)
    assert words[words.index("--number_experts") + 1] == "1,2,2,3"


def test_what_a_form_cannot_express_is_refused_with_the_reason(export: Any, tmp_path: Path) -> None:
    document = export("json", "a.json")
    document["upstream_args"] = upstream_args(Allocation([0, 8]), AdapterSettings())
    with pytest.raises(ValueError, match="at least one expert into each layer"):
        formats.write(document, "upstream", tmp_path / "args.txt")
    (tmp_path / "study.db").unlink()
    with pytest.raises(ValueError, match="LLaMA's linear layers alone, not dense"):
        export("upstream", "args.txt", target_modules=("q_proj", "dense"))
    (tmp_path / "study.db").unlink()
    with pytest.raises(ValueError, match=r"one balance loss, of coefficient 0\.001"):
        export("upstream", "args.txt", router_aux_loss_coef=0.01)
    assert not (tmp_path / "args.txt").exists()
    (tmp_path / "study.db").unlink()
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="--format peft writes a folder, and .*file is a file"):
        export("peft", "file")


def test_the_command_offers_the_forms_that_there_are(tmp_path: Path) -> None:
    assert search.export.FORMATS == formats.FORMATS
    words = ["--study", "x", "--out", str(tmp_path / "a"), "--format", "onnx"]
    result = CliRunner().invoke(search.export.main, words)
    assert result.exit_code == 2
    assert "'onnx' is not one of 'json', 'yaml', 'python', 'upstream', 'peft'" in result.stderr
