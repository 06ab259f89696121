"""What PEFT's users expect of any method: targets, modules to save, disabling, generation."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import PeftModel, get_peft_model
from torch import Tensor, nn
from transformers import GemmaConfig, GemmaForCausalLM, PreTrainedModel

from mola.config import MolaConfig
from mola.model import detach, get_mola_model, load_mola_model

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing")
IDS = torch.tensor([[5, 6, 7, 8, 9, 10]])
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
MLP = ["gate_proj", "up_proj", "down_proj"]
EXPERTS = (1, 0, 3, 5)


def config(**settings: object) -> MolaConfig:
    return MolaConfig(experts=EXPERTS, r=2, init_seed=0, **settings)  # type: ignore[arg-type]


def shake(model: nn.Module) -> None:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.5, generator=generator)


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        result: Tensor = model(input_ids=IDS).logits
    return result


@pytest.mark.parametrize(
    ("targets", "expected"),
    [
        (["q_proj", "v_proj"], {(layer, n) for layer in (0, 2, 3) for n in ("q_proj", "v_proj")}),
        (["self_attn.o_proj"], {(layer, "o_proj") for layer in (0, 2, 3)}),
        (["model.layers.2.mlp.up_proj"], {(2, "up_proj")}),
        (r".*layers\.[023]\.mlp\.(up|down)_proj",
         {(layer, n) for layer in (0, 2, 3) for n in ("up_proj", "down_proj")}),
        (r".*\.3\..*k_proj", {(3, "k_proj")}),
        ("all-linear", {(layer, n) for layer in (0, 2, 3) for n in ATTENTION + MLP}),
        (None, {(layer, n) for layer in (0, 2, 3) for n in ATTENTION + MLP}),
    ],
)  # fmt: skip
def test_target_modules_are_read_as_peft_reads_them(
    tiny_model: PreTrainedModel, tmp_path: Path, targets: object, expected: set[tuple[int, str]]
) -> None:
    model = get_mola_model(tiny_model, config(target_modules=targets))
    trained = {n for n, p in model.named_parameters() if p.requires_grad and "lora_A" in n}
    assert {(int(n.split(".")[4]), n.split(".")[6]) for n in trained} == expected
    shake(model)
    model.eval()
    before = logits(model)
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(load_mola_model(detach(model), tmp_path)), before)


def test_excluded_modules_are_left_out(tiny_model: PreTrainedModel) -> None:
    model = get_mola_model(tiny_model, config(exclude_modules=MLP))
    trained = [n for n, p in model.named_parameters() if p.requires_grad]
    assert trained
    assert not any("mlp" in name for name in trained)


def test_targets_in_layers_without_experts_alone_are_refused(tiny_model: PreTrainedModel) -> None:
    with pytest.raises(ValueError, match="no layer with an expert has a module"):
        get_mola_model(tiny_model, config(target_modules=["model.layers.1.mlp.up_proj"]))
    with pytest.raises(ValueError, match="no expert at all"):
        get_mola_model(tiny_model, MolaConfig(experts=(0, 0, 0, 0)))
    assert not hasattr(tiny_model, "peft_config")


def test_modules_to_save_are_trained_saved_loaded_and_detached(
    tiny_model: PreTrainedModel, tmp_path: Path
) -> None:
    before = logits(tiny_model)
    weights = {k: v.clone() for k, v in tiny_model.state_dict().items()}
    modules = [name for name, _ in tiny_model.named_modules()]
    settings = config(target_modules=["q_proj"], modules_to_save=["lm_head"])
    model = get_mola_model(tiny_model, settings).train()
    trained = [n for n, p in model.named_parameters() if p.requires_grad and "lora_" not in n]
    assert trained == ["base_model.model.lm_head.modules_to_save.default.weight"]
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)
    for _ in range(3):
        model(input_ids=IDS, labels=IDS).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    head = model.base_model.model.lm_head.modules_to_save["default"].weight
    assert not torch.equal(head, weights["lm_head.weight"])
    model.eval()
    after = logits(model)
    model.save_pretrained(tmp_path)
    base = detach(model)
    assert [name for name, _ in base.named_modules()] == modules
    assert all(torch.equal(weights[k], v) for k, v in base.state_dict().items())
    assert torch.equal(logits(base), before)
    loaded = load_mola_model(base, tmp_path)
    assert torch.equal(logits(loaded), after)
    assert torch.equal(logits(PeftModel.from_pretrained(detach(loaded), tmp_path)), after)


def test_a_failed_attachment_takes_modules_to_save_off_too(tiny_model: PreTrainedModel) -> None:
    modules = [name for name, _ in tiny_model.named_modules()]
    settings = config(target_modules=["model.layers.1.mlp.up_proj"], modules_to_save=["lm_head"])
    with pytest.raises(ValueError, match="no layer with an expert"):
        get_mola_model(tiny_model, settings)
    assert [name for name, _ in tiny_model.named_modules()] == modules


def test_disable_adapter_gives_the_base_model(tiny_model: PreTrainedModel) -> None:
    before = logits(tiny_model)
    model = get_mola_model(tiny_model, config()).eval()
    shake(model)
    adapted = logits(model)
    assert not torch.equal(adapted, before)
    with model.disable_adapter():
        assert torch.equal(logits(model), before)
    assert torch.equal(logits(model), adapted)


@pytest.mark.parametrize("penalty", [False, True])
def test_generation_with_a_cache_equals_generation_without(
    tiny_model: PreTrainedModel, penalty: bool
) -> None:
    coefficient = 0.1 if penalty else 0.0  # off outside of training, whatever it is
    model = get_mola_model(tiny_model, config(router_aux_loss_coef=coefficient)).eval()
    shake(model)
    padded = torch.tensor([[0, 0, 5, 6, 7], [8, 9, 10, 11, 12]])
    mask = (padded > 0).long()
    outputs = [
        model.generate(
            input_ids=padded, attention_mask=mask, max_new_tokens=12, do_sample=False,
            eos_token_id=None, use_cache=use_cache,
        )
        for use_cache in (True, False)
    ]  # fmt: skip
    assert outputs[0].shape == (2, 17)
    assert torch.equal(outputs[0], outputs[1])
    with model.disable_adapter():
        plain = model.generate(
            input_ids=padded, attention_mask=mask, max_new_tokens=12, do_sample=False,
            eos_token_id=None,
        )  # fmt: skip
    assert not torch.equal(outputs[0], plain)


def test_get_peft_model_equals_get_mola_model(tiny_model: PreTrainedModel, tmp_path: Path) -> None:
    ours = get_mola_model(tiny_model, config())
    shake(ours)
    expected = logits(ours.eval())
    theirs = get_peft_model(detach(ours), config())
    assert isinstance(theirs, PeftModel)
    shake(theirs)
    assert torch.equal(logits(theirs.eval()), expected)
    theirs.save_pretrained(tmp_path)
    assert torch.equal(logits(load_mola_model(theirs.base_model.unload(), tmp_path)), expected)


def test_a_loaded_adapter_is_trained_on_only_if_asked(
    tiny_model: PreTrainedModel, tmp_path: Path
) -> None:
    model = get_mola_model(tiny_model, config())
    model.save_pretrained(tmp_path)
    count = sum(p.numel() for p in model.parameters() if p.requires_grad)
    frozen = load_mola_model(detach(model), tmp_path)
    assert not any(p.requires_grad for p in frozen.parameters())
    assert not frozen.training
    trained = load_mola_model(detach(frozen), tmp_path, is_trainable=True)
    assert sum(p.numel() for p in trained.parameters() if p.requires_grad) == count


@pytest.mark.parametrize("name", ["merge_and_unload", "merge_adapter"])
def test_merging_says_why_not_and_changes_nothing(tiny_model: PreTrainedModel, name: str) -> None:
    model = get_mola_model(tiny_model, config()).eval()
    shake(model)
    before = logits(model)
    message = "each token is routed to experts of its own, so there is no single weight difference"
    with pytest.raises(ValueError, match=message):
        getattr(model, name)()
    assert torch.equal(logits(model), before)


def test_gemma_7b_has_the_published_number_of_parameters(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with torch.device("meta"):
        base = GemmaForCausalLM(GemmaConfig())  # the defaults are Gemma-7B
        model = get_mola_model(base, MolaConfig(experts=(5,) * 28))
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert trained == 131_174_400
    model.print_trainable_parameters()
    everything = 8_537_680_896 + trained
    assert capsys.readouterr().out == (
        f"trainable params: {trained:,} || all params: {everything:,} || "
        f"trainable%: {100 * trained / everything:.4f}\n"
    )


def test_a_single_expert_counts_without_its_idle_router() -> None:
    with torch.device("meta"):
        base = GemmaForCausalLM(GemmaConfig())
        model = get_mola_model(base, MolaConfig(experts=(1,) * 28))
    # the paper counts (892,928 + 44,032) per layer: LoRA's weights and a router without effect
    assert sum(p.numel() for p in model.parameters() if p.requires_grad) == 28 * 892_928


def test_a_second_adapter_of_another_allocation_can_be_loaded_and_chosen(
    tiny_model: PreTrainedModel, tmp_path: Path
) -> None:
    saved, expected = {}, {}
    for name, experts in (("a", EXPERTS), ("b", (0, 4, 1, 0))):
        model = get_mola_model(tiny_model, MolaConfig(experts=experts, r=2, init_seed=len(saved)))
        shake(model)
        saved[name] = tmp_path / name
        expected[name] = logits(model.eval())
        model.save_pretrained(saved[name])
        detach(model)
    model = load_mola_model(tiny_model, saved["a"])
    model.load_adapter(str(saved["b"]), adapter_name="b")
    assert torch.equal(logits(model.eval()), expected["a"])
    model.set_adapter("b")
    # PEFT puts a second adapter's weights elsewhere in memory, on which MKL's rounding depends
    torch.testing.assert_close(logits(model.eval()), expected["b"], rtol=1e-4, atol=1e-4)
    model.set_adapter("default")
    model.delete_adapter("b")
    assert torch.equal(logits(model.eval()), expected["a"])
