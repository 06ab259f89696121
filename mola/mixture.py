"""Compute the gated low-rank products of a layer's experts, without a loop over the experts.

Notation: S tokens · M modules that read the same input, such as q, k and v · N experts of each ·
K = min(top_k, N) · r rank of an expert · d_in features.

With the experts' A stacked to [N * r, d_in] and their B to [d_out, N * r], a module's mixture is
`B (g ⊙ (A (m ⊙ x)))`, where m is the dropout mask and g repeats each expert's gate r times and is
zero outside the token's top K. This file computes all but the product with B, for all modules that
read x at once: one product with their A, one with their routers. The backward pass is written out,
because what autograd would keep of every module, the dropped input and copies of the experts'
outputs, costs less to compute again than to keep.

Source: MoLA, arXiv 2402.08562, equations 3 and 4. The softmax over all experts, cut to the top K
and divided by its sum, equals the softmax over the top K logits, which is what is computed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class Gated(NamedTuple):
    """What the experts of M modules make of their common input.

    Attributes:
        products: [S, M, N * r], the experts' low-rank products times their gates.
        logits: [S, M, N], router outputs, at least float32; None with one expert.
        gates: [S, M, N], each expert's share of each token, without gradient; None with one expert.
    """

    products: Tensor
    logits: Tensor | None
    gates: Tensor | None


def gates(logits: Tensor, top_k: int) -> Tensor:
    """Return each expert's share of each token.

    Args:
        logits: [..., N], router outputs in float32.
        top_k: Experts that a token is sent to.

    Returns:
        [..., N]: zero outside the top k; each row sums to 1.
    """
    if top_k >= logits.shape[-1]:
        return logits.softmax(dim=-1)
    top, index = logits.topk(top_k, dim=-1)  # [..., K], descending
    weight = (top - top[..., :1]).exp()  # a softmax over so few is slow
    return torch.zeros_like(logits).scatter_(-1, index, weight / weight.sum(-1, keepdim=True))


def draw_dropped(x: Tensor, p: float) -> Tensor:
    """Draw which elements a dropout drops, each with probability p and on its own.

    On a CPU, a Bernoulli number per element costs as much as the experts' products. There the gaps
    between dropped elements are drawn instead, which are geometric: about p numbers per element.

    Args:
        x: Of the wanted shape and device.
        p: In (0, 1).

    Returns:
        Ascending positions in `x.flatten()`, int64, on a CPU; else a mask like x.
    """
    if x.device.type != "cpu":
        return torch.empty_like(x, dtype=torch.bool).bernoulli_(p)
    size = x.numel()
    expected = int(size * p + 8 * math.sqrt(size * p)) + 16  # more are needed once in 1e15 times
    positions = torch.empty(0, dtype=torch.int64, device=x.device)
    while len(positions) == 0 or int(positions[-1]) < size:
        drawn = torch.rand(expected, dtype=torch.float32, device=x.device)
        gaps = drawn.neg_().log1p_().mul_(1 / math.log1p(-p)).to(torch.int64).add_(1)
        start = int(positions[-1]) if len(positions) else -1
        positions = torch.cat([positions, gaps.cumsum(0).add_(start)])
    return positions[: int(torch.searchsorted(positions, size))]


def drop_(x: Tensor, dropped: Tensor) -> Tensor:
    """Set elements to zero in place, as `draw_dropped` chose them; x is contiguous."""
    if dropped.dtype == torch.bool:
        return x.masked_fill_(dropped, 0)
    x.view(-1).index_fill_(0, dropped, 0)
    return x


def gated_products(
    x: Tensor,
    A: Sequence[Tensor],
    routers: Sequence[Tensor],
    *,
    top_k: int,
    scale: float,
    dropped: Tensor | None = None,
) -> Gated:
    """Run the first half of the mixtures of M modules.

    Args:
        x: [S, d_in].
        A: Of each module, [N * r, d_in].
        routers: Of each module, [N, d_in], at least float32; none with one expert.
        top_k: Experts that a token is sent to.
        scale: Factor of the gates.
        dropped: Elements of the experts' input that are zero; the routers see all of x.
    """
    return Gated(*_GatedProducts.apply(x, dropped, top_k, scale, len(A), *A, *routers))  # type: ignore[no-untyped-call]


class _GatedProducts(torch.autograd.Function):
    """`scale * g ⊙ (A (m ⊙ x))` with the router's logits, and their gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        dropped: Tensor | None,
        top_k: int,
        scale: float,
        modules: int,
        *weights: Tensor,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        A, router = _stack(weights[:modules]), _stack(weights[modules:])
        assert A is not None
        h = (_without(x, dropped, A.dtype) @ A.t()).view(len(x), modules, len(A) // modules)
        logits = share = None
        if router is not None:
            logits = x.to(router.dtype) @ router.t()
            logits = logits.view(len(x), modules, len(router) // modules)
            share = gates(logits, top_k)
            ctx.mark_non_differentiable(share)
        ctx.save_for_backward(x, dropped, h, share, *weights)
        ctx.scale, ctx.modules = scale, modules
        return _gate(h, share, scale), logits, share

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, grad_logits: Tensor | None, _: Any) -> tuple[Any, ...]:
        x, dropped, h, share, *weights = ctx.saved_tensors
        A, router = _stack(weights[: ctx.modules]), _stack(weights[ctx.modules :])
        assert A is not None
        with torch.autocast(x.device.type, enabled=False):
            grad_h = _gate(grad, share, ctx.scale).flatten(1)  # [S, M * N * r]
            grad_A = grad_h.t() @ _without(x, dropped, A.dtype)
            grads = list(grad_A.chunk(ctx.modules))
            grad_x = None
            if ctx.needs_input_grad[0]:
                grad_x = grad_h @ A
                if dropped is not None:
                    drop_(grad_x, dropped)
            if router is not None:
                assert grad_logits is not None
                per_expert = _by_expert(grad * h, share).sum(-1) * ctx.scale  # [S, M, N]
                mean = (share * per_expert).sum(-1, keepdim=True)
                # the softmax over the chosen alone: its gradient is zero where the gate is
                through = (grad_logits + share * (per_expert - mean)).flatten(1)  # [S, M * N]
                grads += (through.t() @ x.to(router.dtype)).chunk(ctx.modules)
                if grad_x is not None:
                    grad_x = _add_product(grad_x, through, router)
        return (None if grad_x is None else grad_x.to(x.dtype), *[None] * 4, *grads)


def _stack(weights: Sequence[Tensor]) -> Tensor | None:
    """Stack the modules' weights; None if there are none."""
    if len(weights) > 1:
        return torch.cat(tuple(weights))
    return weights[0] if weights else None


def _without(x: Tensor, dropped: Tensor | None, dtype: torch.dtype) -> Tensor:
    if dropped is None:
        return x.to(dtype)
    return drop_(x.to(dtype, copy=True, memory_format=torch.contiguous_format), dropped)


def _gate(h: Tensor, share: Tensor | None, scale: float) -> Tensor:
    """Multiply each expert's r columns of h, [S, M, N * r], by its gate and the scale."""
    if share is None:
        return h * scale
    factor = (share * scale).to(h.dtype).unsqueeze(-1)  # [S, M, N, 1]
    return (_by_expert(h, share) * factor).flatten(2)


def _by_expert(h: Tensor, share: Tensor) -> Tensor:
    return h.view(*share.shape, h.shape[-1] // share.shape[-1])  # [S, M, N, r]


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> Tensor:
    if total.dtype == left.dtype:
        return total.addmm_(left, right)
    return total + (left @ right).to(total.dtype)
