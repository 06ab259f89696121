"""Turn a search's settings into a checked plan: model, budget, data, study."""

from __future__ import annotations

import re
import socket
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mola.allocation import ExpertBudget
from mola.settings import DEMO_TASK, AdapterSettings, ModelSource, TrainSettings
from search.bounds import Bound, make_budget
from search.priors.given import Prior, read_priors
from search.priors.named import named_allocations
from studies.spec import StudySpec

if TYPE_CHECKING:
    from mola.data import TaskData
    from search.priors.transfer import Source


CONNECT_SECONDS = 10


@dataclass(frozen=True)
class Settings:
    """The options of `python -m search.run`, under their own names; its help explains them."""

    budget: int
    trials: int
    seed: int
    sampler: str
    pruner: str
    patience: str
    rungs: tuple[int, ...] | None
    finalists: int
    confirm_seeds: int
    min_experts: Bound
    max_experts: Bound | None
    fix: tuple[tuple[int, int], ...]
    prior: tuple[str, ...]
    warm_from: tuple[str, ...]
    model: str | None
    revision: str | None
    dtype: str
    trust_remote_code: bool
    data: str | None
    prompt_template: str | None
    max_length: int
    validation_rows: int
    target_modules: tuple[str, ...] | None
    r: int
    lora_alpha: float
    lora_dropout: float
    top_k: int
    router_aux_loss_coef: float
    steps: int
    batch_size: int
    micro_batch: int | None
    learning_rate: float
    gradient_checkpointing: bool
    workers: int | None
    gpus_per_worker: float | None
    address: str | None
    max_failures: int
    trial_timeout: float | None
    study: str | None
    root: Path
    storage: str | None
    quiet: bool

    @property
    def source(self) -> ModelSource:
        """The base model."""
        return ModelSource(self.model, self.revision, self.dtype, self.trust_remote_code)

    @property
    def adapter(self) -> AdapterSettings:
        """The adapter but its allocation."""
        return AdapterSettings(
            r=self.r,
            lora_alpha=self.lora_alpha,
            lora_dropout=self.lora_dropout,
            target_modules=self.target_modules,
            top_k=self.top_k,
            router_aux_loss_coef=self.router_aux_loss_coef,
        )

    @property
    def train(self) -> TrainSettings:
        """Length, batch and optimizer of a proxy."""
        return TrainSettings(
            steps=self.steps,
            batch_size=self.batch_size,
            micro_batch=self.micro_batch,
            learning_rate=self.learning_rate,
            gradient_checkpointing=self.gradient_checkpointing,
        )


@dataclass(frozen=True)
class Plan:
    """A search that could start.

    Attributes:
        settings: In force, with the study's name, the rungs and the demonstration's defaults.
        spec: What the study is about.
        data: The tokenised rows, without the test split, which no search may read.
        priors: What `--prior` named; the name alone of what is measured when the search starts.
        sources: The searches of `--warm-from`, as far as the study does not know them yet.
    """

    settings: Settings
    spec: StudySpec
    data: TaskData
    priors: tuple[Prior | str, ...]
    sources: tuple[Source, ...] = ()


def with_demo_defaults(settings: Settings, given: Collection[str]) -> Settings:
    """Fit the settings to the built-in model, where that is used and nothing else was asked for.

    Args:
        settings: as parsed.
        given: names of the settings that the person set.
    """
    if settings.model is not None:
        return settings
    from mola.demo import DEFAULTS

    defaults: Mapping[str, Any] = DEFAULTS
    return replace(settings, **{k: v for k, v in defaults.items() if k not in given})


def prepare(settings: Settings) -> Plan:
    """Check everything that can be checked without training, the cheapest first.

    Raises:
        ValueError: a setting is wrong, or model or data are missing or unusable.
    """
    if settings.model is not None and settings.data is None:
        raise ValueError(
            "--model needs --data: a folder or data set id to fine-tune on (only the built-in "
            "model comes with a task)"
        )
    if settings.confirm_seeds == 1:
        raise ValueError("--confirm-seeds 1 gives no interval; use at least 2, or 0 for none")
    name = default_study_name(settings) if settings.study is None else settings.study
    rungs = check_rungs(settings.rungs, settings.steps)
    settings = replace(settings, study=name, rungs=rungs)
    source, adapter, train = settings.source, settings.adapter, settings.train

    from studies.store import storage_url

    storage_url(settings.root, name, settings.storage)
    if settings.address is not None:
        check_reachable(settings.address)

    from mola import base

    budget = _budget(settings, base.num_layers(source))
    priors = read_priors(settings.prior, budget)
    base.check_length(source, settings.max_length)
    data = _load_data(settings)
    base.check_vocabulary(source, data.highest_token)
    spec = StudySpec(
        num_layers=budget.num_layers,
        total=budget.total,
        low=budget.low,
        high=budget.high,
        model=source,
        model_fingerprint=base.model_fingerprint(source),
        data=data.name,
        data_fingerprint=data.fingerprint,
        prompt_template=settings.prompt_template,
        max_length=settings.max_length,
        adapter=adapter,
        train=train,
        rungs=rungs,
        seed=settings.seed,
        objective="nats per row" if data.has_choices else "nats per output token",
    )
    return Plan(settings, spec, data, priors, _read_sources(settings, spec))


def with_budget(plan: Plan, total: int, name: str) -> Plan:
    """Plan the same search with another budget, under another name; nothing is loaded again.

    Raises:
        ValueError: the total is out of the bounds' reach, or a prior does not fit it.
    """
    settings = replace(plan.settings, budget=total, study=name)
    budget = _budget(settings, plan.spec.num_layers)
    spec = replace(plan.spec, total=budget.total, low=budget.low, high=budget.high)
    priors = read_priors(settings.prior, budget)
    return Plan(settings, spec, plan.data, priors, _read_sources(settings, spec))


def check_budgets(settings: Settings, totals: Sequence[int]) -> None:
    """Check that all budgets can be met before the data of any is read.

    Raises:
        ValueError: a total is out of the bounds' reach, or there is no such model.
    """
    from mola import base

    num_layers = base.num_layers(settings.source)
    for total in totals:
        _budget(replace(settings, budget=total), num_layers)


def _budget(settings: Settings, num_layers: int) -> ExpertBudget:
    low, high = settings.min_experts, settings.max_experts
    budget = make_budget(num_layers, settings.budget, low, high, settings.fix)
    settings.adapter.check_rank(max(budget.highs))
    return budget


def _read_sources(settings: Settings, spec: StudySpec) -> tuple[Source, ...]:
    if not settings.warm_from:
        return ()
    from search.priors.transfer import read_sources

    name, root, storage = str(settings.study), settings.root, settings.storage
    return read_sources(settings.warm_from, name, root, storage, spec.objective)


def default_study_name(settings: Settings, *, with_total: bool = True) -> str:
    """Name a study after its model, data and budget, so that the same command finds it again."""
    model = "demo" if settings.model is None else _short_name(settings.model)
    data = [] if settings.data is None else [_short_name(settings.data)]
    text = "-".join([model, *data, *([str(settings.budget)] if with_total else [])])
    return re.sub(r"[^\w.-]+", "-", text).lstrip(".")


def check_rungs(rungs: tuple[int, ...] | None, steps: int) -> tuple[int, ...]:
    """Check the steps of the rungs; None is one rung at half of the steps.

    Raises:
        ValueError: they are not ascending steps before the last.
    """
    if rungs is None:
        return (steps // 2,) if steps >= 2 else ()
    if list(rungs) != sorted(set(rungs)) or any(not 1 <= rung < steps for rung in rungs):
        shown = ",".join(map(str, rungs))
        raise ValueError(f"--rungs {shown}: expected ascending steps from 1 to {steps - 1}")
    return rungs


def check_reachable(address: str) -> None:
    """Find out at once whether somebody answers at an address; Ray would try for minutes.

    Args:
        address: `host:port`; others, such as `auto`, are Ray's to resolve.

    Raises:
        ValueError: nobody answers, or it is none of a cluster.
    """
    from search.workers.ray_runtime import check_address

    check_address(address)
    host, colon, port = address.rpartition(":")
    if not (colon and port.isdecimal() and "/" not in host):
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise ValueError(f"--address {address}: no Ray cluster answers there ({error})") from error


def most_replicates(settings: Settings, budget: ExpertBudget) -> int:
    """Count the trials of the confirmation, if no finalist is a named allocation or a prior."""
    believed = len(settings.prior) + len(settings.warm_from)
    allocations = settings.finalists + len(named_allocations(budget)) + believed
    return settings.confirm_seeds * min(allocations, settings.trials, budget.size())


def _short_name(place: str) -> str:
    """Give the last part of a folder's path or a hub id; `.` is the folder that it stands for."""
    path = Path(place)
    return path.resolve().name if path.exists() else path.name


def _load_data(settings: Settings) -> TaskData:
    from mola.base import load_tokenizer
    from mola.data import encode_splits, load_splits

    name = DEMO_TASK if settings.data is None else _short_name(settings.data)
    splits = load_splits(settings.data, limit_validation=settings.validation_rows)
    splits = {split: rows for split, rows in splits.items() if split != "test"}
    return encode_splits(
        splits,
        load_tokenizer(settings.source),
        prompt_template=settings.prompt_template,
        max_length=settings.max_length,
        name=name,
    )
