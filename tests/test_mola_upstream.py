"""Adapters of the reference implementation, written here by a naive module in its layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from mola.config import MolaConfig
from mola.model import detach, get_mola_model, load_mola_model
from mola.upstream import convert, load_upstream_adapter, main

IDS = torch.tensor([[5, 6, 7, 8, 9, 10], [11, 12, 13, 14, 15, 16]])
TARGETS = ["q_proj", "v_proj", "down_proj"]
EXPERTS = (1, 2, 3, 5)


class NaiveMixture(nn.Module):
    """A linear layer with a list of experts, each a pair of linear layers, and a router."""

    def __init__(self, base: nn.Linear, num_experts: int, r: int, scaling: float) -> None:
        super().__init__()
        self.base, self.scaling = base, scaling
        self.top_k = min(2, num_experts)
        d_in, d_out = base.in_features, base.out_features
        self.router = nn.ModuleDict({"router": nn.Linear(d_in, num_experts, bias=False)})
        names = [f"default_{e}" for e in range(num_experts)]
        self.lora_A = nn.ModuleDict({n: nn.Linear(d_in, r, bias=False) for n in names})
        self.lora_B = nn.ModuleDict({n: nn.Linear(r, d_out, bias=False) for n in names})

    def forward(self, x: Tensor) -> Tensor:
        y = self.base(x).flatten(0, 1)
        for t, token in enumerate(x.flatten(0, 1)):
            p = self.router["router"](token).softmax(0)
            values, picks = p.topk(self.top_k)
            for value, e in zip(values / values.sum(), picks.tolist(), strict=True):
                expert = self.lora_B[f"default_{e}"](self.lora_A[f"default_{e}"](token))
                y[t] += value * self.scaling * expert
        return y.view(*x.shape[:-1], -1)


def write(base: PreTrainedModel, folder: Path, changes: dict[str, Any] | None = None) -> Tensor:
    """Train nothing, but write a checkpoint in the reference's layout; return its logits."""
    torch.manual_seed(0)
    wrapped: dict[str, NaiveMixture] = {}
    for name, module in list(base.named_modules()):
        if name.endswith(tuple(TARGETS)):
            parent, _, child = name.rpartition(".")
            layer = int(name.split(".")[2])
            wrapped[name] = NaiveMixture(module, EXPERTS[layer], r=2, scaling=8)
            setattr(base.get_submodule(parent), child, wrapped[name])
    with torch.no_grad():
        logits: Tensor = base(IDS).logits
    tensors = {
        f"base_model.model.{key}".replace(".default", ""): value
        for key, value in base.state_dict().items()
        if "lora_" in key or "router" in key
    }
    for name, module in wrapped.items():
        parent, _, child = name.rpartition(".")
        setattr(base.get_submodule(parent), child, module.base)
    folder.mkdir()
    torch.save(tensors, folder / "adapter_model.bin")
    document = {
        "base_model_name_or_path": base.name_or_path, "bias": "none", "fan_in_fan_out": False,
        "inference_mode": True, "init_lora_weights": True, "layers_pattern": None,
        "layers_to_transform": None, "lora_alpha": 16, "lora_dropout": 0.05,
        "modules_to_save": None, "peft_type": "LORA", "r": [2] * 4, "revision": None,
        "target_modules": TARGETS, "task_type": "CAUSAL_LM", **(changes or {}),
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(document))
    return logits


def change_weights(folder: Path, changes: dict[str, Tensor | None]) -> None:
    tensors = torch.load(folder / "adapter_model.bin", weights_only=True)
    for key, tensor in changes.items():
        full = f"base_model.model.model.layers.{key}"
        tensors = {k: v for k, v in tensors.items() if k != full}
        if tensor is not None:
            tensors[full] = tensor
    torch.save(tensors, folder / "adapter_model.bin")


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        result: Tensor = model(IDS).logits
    return result


def test_an_imported_adapter_gives_the_logits_of_the_reference(
    tiny_model: PreTrainedModel, tmp_path: Path
) -> None:
    plain = logits(tiny_model)
    expected = write(tiny_model, tmp_path / "theirs")
    assert not torch.allclose(expected, plain)
    config, _ = load_upstream_adapter(tmp_path / "theirs")
    assert (config.experts, config.r, config.top_k) == (EXPERTS, 2, 2)
    assert sorted(config.target_modules or []) == sorted(TARGETS)
    convert(tmp_path / "theirs", tmp_path / "ours")
    model = load_mola_model(tiny_model, tmp_path / "ours")
    torch.testing.assert_close(logits(model), expected, rtol=1e-4, atol=1e-4)


def test_half_precision_checkpoints_become_float32(
    tiny_model: PreTrainedModel, tmp_path: Path
) -> None:
    write(tiny_model, tmp_path / "theirs")
    path = tmp_path / "theirs" / "adapter_model.bin"
    torch.save({k: v.half() for k, v in torch.load(path, weights_only=True).items()}, path)
    _, weights = load_upstream_adapter(tmp_path / "theirs")
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}


def test_export_and_import_give_the_same_adapter(
    tiny_model: PreTrainedModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = MolaConfig(experts=EXPERTS, r=2, target_modules=TARGETS, init_seed=0)
    model = get_mola_model(tiny_model, config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(generator=torch.Generator().manual_seed(0))
    model.save_pretrained(tmp_path / "ours")
    expected = logits(model)
    ours, theirs, again = (str(tmp_path / name) for name in ("ours", "theirs", "again"))
    assert main([ours, theirs]) == 0
    assert main([theirs, again]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == f"{theirs}: 11 experts, 1 2 3 5, in the reference implementation's form"
    assert printed[1] == f"{again}: 11 experts, 1 2 3 5, in this project's form"
    assert sorted(p.name for p in Path(theirs).iterdir()) == [
        "adapter_config.json", "adapter_model.bin",
    ]  # fmt: skip
    assert torch.equal(logits(load_mola_model(detach(model), again)), expected)


def test_the_exported_layout_is_the_references(tiny_model: PreTrainedModel, tmp_path: Path) -> None:
    write(tiny_model, tmp_path / "theirs")
    convert(tmp_path / "theirs", tmp_path / "ours")
    convert(tmp_path / "ours", tmp_path / "back")
    first, second = (
        torch.load(tmp_path / name / "adapter_model.bin", weights_only=True)
        for name in ("theirs", "back")
    )
    assert first.keys() == second.keys()
    idle = {key for key in first if ".layers.0." in key and "router" in key}
    assert len(idle) == 3
    assert all(torch.equal(first[key], second[key]) for key in first.keys() - idle)
    assert all(second[key].shape == first[key].shape and not second[key].any() for key in idle)
    document = json.loads((tmp_path / "back" / "adapter_config.json").read_text())
    assert document["r"] == [2, 2, 2, 2]
    assert sorted(document["target_modules"]) == sorted(TARGETS)


Q = "1.self_attn.q_proj"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({f"{Q}.lora_B_1.weight": None}, "layers.1.self_attn.q_proj has no whole set .*: B1"),
        ({f"{Q}.lora_A_1.weight": None}, "q_proj has no whole set .*surplus: B1"),
        ({f"{Q}.router.router.weight": None}, "q_proj has no whole set .*: router"),
        ({f"{Q}.router.router.weight": torch.zeros(3, 16)}, "q_proj has no whole .*another router"),
        ({f"{Q}.lora_A_0.weight": torch.zeros(3, 16)}, r"the experts have ranks \[2, 3\]"),
        ({f"{Q}.lora_C_0.weight": torch.zeros(2, 2)}, "lora_C_0.weight is no weight of an expert"),
        ({f"{Q}.lora_A_0.weight": torch.zeros(2)}, "lora_A_0.weight is no weight of an expert"),
        ({"7.mlp.up_proj.router.router.weight": torch.zeros(1, 16),
          "7.mlp.up_proj.lora_A_0.weight": torch.zeros(2, 16),
          "7.mlp.up_proj.lora_B_0.weight": torch.zeros(32, 2)}, "layer 4 has no experts"),
        ({f"{Q}.lora_A_0.weight": torch.zeros(2, 8)}, "q_proj has experts of different widths"),
        ({f"{Q}.lora_B_0.weight": torch.zeros(8, 2)}, "q_proj has experts of different widths"),
        ({"99999999999.mlp.up_proj.lora_A_0.weight": torch.zeros(2, 16)}, "is no weight of an exp"),
        ({f"{Q}.router.router.weight": torch.zeros(1, 16), f"{Q}.lora_A_1.weight": None,
          f"{Q}.lora_B_1.weight": None}, "experts, other modules of its layer have not"),
    ],
)  # fmt: skip
def test_weights_that_do_not_fit_together_are_refused(
    tiny_model: PreTrainedModel, tmp_path: Path, changes: dict[str, Tensor | None], message: str
) -> None:
    write(tiny_model, tmp_path / "theirs")
    change_weights(tmp_path / "theirs", changes)
    with pytest.raises(ValueError, match=f"adapter_model.bin: .*{message}"):
        load_upstream_adapter(tmp_path / "theirs")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"r": [2, 2, 4, 2]}, r"says r=\[2, 2, 4, 2\], but 4 layers have rank 2"),
        ({"r": 2}, "says r=2, but"),
        ({"peft_type": "IA3"}, "peft_type is 'IA3', expected 'LORA'"),
        ({"bias": "all"}, "trained biases cannot be taken over"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save is set"),
        ({"lora_alpha": "x"}, "lora_alpha='x' of the MoLA config"),
    ],
)
def test_configurations_that_cannot_be_taken_over_are_refused(
    tiny_model: PreTrainedModel, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    write(tiny_model, tmp_path / "theirs", changes)
    with pytest.raises(ValueError, match=message):
        load_upstream_adapter(tmp_path / "theirs")


class Danger:
    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (Path("harm"),))


def test_code_in_a_checkpoint_does_not_run(
    tiny_model: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tiny_model, tmp_path / "theirs")
    monkeypatch.chdir(tmp_path)
    torch.save({"a": Danger()}, tmp_path / "theirs" / "adapter_model.bin")
    with pytest.raises(ValueError, match="adapter_model.bin: cannot be read"):
        load_upstream_adapter(tmp_path / "theirs")
    assert not (tmp_path / "harm").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"experts": [1, 2]}, "adapter_config.json has 2 layers"),
        ({"experts": [3, 3, 3, 3]}, "has no 3 experts of rank 2"),
    ],
)
def test_an_adapter_of_ours_that_contradicts_itself_is_not_converted(
    tiny_model: PreTrainedModel, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    config = MolaConfig(experts=EXPERTS, r=2, target_modules=TARGETS)
    get_mola_model(tiny_model, config).save_pretrained(tmp_path / "ours")
    path = tmp_path / "ours" / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(ValueError, match=message):
        convert(tmp_path / "ours", tmp_path / "theirs")
    assert not (tmp_path / "theirs").exists()


def test_a_mistake_on_the_command_line_is_one_line_and_status_2(
    tiny_model: PreTrainedModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    frozen = MolaConfig(experts=(1, 0, 2, 2), r=2, target_modules=TARGETS)
    get_mola_model(tiny_model, frozen).save_pretrained(tmp_path / "ours")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    new = str(tmp_path / "new")
    for arguments, message in (
        ([str(tmp_path / "absent"), new], "no readable adapter configuration"),
        ([str(tmp_path / "ours"), new], "has no layers without experts"),
        ([str(tmp_path / "ours"), str(tmp_path / "full")], "it exists already; name a new folder"),
        ([str(tmp_path / "ours"), new, "--top-k", "many"], "invalid int value: 'many'"),
        ([str(tmp_path / "ours")], "the following arguments are required: target"),
    ):
        assert main(arguments) == 2
        error = capsys.readouterr().err
        assert error.startswith("Error: ")
        assert message in error
        assert error.count("\n") == 1
    assert not (tmp_path / "new").exists()
    assert not list(tmp_path.glob(".converting*"))
