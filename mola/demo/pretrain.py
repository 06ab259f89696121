"""Pretrain the built-in demonstration model from scratch: `python -m mola.demo.pretrain --out DIR`.

The model starts shallow and is grown to 32 layers by doubling, which costs a fraction of training
all layers from the start. The settings are `Settings`' defaults.
"""

from __future__ import annotations

import argparse
import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from mola.demo.corpus import score_family, token_losses, training_batches
from mola.demo.muon import Muon
from mola.demo.text import FAMILIES, segments
from mola.demo.tokenizer import MAX_LENGTH, build_tokenizer

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Settings:
    """How the model is pretrained.

    Attributes:
        stages: Layers and optimizer steps of each stage, the shallowest first.
        batch_tokens: Tokens of a step, padding included.
        matrix_rate: Muon's step size, for the weight matrices of the layers.
        other_rate: AdamW's step size, for the embedding and the norms.
        decay: Share of all steps, at the end, in which both fall linearly to zero.
        warmup_steps: Steps at each stage's start in which both rise linearly.
        prompt_weight: Weight in the loss of tokens outside the answers.
        alpaca_share: Share of the passages that are written in Alpaca's shape.
        hidden: Width of the model.
        intermediate: Width of its MLPs.
        heads: Attention heads.
        rope_theta: Base of the rotary embedding; small, because the texts are short.
        vocab_size: Tokens, without the two phrases of Alpaca's template.
        seed: Of the weights and the text.
    """

    stages: tuple[tuple[int, int], ...] = ((8, 4500), (16, 1800), (32, 2200))
    batch_tokens: int = 1024
    matrix_rate: float = 0.007
    other_rate: float = 0.002
    decay: float = 0.5
    warmup_steps: int = 50
    prompt_weight: float = 0.1
    alpaca_share: float = 0.4
    hidden: int = 64
    intermediate: int = 128
    heads: int = 4
    rope_theta: float = 100.0
    vocab_size: int = 496
    seed: int = 0

    @property
    def steps(self) -> int:
        """Steps of all stages together."""
        return sum(steps for _, steps in self.stages)


def pretrain(settings: Settings) -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    """Train a model from scratch on one thread or many; progress goes to the log."""
    rng = Random(settings.seed)  # noqa: S311 - no secrets
    tokenizer = new_tokenizer(rng, settings.vocab_size)
    batches = training_batches(
        rng,
        tokenizer,
        batch_tokens=settings.batch_tokens,
        alpaca_share=settings.alpaca_share,
        prompt_weight=settings.prompt_weight,
    )
    model = new_model(settings, settings.stages[0][0], tokenizer)
    done = 0
    for layers, steps in settings.stages:
        model = grow(model, layers).train()
        optimizers = _optimizers(model, settings)
        start, average = time.perf_counter(), math.nan
        for step in range(steps):
            _set_rates(optimizers, _rate_factor(settings, step, done + step))
            ids, weights = next(batches)
            losses, _ = token_losses(model, ids)
            loss = (losses * weights[:, 1:]).sum() / weights[:, 1:].sum()
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            average = loss.item() if math.isnan(average) else 0.98 * average + 0.02 * loss.item()
            if (step + 1) % 100 == 0 or step + 1 == steps:
                seconds = time.perf_counter() - start
                logger.info(
                    "%d layers  step %d of %d  loss %.4f  %.0f s",
                    layers,
                    step + 1,
                    steps,
                    average,
                    seconds,
                )
        done += steps
    return nn.Module.eval(model), tokenizer


def new_tokenizer(rng: Random, vocab_size: int) -> PreTrainedTokenizerFast:
    """Learn the tokenizer from a sample of the prose."""
    families = list(FAMILIES.values())
    lines = (
        "".join(text for text, _ in segments(rng.choice(families)(rng), alpaca=False))
        for _ in range(20_000)
    )
    return build_tokenizer(lines, vocab_size=vocab_size)


def new_model(
    settings: Settings, layers: int, tokenizer: PreTrainedTokenizerFast
) -> LlamaForCausalLM:
    """Draw a model's weights.

    Every matrix keeps its input's scale, but for those that write to the residual stream: these
    are divided by the square root of twice the final depth, so that depth does not add up.
    """
    torch.manual_seed(settings.seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=settings.hidden,
        intermediate_size=settings.intermediate,
        num_hidden_layers=layers,
        num_attention_heads=settings.heads,
        num_key_value_heads=settings.heads,
        max_position_embeddings=MAX_LENGTH,
        rope_parameters={"rope_type": "default", "rope_theta": settings.rope_theta},
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        initializer_range=1 / math.sqrt(settings.hidden),
    )
    config._attn_implementation = "eager"  # the fastest on a CPU for sequences this short
    model = LlamaForCausalLM(config)
    final_depth = settings.stages[-1][0]
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.div_(math.sqrt(2 * final_depth))
            layer.mlp.down_proj.weight.div_(math.sqrt(2 * final_depth))
    return model


def grow(model: LlamaForCausalLM, layers: int) -> LlamaForCausalLM:
    """Return a deeper model that computes the same.

    Each layer is followed by copies of itself that write nothing to the residual stream yet.

    Args:
        model: Its number of layers divides `layers`.
        layers: Of the model returned.
    """
    old = model.config.num_hidden_layers
    if layers == old:
        return model
    copies, rest = divmod(layers, old)
    assert rest == 0, f"cannot grow {old} layers to {layers}"
    config = LlamaConfig(**{**model.config.to_dict(), "num_hidden_layers": layers})
    config._attn_implementation = model.config._attn_implementation
    deep = LlamaForCausalLM(config)
    weights = {k: v for k, v in model.state_dict().items() if ".layers." not in k}
    for source in range(old):
        for name, value in model.model.layers[source].state_dict().items():
            writes = "o_proj" in name or "down_proj" in name
            for copy in range(copies):
                target = f"model.layers.{source * copies + copy}.{name}"
                weights[target] = torch.zeros_like(value) if writes and copy else value.clone()
    deep.load_state_dict(weights)
    return deep


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """Write a folder that Transformers loads, weights in bfloat16."""
    model.to(torch.bfloat16).save_pretrained(out)  # type: ignore[arg-type]
    tokenizer.save_pretrained(out)


def _optimizers(model: LlamaForCausalLM, settings: Settings) -> list[torch.optim.Optimizer]:
    matrices = [p for p in model.model.layers.parameters() if p.ndim == 2]
    chosen = {id(p) for p in matrices}
    others = [p for p in model.parameters() if id(p) not in chosen]
    adamw = torch.optim.AdamW(others, settings.other_rate, betas=(0.9, 0.98), weight_decay=0.0)
    optimizers = [adamw, Muon(matrices, settings.matrix_rate)]
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["peak"] = group["lr"]
    return optimizers


def _set_rates(optimizers: Sequence[torch.optim.Optimizer], factor: float) -> None:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["peak"] * factor


def _rate_factor(settings: Settings, stage_step: int, step: int) -> float:
    rise = min(1.0, (stage_step + 1) / settings.warmup_steps)
    fall = min(1.0, (settings.steps - step) / (settings.decay * settings.steps))
    return rise * fall


def _parse_stages(text: str) -> tuple[tuple[int, int], ...]:
    stages = []
    for part in text.split():
        layers, steps = part.split("x")
        stages.append((int(layers), int(steps)))
    return tuple(stages)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder to write the model to")
    parser.add_argument(
        "--stages",
        type=_parse_stages,
        default=Settings.stages,
        help="layers x steps of each stage [default: '8x4500 16x1800 32x2200']",
    )
    parser.add_argument("--seed", type=int, default=Settings.seed)
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    model, tokenizer = pretrain(Settings(stages=options.stages, seed=options.seed))
    for family in FAMILIES:
        score = score_family(model, tokenizer, family)
        logger.info("%-10s nll %.3f  accuracy %.3f", family, score.nll, score.accuracy)
    save(model, tokenizer, options.out)


if __name__ == "__main__":
    main()
