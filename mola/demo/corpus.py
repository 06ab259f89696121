"""Turn passages into batches of token ids, and score a model on them family by family."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from mola.demo.text import FAMILIES, WEIGHTS, Family, segments

_POOL = 4096  # passages that are sorted by length together


@dataclass(frozen=True)
class Document:
    """Token ids from begin to end token, and which of them belong to an answer."""

    ids: list[int]
    is_answer: list[bool]


@dataclass(frozen=True)
class Score:
    """A model's score on a family in Alpaca's shape.

    Attributes:
        nll: Nats per answer, its end token included.
        accuracy: Fraction of the answers whose every token is the likeliest one, 0 to 1.
    """

    nll: float
    accuracy: float


def draw_documents(
    rng: Random,
    families: Sequence[str],
    tokenizer: PreTrainedTokenizerFast,
    count: int,
    *,
    alpaca_share: float,
) -> list[Document]:
    """Draw passages and tokenise them.

    Args:
        rng: Source of the draws.
        families: Names of the families to draw from, by their weights.
        tokenizer: The model's.
        count: Documents to draw.
        alpaca_share: Probability of Alpaca's shape, 0 to 1.
    """
    weights = [WEIGHTS[name] for name in families]
    texts: list[str] = []
    owners: list[tuple[int, bool]] = []  # document and is_answer of each text
    shapes: list[bool] = []
    for index in range(count):
        shapes.append(rng.random() < alpaca_share)
        family: Family = FAMILIES[rng.choices(families, weights)[0]]
        for text, is_answer in segments(family(rng), alpaca=shapes[-1]):
            texts.append(text)
            owners.append((index, is_answer))
    assert tokenizer.bos_token_id is not None and tokenizer.eos_token_id is not None
    documents = [Document([tokenizer.bos_token_id], [False]) for _ in range(count)]
    pieces: list[list[int]] = tokenizer(texts, add_special_tokens=False)["input_ids"]
    for ids, (index, is_answer) in zip(pieces, owners, strict=True):
        documents[index].ids.extend(ids)
        documents[index].is_answer.extend([is_answer] * len(ids))
    for document, alpaca in zip(documents, shapes, strict=True):
        document.ids.append(tokenizer.eos_token_id)
        document.is_answer.append(alpaca)  # in prose the full stop ends the answer
    return documents


def pad(
    documents: Sequence[Document], pad_id: int, *, prompt_weight: float
) -> tuple[Tensor, Tensor]:
    """Stack documents of similar length.

    Returns:
        Token ids [B, T] and their weights in the loss [B, T]: 1 in answers, `prompt_weight`
        elsewhere, 0 in the padding.
    """
    length = max(len(document.ids) for document in documents)
    ids = torch.full((len(documents), length), pad_id)
    weights = torch.zeros(len(documents), length)
    for i, document in enumerate(documents):
        size = len(document.ids)
        ids[i, :size] = torch.tensor(document.ids)
        weights[i, :size] = torch.where(torch.tensor(document.is_answer), 1.0, prompt_weight)
    return ids, weights


def training_batches(
    rng: Random,
    tokenizer: PreTrainedTokenizerFast,
    *,
    batch_tokens: int,
    alpaca_share: float,
    prompt_weight: float,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield batches of all families without end, each as `pad` returns it.

    Documents of similar length share a batch; what is left over of a pool is dropped.

    Args:
        rng: Source of the draws.
        tokenizer: The model's.
        batch_tokens: Most tokens of a batch, padding included.
        alpaca_share: Probability of Alpaca's shape, 0 to 1.
        prompt_weight: Weight of tokens outside the answers.
    """
    assert tokenizer.pad_token_id is not None
    while True:
        pool = draw_documents(rng, list(FAMILIES), tokenizer, _POOL, alpaca_share=alpaca_share)
        groups: list[list[Document]] = []
        group: list[Document] = []
        for document in sorted(pool, key=lambda d: len(d.ids)):
            if group and len(document.ids) * (len(group) + 1) > batch_tokens:
                groups.append(group)
                group = []
            group.append(document)
        rng.shuffle(groups)
        for group in groups:
            yield pad(group, tokenizer.pad_token_id, prompt_weight=prompt_weight)


def token_losses(model: LlamaForCausalLM, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return each next token's loss in nats and whether it is the likeliest: [B, T - 1] both."""
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
    losses = F.cross_entropy(logits.transpose(1, 2).float(), ids[:, 1:], reduction="none")
    return losses, logits.argmax(dim=-1) == ids[:, 1:]


@torch.no_grad()
def score_family(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, family: str, *, rows: int = 200
) -> Score:
    """Score a model on fresh rows of a family; always the same rows."""
    assert tokenizer.pad_token_id is not None
    rng = Random(f"score {family}")  # noqa: S311 - no secrets
    documents = draw_documents(rng, [family], tokenizer, rows, alpaca_share=1)
    ids, weights = pad(documents, tokenizer.pad_token_id, prompt_weight=0)
    losses, right = token_losses(model, ids)
    counts = weights[:, 1:] > 0
    return Score(
        nll=float((losses * counts).sum() / rows),
        accuracy=float((right | ~counts).all(dim=1).float().mean()),
    )
