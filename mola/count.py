"""Count what an adapter trains, from the model's shapes alone."""

from __future__ import annotations

from mola.config import MolaConfig
from mola.model import get_mola_model
from mola.settings import AdapterSettings, ModelSource
from mola.tuner import find_blocks
from mola.weights import skeleton


def parameters_per_expert(source: ModelSource, adapter: AdapterSettings) -> tuple[int, ...]:
    """Count the trainable parameters of one expert in each layer, with its share of the routers.

    The model is built without memory for its weights. An allocation has the sum of its counts times
    these numbers, which is how the paper counts (LLaMA-2-7B: 660,224 in every layer): the router
    of a layer with one expert counts, although it has nothing to decide and is not made.

    Raises:
        ValueError: There is no such model, or it has no layers that can be adapted.
    """
    base = skeleton(source)
    _, blocks = find_blocks(base)
    modules = None if adapter.target_modules is None else list(adapter.target_modules)
    config = MolaConfig(experts=(2,) * len(blocks), r=adapter.r, target_modules=modules)
    _, adapted = find_blocks(get_mola_model(base, config).get_base_model())
    return tuple(
        sum(p.numel() for p in block.parameters() if p.requires_grad) // 2 for block in adapted
    )
