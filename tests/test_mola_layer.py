"""The MoLA layer against a naive reference: one token and one expert at a time, in float64."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from mola.config import MolaConfig
from mola.layer import MolaLayer
from mola.mixture import draw_dropped, drop_, gates
from mola.routing import Routing, RoutingRecord, balance_loss, router_load


def make_layer(
    num_experts: int, top_k: int = 2, d_in: int = 6, d_out: int = 5, r: int = 3, **settings: object
) -> MolaLayer:
    config = MolaConfig(
        experts=(num_experts,), r=r, lora_alpha=7, top_k=top_k, lora_dropout=0.0, init_seed=1,
    )  # fmt: skip
    for name, value in settings.items():
        setattr(config, name, value)
    base = nn.Linear(d_in, d_out).requires_grad_(False)
    layer = MolaLayer(base, "default", config, num_experts, "layers.0.q", Routing()).double()
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        layer.lora_B["default"].weight.normal_(generator=generator)
    return layer


def reference(layer: MolaLayer, x: Tensor, top_k: int, alpha: float = 7, r: int = 3) -> Tensor:
    """Equations 3 and 4 of the paper, written out per token and per expert."""
    A = layer.lora_A["default"].weight
    B = layer.lora_B["default"].weight
    N = A.shape[0] // r
    rows = []
    for token in x.reshape(-1, x.shape[-1]):
        y = layer.base_layer.weight @ token + layer.base_layer.bias
        if N == 1:
            chosen = [(0, 1.0)]
        else:
            z = layer.lora_router["default"].weight @ token
            p = [math.exp(v) / sum(math.exp(u) for u in z.tolist()) for v in z.tolist()]
            best = sorted(range(N), key=lambda e: -p[e])[:top_k]
            chosen = [(e, p[e] / sum(p[i] for i in best)) for e in best]
        for e, s in chosen:
            y = y + s * (alpha / r) * (B[:, e * r : (e + 1) * r] @ (A[e * r : (e + 1) * r] @ token))
        rows.append(y)
    return torch.stack(rows).reshape(*x.shape[:-1], -1)


@pytest.mark.parametrize("num_experts", [1, 2, 5, 8, 16])
@pytest.mark.parametrize("top_k", [1, 2, 3])
def test_layer_equals_the_naive_reference(num_experts: int, top_k: int) -> None:
    layer = make_layer(num_experts, top_k)
    x = torch.randn(2, 7, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    torch.testing.assert_close(layer(x), reference(layer, x, top_k), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("top_k", [1, 2, 3])
def test_gradients_are_those_of_the_formula(top_k: int) -> None:
    layer = make_layer(4, top_k)
    x = torch.randn(3, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    parameters = [p for p in layer.parameters() if p.requires_grad]
    layer(x).square().sum().backward()
    got = [p.grad.clone() for p in parameters if p.grad is not None]
    assert len(got) == len(parameters)
    # the same function, built with plain indexing and differentiated by autograd
    A, B = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    W = layer.lora_router["default"].weight
    total = torch.zeros((), dtype=torch.float64)
    for token in x:
        p = (W @ token).softmax(0)
        best = p.argsort(descending=True)[:top_k]
        y = layer.base_layer(token)
        for e in best.tolist():
            share = p[e] / p[best].sum()
            y = y + share * (7 / 3) * B[:, e * 3 : e * 3 + 3] @ (A[e * 3 : e * 3 + 3] @ token)
        total = total + y.square().sum()
    expected = torch.autograd.grad(total, parameters)
    for mine, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9)


def test_one_expert_equals_peft_lora_of_the_same_rank() -> None:
    layer = make_layer(1)
    model = nn.Sequential(nn.Linear(6, 5))
    model[0].load_state_dict(layer.base_layer.state_dict())
    lora = get_peft_model(model, LoraConfig(r=3, lora_alpha=7, target_modules=["0"])).double()
    with torch.no_grad():
        target = lora.base_model.model[0]
        target.lora_A["default"].weight.copy_(layer.lora_A["default"].weight)
        target.lora_B["default"].weight.copy_(layer.lora_B["default"].weight)
    x = torch.randn(4, 6, dtype=torch.float64)
    torch.testing.assert_close(layer(x), lora(x))


def test_one_expert_has_no_router() -> None:
    assert len(make_layer(1).lora_router) == 0


@given(
    logits=st.lists(
        st.lists(st.sampled_from([-3.0, 0.0, 0.5, 90.0]), min_size=4, max_size=4),
        min_size=1,
        max_size=5,
    ),
    top_k=st.integers(1, 4),
)
@settings(deadline=None)
def test_gates_pick_exactly_top_k_experts_and_sum_to_one(
    logits: list[list[float]], top_k: int
) -> None:
    share = gates(torch.tensor(logits), top_k)
    assert ((share > 0).sum(-1) <= top_k).all()  # ties pick top_k; a far loser may underflow to 0
    torch.testing.assert_close(share.sum(-1), torch.ones(len(logits)))


def test_equal_logits_still_pick_top_k() -> None:
    share = gates(torch.zeros(3, 5), 2)
    assert ((share > 0).sum(-1) == 2).all()
    torch.testing.assert_close(share.max(-1).values, torch.full((3,), 0.5))


def test_dropout_is_not_seen_by_the_router() -> None:
    layer = make_layer(4, lora_dropout=0.0)
    layer.lora_dropout["default"] = nn.Dropout(0.999)
    layer.routing.record = RoutingRecord()
    x = torch.randn(50, 6, dtype=torch.float64)
    layer.train()
    layer(x)
    dropped = layer.routing.record.modules()["layers.0.q"]
    layer.routing.record = RoutingRecord()
    layer.eval()
    layer(x)
    assert layer.routing.record.modules()["layers.0.q"] == dropped


def test_a_fixed_dropout_mask_enters_before_the_experts() -> None:
    layer = make_layer(3).train()
    layer.lora_dropout["default"] = nn.Dropout(0.5)
    x = torch.randn(4, 6, dtype=torch.float64)
    torch.manual_seed(5)
    got = layer(x)
    torch.manual_seed(5)
    mask = drop_(torch.ones_like(x), draw_dropped(x, 0.5)) / 0.5
    share = gates(layer.lora_router["default"](x), 2)
    h = layer.lora_A["default"](x * mask).view(4, 3, 3) * share[..., None] * (7 / 3)
    torch.testing.assert_close(got, layer.base_layer(x) + layer.lora_B["default"](h.flatten(1)))


def test_experts_start_alike_whatever_the_allocation() -> None:
    few, many = make_layer(2), make_layer(5)
    torch.testing.assert_close(
        few.lora_A["default"].weight, many.lora_A["default"].weight[: 2 * 3], rtol=0, atol=0
    )
    torch.testing.assert_close(
        few.lora_router["default"].weight, many.lora_router["default"].weight[:2], rtol=0, atol=0
    )


def test_experts_start_alike_whatever_torchs_defaults() -> None:
    base = nn.Linear(6, 5)
    config = MolaConfig(experts=(3,), init_seed=1)
    usual = MolaLayer(base, "default", config, 3, "layers.0.q", Routing())
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            other = MolaLayer(base, "default", config, 3, "layers.0.q", Routing())
    finally:
        torch.set_default_dtype(default)
    assert torch.equal(usual.lora_A["default"].weight, other.lora_A["default"].weight)


def test_experts_start_apart_from_each_other() -> None:
    A = make_layer(4).lora_A["default"].weight
    assert len({tuple(row.tolist()) for row in A}) == len(A)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_router_runs_in_float32_for_half_precision_inputs(dtype: torch.dtype) -> None:
    layer = make_layer(5).float()
    layer.base_layer.to(dtype)
    x = torch.randn(8, 6).to(dtype)
    output = layer(x)
    assert output.dtype == dtype
    share = gates(x.float() @ layer.lora_router["default"].weight.T, 2)
    h = layer.lora_A["default"](x.float()).view(8, 5, 3) * share[..., None] * (7 / 3)
    mixture = layer.lora_B["default"](h.flatten(1)).to(dtype)
    expected = layer.base_layer(x) + mixture
    torch.testing.assert_close(output, expected)


def test_no_token_at_all_is_fine() -> None:
    assert make_layer(5)(torch.zeros(0, 6, dtype=torch.float64)).shape == (0, 5)


def test_balance_loss_is_one_when_uniform_and_n_when_collapsed() -> None:
    uniform = torch.zeros(4, 4)
    share = torch.eye(4)  # each expert takes one token
    for pooled in (False, True):
        load = router_load(uniform, share, None)
        assert balance_loss([load], pooled=pooled).item() == pytest.approx(1.0)
    collapsed = torch.tensor([[50.0, 0, 0, 0]]).expand(4, 4)
    load = router_load(collapsed, gates(collapsed, 1), None)
    assert balance_loss([load], pooled=False).item() == pytest.approx(4.0)


def test_balance_loss_leaves_padding_out() -> None:
    logits = torch.randn(2, 5, 3)
    mask = torch.tensor([[True] * 5, [True, True, False, False, False]])
    share = gates(logits, 2)
    with_padding = router_load(logits, share, mask)
    without = router_load(logits[mask], share[mask], None)
    torch.testing.assert_close(with_padding, without)


def test_routing_record_counts_tokens_gates_and_entropy() -> None:
    record = RoutingRecord()
    logits = torch.tensor([[0.0, 0.0, -100.0], [0.0, 0.0, -100.0]])
    record.add("m", logits, gates(logits, 2), torch.tensor([True, True]))
    record.add("m", -logits, gates(-logits, 1), torch.tensor([True, False]))
    stats = record.modules()["m"]
    assert stats["load"] == pytest.approx([2 / 3, 2 / 3, 1 / 3])
    assert stats["gate"] == pytest.approx([1 / 3, 1 / 3, 1 / 3])
    assert stats["entropy"] == pytest.approx(2 * math.log(2) / 3, abs=1e-6)


def test_a_layer_that_is_not_linear_is_refused() -> None:
    with pytest.raises(ValueError, match="Embedding is none"):
        MolaLayer(
            nn.Embedding(4, 4), "default", MolaConfig(experts=(2,)), 2, "layers.0.e", Routing()
        )
