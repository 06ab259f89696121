"""Derive something from each trial once, however often all of them are asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

from optuna.trial import FrozenTrial

T = TypeVar("T")


class OncePerTrial(Generic[T]):
    """Apply a function to the trials of one study, anew only to those that have changed.

    Optuna's storages never write to a trial that they gave; a trial that changes becomes another
    object, so that the same object means the same trial.

    Args:
        derive: What to do with a trial; depends on nothing else.
    """

    def __init__(self, derive: Callable[[FrozenTrial], T]) -> None:
        self._derive = derive
        self._known: dict[int, tuple[FrozenTrial, T]] = {}

    def __call__(self, trials: Iterable[FrozenTrial]) -> list[T]:
        """Give what the function makes of each trial, in their order."""
        results = []
        for trial in trials:
            known = self._known.get(trial._number)
            if known is None or known[0] is not trial:
                known = self._known[trial._number] = (trial, self._derive(trial))
            results.append(known[1])
        return results
