"""MoLA: a mixture of LoRA experts whose number of experts differs from layer to layer.

The names below are imported on first use, so that `import mola` costs no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mola.allocation import Allocation, ExpertBudget
    from mola.config import MolaConfig
    from mola.model import get_mola_model, load_mola_model

_HOMES = {
    "Allocation": "mola.allocation",
    "ExpertBudget": "mola.allocation",
    "MolaConfig": "mola.config",
    "get_mola_model": "mola.model",
    "load_mola_model": "mola.model",
}

__all__ = ["Allocation", "ExpertBudget", "MolaConfig", "get_mola_model", "load_mola_model"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
