"""Compare the time and memory of training steps: `python -m benchmarks.layer --model FOLDER`.

Each round runs every variant once, and ratios are taken within a round, so that a busy machine
slows both sides: the tables print their median over the rounds. First come the linear layers of
one block (forward and backward), then the whole model (forward, backward and optimizer),
then the memory that a step needs beyond the model and its adapter, each in a process of its own.
`frozen` is the base model's forward and backward alone: the floor of any adapter.
"""

from __future__ import annotations

import argparse
import copy
import multiprocessing
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers import PreTrainedModel

from benchmarks.variants import variants
from mola import siblings
from mola.allocation import Allocation, ExpertBudget
from mola.base import load_model
from mola.layer import linear_shape
from mola.settings import ModelSource
from mola.tuner import find_blocks, linear_suffixes

OURS = "MoLA (ours)"
Step = Callable[[], None]


def model_step(model: nn.Module, batch: Tensor) -> Step:
    """Return one training step on a batch, [B, T] token ids: all but the clipping of gradients."""
    model.train()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-5, fused=True) if trained else None

    def step() -> None:
        model(input_ids=batch, labels=batch, use_cache=False).loss.backward()
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()

    return step


def layers_step(layers: Sequence[nn.Module], x: Tensor) -> Step:
    """Return a forward and backward pass of layers that read the same x, [B, T, d_in]."""
    with torch.no_grad():
        grads = [torch.randn_like(layer.train()(x)) for layer in layers]

    def step() -> None:
        torch.autograd.backward([layer(x) for layer in layers], grads)
        x.grad = None
        for layer in layers:
            layer.zero_grad()

    return step


def timed(steps: dict[str, Step], rounds: int, wait: Step) -> dict[str, list[float]]:
    """Run each step once a round, in an order that moves on; return seconds per round."""
    names = list(steps)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for number in range(-1, rounds):  # the first round warms up
        for name in names[number % len(names) :] + names[: number % len(names)]:
            wait()
            start = time.perf_counter()
            steps[name]()
            wait()
            if number >= 0:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def table(title: str, seconds: dict[str, list[float]]) -> None:
    """Print each variant's milliseconds, and ours as a multiple of it."""
    print(f"\n{title}\n{'variant':<22}{'ms':>10}{'variant / ours':>16}{'over frozen':>13}")
    for name, values in seconds.items():
        ratio = statistics.median(v / o for v, o in zip(values, seconds[OURS], strict=True))
        over = statistics.median(v / f - 1 for v, f in zip(values, seconds["frozen"], strict=True))
        print(
            f"{name:<22}{1e3 * statistics.median(values):>10.1f}{ratio:>16.2f}{over:>+13.0%}",
            flush=True,
        )


def peak_bytes(name: str, source: ModelSource, device: str, shape: tuple[int, int]) -> int:
    """Return what a step needs beyond the model, the adapter and the optimizer's state, in bytes.

    On a GPU the allocator's count; else the growth of the process's resident memory at its peak.
    """
    model = load_model(source, device)
    adapted = variants(allocation_for(model))[name](model)
    batch = make_batch(model, shape)
    step = model_step(adapted, batch)
    step()
    if device.startswith("cuda"):
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        step()
        return torch.cuda.max_memory_allocated(device) - before
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    before = _status("VmRSS")
    step()
    return _status("VmHWM") - before


def _status(field: str) -> int:
    text = Path("/proc/self/status").read_text(encoding="ascii")
    return 1024 * int(text.split(f"{field}:")[1].split()[0])


def make_batch(model: PreTrainedModel, shape: tuple[int, int]) -> Tensor:
    """Draw token ids, [B, T]."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, model.config.vocab_size, shape, generator=generator)
    return ids.to(model.device)


def groups(model: PreTrainedModel) -> list[tuple[str, ...]]:
    """Return the linear layers of a block, those together that read the same tensor."""
    found: dict[tuple[str, ...], tuple[str, ...]] = {}
    for suffix in linear_suffixes(find_blocks(model)[1]):
        parent, _, name = suffix.rpartition(".")
        alike = next((names for names in siblings.NAMES if name in names), (name,))
        key = (parent, *alike)
        found[key] = (*found.get(key, ()), suffix)
    return list(found.values())


def allocation_for(model: PreTrainedModel) -> Allocation:
    """Return 5 experts on average with 2 to 8 from the first layer to the last, as 2468 has."""
    num_layers = model.config.num_hidden_layers
    return ExpertBudget(num_layers, 5 * num_layers, 2, 8).project(
        [2 + 2 * (4 * i // num_layers) for i in range(num_layers)]
    )


def main() -> None:
    """Measure and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", help="folder of a model; default: the built-in one")
    parser.add_argument("--dtype", default="auto", help="of the frozen weights (default: auto)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batch", type=int, nargs=2, default=(4, 96), metavar=("ROWS", "TOKENS"))
    parser.add_argument("--rounds", type=int, default=9, help="steps of each variant (default: 9)")
    parser.add_argument("--only", nargs="+", help="variants by a part of their names")
    options = parser.parse_args()
    source, shape = ModelSource(options.model, dtype=options.dtype), tuple(options.batch)
    models, allocation = {}, None
    first = load_model(source, options.device)
    allocation = allocation_for(first)
    for name, attach in variants(allocation).items():
        if not options.only or any(part in name for part in (*options.only, OURS, "frozen")):
            models[name] = attach(_twin(first))
    batch = make_batch(first, shape)
    print(
        f"{source.display_name}, experts {allocation}, batch {shape[0]}x{shape[1]}, "
        f"{first.dtype}, {options.device}, {torch.get_num_threads()} threads"
    )
    wait = torch.cuda.synchronize if options.device.startswith("cuda") else lambda: None
    block = find_blocks(first)[1][0]
    for suffixes in groups(first):
        d_in = linear_shape(block.get_submodule(suffixes[0]))[0]
        x = torch.randn(*shape, d_in, device=options.device, dtype=first.dtype, requires_grad=True)
        steps = {
            name: layers_step([_middle(model).get_submodule(suffix) for suffix in suffixes], x)
            for name, model in models.items()
        }
        table(f"one block's {', '.join(suffixes)}", timed(steps, 5 * options.rounds, wait))
    steps = {name: model_step(model, batch) for name, model in models.items()}
    table("whole model, a training step", timed(steps, options.rounds, wait))
    print(f"\n{'memory of a step':<22}{'MiB':>10}{'variant / ours':>16}")
    spawn = multiprocessing.get_context("spawn")
    peaks = {}
    for name in [OURS, *(name for name in models if name != OURS)]:
        with spawn.Pool(1) as pool:
            peaks[name] = pool.apply(peak_bytes, (name, source, options.device, shape))
        print(f"{name:<22}{peaks[name] / 2**20:>10.0f}{peaks[name] / peaks[OURS]:>16.2f}")


def _twin(model: PreTrainedModel) -> PreTrainedModel:
    """Return another model with the same weights in the same memory."""
    return copy.deepcopy(model, {id(p): p for p in model.parameters()})


def _middle(model: nn.Module) -> nn.Module:
    inner = model.get_base_model() if isinstance(model, PeftModel) else model
    blocks = find_blocks(inner)[1]
    return blocks[len(blocks) // 2]


if __name__ == "__main__":
    main()
