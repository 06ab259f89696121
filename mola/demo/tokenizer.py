"""Build the built-in model's tokenizer: byte-level BPE learned from the pretraining text.

Nearly every word of that text is one token, and any other text falls back to bytes, so nothing is
unknown. Alpaca's two fixed phrases are one token each: otherwise they would be most of every row.
"""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from mola.demo.text import PREAMBLE, RESPONSE

BOS, EOS, PAD = "<s>", "</s>", "<pad>"
MAX_LENGTH = 256  # positions the model is declared for


def build_tokenizer(lines: Iterable[str], *, vocab_size: int) -> PreTrainedTokenizerFast:
    """Learn a tokenizer.

    A word has the same token wherever it stands: each stretch of text that does not start with a
    space is encoded as if it did, and decoding takes that space away again at a line's start.

    Args:
        lines: Text to learn from.
        vocab_size: Most tokens to have, phrases excluded; 256 are bytes and 3 are special.

    Returns:
        A tokenizer that puts `<s>` in front of a text unless told not to add special tokens.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.ByteLevel(),
            decoders.Replace("\n ", "\n"),
            decoders.Replace(f"{BOS} ", BOS),
            decoders.Strip(" ", 1, 0),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD, BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(lines, trainer)
    tokenizer.add_tokens(
        [
            AddedToken(phrase, normalized=False)
            for phrase in (PREAMBLE, RESPONSE, RESPONSE.rstrip("\n"))
        ]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A",
        pair=f"{BOS} $A {BOS} $B",
        special_tokens=[(BOS, tokenizer.token_to_id(BOS))],
    )
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        model_max_length=MAX_LENGTH,
        clean_up_tokenization_spaces=False,
    )
