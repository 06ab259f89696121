"""Optuna's CMA-ES, which keeps its state in the study, without trusting what the study holds.

Optuna pickles the optimizer into a trial's attributes, and unpickles it from there at the next ask.
A pickle can run any code, and a study is a file that people send each other. So the state is read
here by an unpickler that makes nothing but the optimizer and its arrays.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

import optuna
from optuna.study import Study
from optuna.trial import FrozenTrial

_ALLOWED = {
    "CMA": ("cmaes._cma",),
    "dtype": ("numpy",),
    "ndarray": ("numpy",),
    "_reconstruct": ("numpy._core.multiarray", "numpy.core.multiarray"),
    "scalar": ("numpy._core.multiarray", "numpy.core.multiarray"),
}


class CmaEsSampler(optuna.samplers.CmaEsSampler):
    """Optuna's sampler, which runs no code that a study brings along."""

    def check(self, study: Study) -> None:
        """Find out at the beginning of a search whether the state in its study can be read.

        Raises:
            ValueError: it cannot.
        """
        self._restore_optimizer(study.get_trials(deepcopy=False))

    def _restore_optimizer(self, completed_trials: list[FrozenTrial]) -> Any:
        """Read the state of the latest trial that has one; see `read_state`."""
        for trial in reversed(completed_trials):
            stored = {
                key: value
                for key, value in trial.system_attrs.items()
                if key.startswith(self._attr_key_optimizer)
            }
            if stored:
                parts = [stored.get(f"{self._attr_key_optimizer}:{i}") for i in range(len(stored))]
                return read_state("".join(map(str, parts)))
        return None


def read_state(stored: str) -> Any:
    """Read a pickled optimizer.

    Args:
        stored: hexadecimal.

    Raises:
        ValueError: it is no such pickle, or would make anything else.
    """
    try:
        return _Unpickler(io.BytesIO(bytes.fromhex(stored))).load()
    except Exception as error:  # whatever a wrong pickle leads to
        raise ValueError(
            f"the study's state of the sampler cmaes cannot be read: {error}; use another --sampler"
        ) from error


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """Give what an optimizer is made of, and nothing else."""
        if module not in _ALLOWED.get(name, ()):
            raise ValueError(f"it asks for {module}.{name}")
        return super().find_class(module, name)
