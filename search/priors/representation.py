"""More experts where the frozen model tells the rows of the task apart.

For each layer l, h_l(row) is the hidden state that the layer puts out at the last token of the
row's prompt, where the answer is about to be predicted. The score is the mean over all pairs of
rows of 1 - cos(h_l(row), h_l(row')): 0 where all rows look alike, and so where a router has nothing
to tell experts by, 1 where they are orthogonal. Experts are handed out in proportion (see
`search.priors.scores`). With unit vectors u the mean over the pairs of R rows is
1 - (|sum u|^2 - R) / (R (R - 1)), so that no pair is formed.

Source: the idea of LayerMoE (arXiv 2505.22582), which gives new experts to layers in inverse
proportion to the similarity of hidden states between languages; rows take the place of languages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from mola.tuner import find_blocks

ROWS = 256
"""Prompts of the training split that are compared."""
BATCH = 16


@torch.no_grad()
def scores(
    model: PreTrainedModel, prompts: Sequence[Sequence[int]], *, progress: Callable[[int], None]
) -> list[float]:
    """Measure how different the rows are after each layer.

    Args:
        model: the frozen base model.
        prompts: token ids of each row's prompt, without its answer; at least two.
        progress: told the number of each batch that is done.

    Raises:
        ValueError: there are fewer than two prompts.
        FloatingPointError: a hidden state is not finite.
    """
    if len(prompts) < 2:
        raise ValueError("the representations of at least two rows are compared")
    blocks = find_blocks(model)[1]
    sums: list[Tensor | None] = [None] * len(blocks)
    for number, start in enumerate(range(0, len(prompts), BATCH)):
        for layer, states in enumerate(_last_states(model, blocks, prompts[start:][:BATCH])):
            unit = nn.functional.normalize(states.double(), dim=-1).sum(0).cpu()  # [d]
            before = sums[layer]
            sums[layer] = unit if before is None else before + unit
        progress(number)
    rows = len(prompts)
    squares = torch.stack([s.square().sum() for s in sums if s is not None])  # [L]
    if not squares.isfinite().all():
        raise FloatingPointError("a hidden state is not finite")
    different = 1 - (squares - rows) / (rows * (rows - 1))
    values: list[float] = different.clamp(min=0).tolist()
    return values


def _last_states(
    model: PreTrainedModel, blocks: nn.ModuleList, prompts: Sequence[Sequence[int]]
) -> list[Tensor]:
    """Run the prompts and return what each layer puts out at their last tokens, [L] of [B, d].

    Padding is on the right and never seen by a causal model, as in training.
    """
    device = model.get_input_embeddings().weight.device
    assert isinstance(device, torch.device)
    lengths = [len(prompt) for prompt in prompts]
    ids = torch.zeros(len(prompts), max(lengths), dtype=torch.long)
    for row, prompt in enumerate(prompts):
        ids[row, : lengths[row]] = torch.tensor(prompt)
    states: list[Tensor] = []

    def keep(_: nn.Module, __: object, output: Tensor | tuple[Tensor, ...]) -> None:
        hidden = output if isinstance(output, Tensor) else output[0]  # [B, T, d]
        rows = torch.arange(len(lengths), device=hidden.device)
        states.append(hidden[rows, torch.tensor(lengths, device=hidden.device) - 1])

    handles = [block.register_forward_hook(keep) for block in blocks]
    try:
        model.base_model(input_ids=ids.to(device), use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return states
