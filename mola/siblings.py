"""Let the adapted layers that read the same input, such as q, k and v, share the work on it."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mola.mixture import Gated

if TYPE_CHECKING:
    from mola.layer import MolaLayer

NAMES = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
)
"""What the model families call linear layers of one parent that read the same tensor."""


class _Aside(threading.local):
    """What one forward pass has put aside; another thread's pass has its own."""

    def __init__(self) -> None:
        self.call: tuple[Any, ...] = ()
        self.input: Tensor | None = None
        self.parts: dict[int, Gated] = {}  # by the layer's place


class Siblings:
    """Layers that are expected to be called one after the other with the same tensor.

    The first call computes for all of them, the others find their part. What a layer is called with
    decides: with another tensor than its sibling it computes for itself, and for them, again.

    Not noticed is a change of the weights between two calls with the very same tensor, which no
    pass through a model makes. The siblings' outputs hang on one graph: a `backward` from each by
    itself needs `retain_graph`, and they are checkpointed together or not at all.

    Args:
        layers: At least one.
    """

    def __init__(self, layers: list[MolaLayer]) -> None:
        self.layers = layers
        self._aside = _Aside()

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what one forward pass has put aside."""
        return {"layers": self.layers}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Begin with nothing put aside."""
        self.__init__(state["layers"])  # type: ignore[misc]

    def gated(self, layer: MolaLayer, x: Tensor, adapter: str) -> Gated:
        """Return a layer's part of what `MolaLayer.compute` computes.

        Args:
            layer: One of the siblings.
            x: [..., d_in], its input.
            adapter: Name of an adapter that the layer has.
        """
        place = next((i for i, sibling in enumerate(self.layers) if sibling is layer), None)
        if place is None:  # a replica, as `nn.DataParallel` makes them
            return next(layer.compute([layer], x, adapter))
        call = (
            adapter,
            layer.training,
            torch.is_grad_enabled(),
            x.requires_grad,
            torch.is_autocast_enabled(x.device.type),
            0 if x.is_inference() else x._version,
        )
        aside = self._aside
        if aside.input is not x or aside.call != call or place not in aside.parts:
            members = [i for i, sibling in enumerate(self.layers) if adapter in sibling.lora_A]
            parts = layer.compute([self.layers[i] for i in members], x, adapter)
            aside.input, aside.call, aside.parts = x, call, dict(zip(members, parts, strict=True))
        part = aside.parts.pop(place)
        if not aside.parts:
            aside.input = None  # all are served; do not keep the tensor alive
        return part
