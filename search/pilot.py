"""Measure early what a search will be able to tell from noise.

The confirmation runs the named allocations on fresh seeds, the first few of them whatever has been
found. To run these at the beginning costs nothing more, and says how noisy the proxies are before
all others are spent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import optuna

from mola.allocation import Allocation
from search.conclude import CONFIDENCE, fresh_seeds, named_spread
from search.priors.named import named_allocations
from search.race import BLOCKS
from search.updates import Ended, Note, Update
from studies import store
from studies.records import NAMED
from studies.spec import StudySpec
from studies.stats import resolution


class Pilot:
    """The named allocations on the fresh seeds that everybody runs on.

    Args:
        study: where they are enqueued.
        spec: what the study is about.
        finalists: number of allocations that will be confirmed beside them.
        confirm_seeds: number of fresh seeds; without any there is no pilot.
        notify: told once how much noise there is, and what it will hide.
    """

    def __init__(
        self,
        study: optuna.Study,
        spec: StudySpec,
        *,
        finalists: int,
        confirm_seeds: int,
        notify: Callable[[Update], None],
    ) -> None:
        self._study = study
        self._spec = spec
        self._named = named_allocations(spec.budget)
        self._seeds = fresh_seeds(spec, min(BLOCKS, confirm_seeds))
        self._confirmed = len(self._named) + finalists
        self._confirm_seeds = confirm_seeds
        self._notify = notify
        self._over = True

    def begin(self) -> None:
        """Go on from where the study stands; the named allocations themselves are enqueued."""
        records = store.records(self._study)
        own = [r for r in records if r.seed == self._spec.seed and r.state == "COMPLETE"]
        self._enqueue({r.allocation for r in own if r.allocation in self._named})
        self._over = not (self._seeds and self._is_open(store.records(self._study)))

    def hear(self, update: Update) -> None:
        """Enqueue a named allocation that has finished again; say what is known after the last."""
        if self._over or not isinstance(update, Ended) or update.job.allocation not in self._named:
            return
        if update.state == "COMPLETE" and update.label.startswith(NAMED):
            self._enqueue([update.job.allocation])
        records = store.records(self._study)
        if not self._is_open(records):
            self._over = True
            self._tell(records)

    def _enqueue(self, allocations: Iterable[Allocation]) -> None:
        for allocation in sorted(allocations):
            for seed in self._seeds:
                store.enqueue(self._study, allocation, label=store.REPLICATE, seed=seed)

    def _is_open(self, records: Sequence[store.TrialRecord]) -> bool:
        seeds = {self._spec.seed, *self._seeds}
        return any(r.allocation in self._named and r.seed in seeds and not r.ended for r in records)

    def _tell(self, records: Sequence[store.TrialRecord]) -> None:
        found = named_spread(records, self._spec, self._confirm_seeds)
        if found is None:
            return
        seeds, unit = self._confirm_seeds, self._spec.objective
        apart = f"{found.signal:.4f} beside it" if found.signal else "no more than it explains"
        noise = f"noise of one proxy: {found.noise:.4f} {unit}"
        self._notify(Note(f"{noise}; the named allocations differ by {apart}"))
        if seeds > 1:
            half = resolution(found.noise, self._confirmed, seeds, confidence=CONFIDENCE)
            self._notify(
                Note(
                    f"differences to uniform will be known to about +-{half:.4f} "
                    f"({CONFIDENCE:.0%}, {seeds} fresh seeds); more --confirm-seeds narrow that"
                )
            )
