"""Saved adapters: old formats, hostile configurations, other base models, a full disk."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel, get_peft_model_state_dict
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from mola.allocation import MAX_EXPERTS
from mola.config import MolaConfig
from mola.identity import NUM_WEIGHTS
from mola.model import detach, get_mola_model, load_mola_model

ASSETS = Path(__file__).parent / "assets"
IDS = torch.tensor([[5, 6, 7, 8, 9, 10]])


@pytest.fixture
def saved(tiny_model: PreTrainedModel, tmp_path: Path) -> Path:
    """A folder with an adapter of the tiny model."""
    config = MolaConfig(experts=(1, 0, 3, 5), r=2, target_modules=["q_proj"])
    model = get_mola_model(tiny_model, config, seed=0)
    model.save_pretrained(tmp_path / "adapter")
    detach(model)
    return tmp_path / "adapter"


def edit(folder: Path, **changes: Any) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def other_weights(base: PreTrainedModel) -> PreTrainedModel:
    torch.manual_seed(1)
    return AutoModelForCausalLM.from_config(base.config)


def test_an_adapter_of_format_1_loads(tiny_model: PreTrainedModel, tmp_path: Path) -> None:
    folder = ASSETS / "adapter_format_1"
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # what it does not record is not complained about
        model = load_mola_model(tiny_model, folder)
    config = model.peft_config["default"]
    assert isinstance(config, MolaConfig)
    assert (config.experts, config.router_aux_loss_variant) == ((2, 0, 1, 3), "per_router")
    weights = get_peft_model_state_dict(model)
    recorded = load_file(folder / "adapter_model.safetensors")
    assert weights.keys() == recorded.keys()
    assert all(torch.equal(weights[k], recorded[k]) for k in weights)
    model.save_pretrained(tmp_path)
    document = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (document["format_version"], document["base_model_type"]) == (2, "llama")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"experts": [1, 0, 3, 10**12]},
            f"experts of layer 3 must be at most {MAX_EXPERTS}, got 1000000000000",
        ),
        ({"experts": [1, 0, 3, MAX_EXPERTS]}, "has 10 rows, not those of 4096 experts of rank 2"),
        ({"experts": [1, MAX_EXPERTS, 3, 5]}, r"missing weights.*layers\.1\..*, for 4096 experts"),
        ({"experts": [1, 0, 3, True]}, "experts of layer 3 must be an integer"),
        ({"experts": [1, 0, 3, 5.0]}, "experts of layer 3 must be an integer"),
        ({"experts": [1, 0, 3, -5]}, "must be at least 0"),
        ({"experts": {"0": 1}}, "experts of layer 0 must be an integer, got '0'"),
        ({"experts": 5}, "experts=5 of the MoLA config must be one number per layer"),
        ({"experts": None}, "needs `experts`"),
        ({"experts": "2x99999999999"}, "more than 10000 layers"),
        ({"r": 10**9}, "r=1000000000 of the MoLA config must be at most 65536 divided by"),
        ({"r": "2"}, "r='2' of the MoLA config must be an integer"),
        ({"r": True}, "r=True of the MoLA config must be an integer"),
        ({"r": 4}, "weights of another shape: .* has 2 rows, not those of 1 experts of rank 4"),
        ({"lora_alpha": "16"}, "lora_alpha='16' of the MoLA config must be positive"),
        ({"lora_alpha": 10**400}, "lora_alpha=1000000.* of the MoLA config must be positive"),
        ({"lora_alpha": float("nan")}, "lora_alpha=nan"),
        ({"lora_dropout": None}, "lora_dropout=None of the MoLA config must be in"),
        ({"top_k": 1.5}, "top_k=1.5"),
        ({"router_aux_loss_coef": float("inf")}, "router_aux_loss_coef=inf"),
        ({"router_aux_loss_variant": ["pooled"]}, "router_aux_loss_variant="),
        ({"target_modules": "q_proj("}, "target_modules='q_proj\\(' of the MoLA config must be"),
        ({"target_modules": "([a-z.]+)+!"}, "must be module names or a regular expression .of at"),
        ({"exclude_modules": "([a-z.]+)+!"}, r"exclude_modules='\(\[a-z.\]\+\)\+!' of the MoLA"),
        ({"modules_to_save": ["lm_head", ".*.*.*!"]}, "modules_to_save=.*at most four unbounded"),
        ({"modules_to_save": ["a)|(([a-z.]+)+!"]}, "modules_to_save=.*must be a list of"),
        ({"target_modules": [1]}, "target_modules=\\[1\\]"),
        ({"target_modules": ["absent"]}, "Target modules .*absent.* not found"),
        ({"modules_to_save": "lm_head"}, "modules_to_save='lm_head' .* must be a list"),
        ({"modules_to_save": ["("]}, r"modules_to_save=\['\('\] of the MoLA config must be"),
        ({"init_seed": "x"}, "init_seed='x'"),
        ({"base_weights": ["x"]}, "base_weights="),
        ({"base_model_name_or_path": 5}, "base_model_name_or_path=5"),
        ({"task_type": "FLYING"}, "Invalid task type"),
        ({"format_version": "1"}, "format_version='1' must be a number from 1"),
        ({"format_version": None}, "format_version=None"),
        ({"format_version": 3}, "is newer than 2, the newest that this version reads"),
        ({"peft_type": None}, "peft_type is None, expected 'MOLA'"),
    ],
)
def test_a_hostile_configuration_is_one_clear_error(
    tiny_model: PreTrainedModel, saved: Path, change: dict[str, Any], message: str
) -> None:
    edit(saved, **change)
    modules = [name for name, _ in tiny_model.named_modules()]
    with pytest.raises(ValueError, match=message) as caught:
        load_mola_model(tiny_model, saved)
    assert len(str(caught.value)) < 600
    assert [name for name, _ in tiny_model.named_modules()] == modules


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "no readable adapter configuration"),
        (b"[" * 100_000, "no readable adapter configuration"),
        (b"\xff\xfe", "no readable adapter configuration"),
        (b"[1]", "peft_type is None"),
    ],
)
def test_a_broken_configuration_is_one_clear_error(
    tiny_model: PreTrainedModel, saved: Path, content: bytes, message: str
) -> None:
    (saved / "adapter_config.json").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        load_mola_model(tiny_model, saved)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.int(), "holds torch.int32, not floating-point numbers"),
        (lambda w: w.to(torch.complex64), "holds torch.complex64, not floating-point numbers"),
        (lambda w: w * float("nan"), "holds numbers that are not finite"),
        (lambda w: torch.zeros(()), "has 0 rows, not those of 1 experts"),
    ],
)
def test_weights_of_a_wrong_kind_are_refused(
    tiny_model: PreTrainedModel, saved: Path, change: Any, message: str
) -> None:
    path = saved / "adapter_model.safetensors"
    weights = load_file(path)
    first = next(key for key in sorted(weights) if "lora_A" in key)
    save_file({**weights, first: change(weights[first]).contiguous()}, path)
    with pytest.raises(ValueError, match=message):
        load_mola_model(tiny_model, saved)


def test_a_configuration_that_points_elsewhere_reads_nothing_there(
    tiny_model: PreTrainedModel, saved: Path
) -> None:
    for place in ("/etc/passwd", "../../../etc", "file:///etc/passwd"):
        edit(saved, base_model_name_or_path=place)
        detach(load_mola_model(tiny_model, saved))


def test_an_adapter_is_not_written_through_a_link(
    tiny_model: PreTrainedModel, saved: Path, tmp_path: Path
) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (saved / "adapter_config.json").unlink()
    (saved / "adapter_config.json").symlink_to(victim)
    model = get_mola_model(tiny_model, MolaConfig(experts=(1, 1, 1, 1), r=2))
    model.save_pretrained(saved)
    assert victim.read_text() == "mine"
    assert not (saved / "adapter_config.json").is_symlink()


def test_weights_that_the_adapter_lacks_or_has_not_are_named(
    tiny_model: PreTrainedModel, saved: Path
) -> None:
    edit(saved, target_modules=["q_proj", "v_proj"])
    with pytest.raises(ValueError, match=r"missing weights, such as .*v_proj\.lora_A"):
        load_mola_model(tiny_model, saved)
    edit(saved, target_modules="all-linear")
    with pytest.raises(ValueError, match=r"missing weights, such as .*k_proj\.lora_A"):
        load_mola_model(tiny_model, saved)
    edit(saved, target_modules=["model.layers.0.self_attn.q_proj"])
    with pytest.raises(ValueError, match=r"6 unexpected weights, such as .*2\.self_attn\.q_proj"):
        load_mola_model(tiny_model, saved)


def test_an_adapter_of_another_architecture_is_refused(
    tiny_model: PreTrainedModel, saved: Path
) -> None:
    shape = tiny_model.config.to_dict()
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
    names += ("num_attention_heads", "num_key_value_heads")
    mistral = AutoModelForCausalLM.from_config(
        AutoConfig.for_model("mistral", pad_token_id=0, **{name: shape[name] for name in names})
    )
    message = r"belongs to a model of type 'llama' \(.*tiny-llama.*\), but this one is 'mistral'"
    with pytest.raises(ValueError, match=message):
        load_mola_model(mistral, saved)
    assert not hasattr(mistral, "peft_config")
    edit(saved, base_model_type=None)
    with pytest.warns(UserWarning, match="has other weights than the one"):
        load_mola_model(mistral, saved)


def test_other_base_weights_get_a_warning(tiny_model: PreTrainedModel, saved: Path) -> None:
    with pytest.warns(UserWarning, match=r"other weights than .*tiny-llama.*: its shapes fit"):
        load_mola_model(other_weights(tiny_model), saved)


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing")
def test_peft_warns_of_other_base_weights_too(tiny_model: PreTrainedModel, saved: Path) -> None:
    with pytest.warns(UserWarning, match="other weights"):
        PeftModel.from_pretrained(other_weights(tiny_model), saved)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_base_model_in_another_dtype_is_the_same(
    tiny_model: PreTrainedModel, saved: Path, dtype: torch.dtype
) -> None:
    base = tiny_model.to(dtype)
    load_mola_model(base, saved)  # a warning would be an error


class Special(torch.Tensor):
    """Stands in for the tensors of quantised or sharded weights."""


@pytest.mark.parametrize("how", ["special", "empty"])
def test_weights_that_cannot_be_read_are_not_compared(
    tiny_model: PreTrainedModel, saved: Path, how: str
) -> None:
    projection = tiny_model.model.layers[0].self_attn.q_proj
    if how == "special":
        special = (projection.weight.detach() * 2).as_subclass(Special)
        projection.weight = torch.nn.Parameter(special, requires_grad=False)
    else:
        projection.weight = torch.nn.Parameter(torch.empty(0), requires_grad=False)
    model = load_mola_model(tiny_model, saved)  # a warning would be an error
    recorded = json.loads((saved / "adapter_config.json").read_text())["base_weights"]
    assert len(recorded) == NUM_WEIGHTS
    assert model.peft_config["default"].base_weights == recorded


def test_one_configuration_serves_several_models(tiny_model: PreTrainedModel) -> None:
    config = MolaConfig(experts=(1, 0, 3, 5), target_modules=["q_proj"])
    for base in (tiny_model, other_weights(tiny_model)):
        get_mola_model(base, config)
    assert config.base_weights is None


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = shutil.which("mount")
    command = [mount or "mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)]
    if mount is None or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("mounting a small file system needs root; the injected error is tested anyway")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_disk_keeps_the_previous_adapter(
    tiny_model: PreTrainedModel, small_disk: Path
) -> None:
    config = MolaConfig(experts=(2, 2, 2, 2), r=8, target_modules=["q_proj", "v_proj"])
    model = get_mola_model(tiny_model, config)
    folder = small_disk / "adapter"
    model.save_pretrained(folder)
    before = {p.name: p.read_bytes() for p in folder.iterdir()}
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(1)
    free = os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize
    (small_disk / "filler").write_bytes(b"x" * max(free - 8192, 0))
    with pytest.raises(OSError, match="the adapter cannot be written: .*No space left on device"):
        model.save_pretrained(folder)
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == before
    (small_disk / "filler").unlink()
    load_mola_model(detach(model), folder)
