"""Turn tokenised records into padded batches, and a model's output into log-probabilities.

Notation: B batch · T tokens, padding included · n target tokens of a batch · V vocabulary.

Batches are padded on the right and no attention mask is passed: a causal model's real tokens
never see what follows them, positions count from 0 in every model family, and attention can take
its fastest path. The head is computed at the positions that predict an answer token, alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mola.model import tuner


@dataclass(frozen=True)
class Batch:
    """Padded token ids and what is to be predicted.

    Attributes:
        input_ids: [B, T].
        predicts: [B, T], true where the next token belongs to the answer.
        real: [B, T], true where the token is no padding.
    """

    input_ids: Tensor
    predicts: Tensor
    real: Tensor

    @property
    def targets(self) -> Tensor:
        """The answer tokens of all rows, [n]."""
        return self.input_ids[:, 1:][self.predicts[:, :-1]]

    @property
    def rows(self) -> Tensor:
        """The row that each answer token belongs to, [n]."""
        return self.predicts.nonzero()[:, 0]


def collate(records: Sequence[Mapping[str, Any]], device: torch.device | str) -> Batch:
    """Pad tokenised records on the right.

    Args:
        records: Each with `input_ids` and `prompt_length`; the answer is what follows the prompt.
        device: Where the batch goes.
    """
    lengths = torch.tensor([len(record["input_ids"]) for record in records])
    prompts = torch.tensor([record["prompt_length"] for record in records])
    width = int(lengths.max())
    input_ids = torch.zeros(len(records), width, dtype=torch.long)
    for row, record in enumerate(records):
        input_ids[row, : lengths[row]] = torch.as_tensor(record["input_ids"], dtype=torch.long)
    position = torch.arange(width)
    real = position < lengths[:, None]  # [B, T]
    predicts = (position >= prompts[:, None] - 1) & (position < lengths[:, None] - 1)
    return Batch(input_ids.to(device), predicts.to(device), real.to(device))


def answer_logits(model: nn.Module, batch: Batch) -> Tensor:
    """Run the model and return its logits at the answer tokens, [n, V], in float32."""
    mask = {} if tuner(model) is None else {"token_mask": batch.real}
    with head_at(model, batch.predicts) as gathered:
        logits: Tensor = model(input_ids=batch.input_ids, use_cache=False, **mask).logits
    if not gathered:
        raise TypeError(f"{type(model).__name__} does not call its head as a module")
    return logits.float()


@contextmanager
def head_at(model: nn.Module, positions: Tensor) -> Iterator[list[bool]]:
    """Make the model compute its logits at the positions alone.

    Args:
        model: With an output embedding, `DistributedDataParallel` or not.
        positions: [B, T], true where logits are wanted.

    Yields:
        A list that has an entry once the head was called: the logits are then [n, V].
    """
    gathered: list[bool] = []

    def pick(head: nn.Module, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        gathered.append(True)
        hidden = arguments[0]  # [B, T, d]
        return (hidden[positions.to(hidden.device)], *arguments[1:])  # [n, d]

    inner: Any = getattr(model, "module", model)  # DistributedDataParallel's
    head = inner.get_output_embeddings()
    handle = head.register_forward_pre_hook(pick)
    try:
        yield gathered
    finally:
        handle.remove()
