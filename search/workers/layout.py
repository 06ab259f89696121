"""Decide how many workers share a machine or a cluster, and what each one gets."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

MOST_CPU_WORKERS = 4
"""Each worker holds the whole model, so many cores do not mean as many workers."""

MOST_PER_CORE = 8
"""More workers than so many on a core are a slip of the finger, and fill the memory."""


@dataclass(frozen=True)
class Layout:
    """The workers of a pool, all alike.

    Attributes:
        workers: Number of workers.
        gpus: GPUs of each; a fraction shares one.
        cpus: CPU cores that each reserves.
        threads: Threads that torch may use in each.
    """

    workers: int
    gpus: float
    cpus: float
    threads: int

    @property
    def device(self) -> str:
        """Where a worker puts its model: `cpu`, `cuda`, or `auto` for several GPUs."""
        if self.gpus == 0:
            return "cpu"
        return "auto" if self.gpus > 1 else "cuda"


def plan_layout(
    nodes: Sequence[Mapping[str, float]],
    workers: int | None = None,
    gpus_per_worker: float | None = None,
) -> Layout:
    """Share the nodes' resources out to workers.

    With GPUs: as many workers as fit, one GPU each unless told otherwise. Without: one worker per
    core, at most four, because a small model gains more from a second trial than from a second
    thread, while every worker costs the memory of one model.

    Args:
        nodes: resources of each node, `CPU` and `GPU` as Ray counts them.
        workers: number of workers; None decides by the rule above.
        gpus_per_worker: GPUs of each worker; None is one where there are GPUs.

    Raises:
        ValueError: the workers do not fit.
    """
    cores = max(1, int(sum(node.get("CPU", 0) for node in nodes)))
    gpus = sum(node.get("GPU", 0) for node in nodes)
    share = (1.0 if gpus else 0.0) if gpus_per_worker is None else gpus_per_worker
    if share > 1 and share != int(share):
        raise ValueError(f"--gpus-per-worker {share:g}: use a whole number, or a part of one GPU")
    if workers is not None and workers > MOST_PER_CORE * cores:
        raise ValueError(
            f"--workers {workers}: {cores} cores run at most {MOST_PER_CORE * cores} workers"
        )
    if share == 0:
        count = workers or min(cores, MOST_CPU_WORKERS)
        cpus = _share_of_cores([node.get("CPU", 0) for node in nodes], count)
        return Layout(count, 0, cpus, max(1, int(cpus)))
    fits = sum(_fit(int(node.get("GPU", 0)), share) for node in nodes)
    if fits < (workers or 1):
        raise ValueError(
            f"{workers or 1} workers with {share:g} GPUs each do not fit on {gpus:g} GPUs "
            f"({fits} do); change --workers or --gpus-per-worker"
        )
    count = workers or fits
    return Layout(count, share, 0, max(1, cores // count))


def capacity(nodes: Sequence[Mapping[str, float]], layout: Layout) -> int:
    """Count the workers that nodes hold, on CPUs at most `MOST_CPU_WORKERS` on each.

    Args:
        nodes: As for `plan_layout`.
        layout: What each worker gets.
    """
    if layout.gpus:
        return sum(_fit(int(node.get("GPU", 0)), layout.gpus) for node in nodes)
    fits = (math.floor(node.get("CPU", 0) / layout.cpus + 1e-9) for node in nodes)
    return sum(min(fit, MOST_CPU_WORKERS) for fit in fits)


def follow(layout: Layout, first: int, now: int) -> int:
    """Count the workers that a cluster is to have after nodes have joined or left it.

    Nodes that join add what they hold. Those that leave take nothing along as long as the rest
    holds what was planned, which may be fewer than the first nodes would have held.

    Args:
        layout: As planned for the first nodes.
        first: `capacity` of the first nodes.
        now: `capacity` of the nodes that are there.
    """
    return max(1, min(layout.workers, now), layout.workers + now - first)


def _share_of_cores(nodes: Sequence[float], workers: int) -> float:
    """Find the most cores that each of so many workers can have, none on two nodes."""
    shares = {cores / held for cores in nodes if cores for held in range(1, workers + 1)}
    fair = [
        share
        for share in shares
        if sum(math.floor(cores / share + 1e-9) for cores in nodes) >= workers
    ]
    return max(fair, default=1 / workers)


def _fit(gpus: int, share: float) -> int:
    """Count the workers that a node's GPUs hold; a fraction never spans two of them."""
    if share >= 1:
        return gpus // int(share)
    return gpus * math.floor(1 / share + 1e-9)  # 1 / 0.1 may come out below 10
