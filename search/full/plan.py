"""Turn the options of a retrain and its allocation file into a checked plan."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mola.allocation import Allocation, ExpertBudget
from mola.demo import DEFAULTS
from mola.settings import DEMO_TASK, AdapterSettings, ModelSource, TrainSettings
from search.full.results import Conditions
from search.priors.measure import ALPHALORA, alphalora_scores
from search.priors.named import NAMES, named
from search.priors.scores import allocate

if TYPE_CHECKING:
    from mola.data import TaskData

MAX_LENGTH = 256  # the paper's
LEARNING_RATE = 3e-4  # the paper's
SCORES = "alphalora.json"  # in the folder of the adapter: the model's scores, once measured
EPOCHS = 10  # the paper's
MICRO_BATCH = 8  # the reference implementation's


@dataclass(frozen=True)
class Options:
    """The options of `python -m search.retrain`, under their own names; its help explains them."""

    allocation: Path
    out: Path
    compare: tuple[str, ...]
    seeds: int
    seed: int
    model: str | None
    revision: str | None
    dtype: str | None
    trust_remote_code: bool
    data: str | None
    prompt_template: str | None
    max_length: int | None
    epochs: int
    learning_rate: float | None
    batch_size: int
    micro_batch: int | None
    warmup_steps: int | None
    gradient_checkpointing: bool


@dataclass(frozen=True)
class Plan:
    """What is to be fine-tuned, and how.

    Attributes:
        allocations: By name; the exported one first, then those that it is compared with.
        seeds: Of the fine-tunes of each allocation.
        data: The tokenised rows.
        conditions: Common to all fine-tunes.
    """

    allocations: dict[str, Allocation]
    seeds: tuple[int, ...]
    data: TaskData
    conditions: Conditions


def prepare(options: Options, *, mixed_precision: str, processes: int) -> Plan:
    """Check everything that can be checked without training, the cheapest first.

    Args:
        options: As given.
        mixed_precision: Accelerate's name of it.
        processes: Number of processes.

    Raises:
        ValueError: A file or a setting is wrong, or model or data are missing or unusable.
    """
    from studies.export import read_allocation_file

    if (options.out / "adapter_config.json").exists() and not results_path(options.out).exists():
        raise ValueError(f"{options.out} holds another adapter; choose another --out")
    for text in options.compare:
        if text not in (*NAMES, ALPHALORA) and not Path(text).is_file():
            raise ValueError(
                f"cannot compare with {text}: expected one of {', '.join([*NAMES, ALPHALORA])}, or "
                "an allocation file"
            )
    allocation, document = read_allocation_file(options.allocation)
    study: dict[str, Any] = document.get("study", {})
    source = _source(options, study)
    place = _data_place(options, source, study)
    template = options.prompt_template
    if template is None:
        template = study.get("prompt_template")
    max_length = options.max_length or study.get("max_length") or MAX_LENGTH

    from mola import base

    name = options.allocation.stem
    _check_layers({name: allocation}, base.num_layers(source), source.display_name)
    base.check_length(source, max_length)
    data = _load(source, place, template, max_length)
    base.check_vocabulary(source, data.highest_token)
    allocations = {name: allocation, **_compared(options, allocation, source)}
    _check_layers(allocations, allocation.num_layers, source.display_name)
    adapter = _adapter(document)
    adapter.check_rank(max(max(other.experts) for other in allocations.values()))
    conditions = Conditions(
        experts=allocation.experts,
        seed=options.seed,
        model=source,
        model_fingerprint=base.model_fingerprint(source),
        data=data.name,
        data_fingerprint=data.fingerprint,
        objective="nats per row" if data.has_choices else "nats per output token",
        prompt_template=template,
        max_length=max_length,
        adapter=adapter,
        train=_train(options, source, len(data.train)),
        mixed_precision=mixed_precision,
        processes=processes,
    )
    seeds = tuple(range(options.seed, options.seed + options.seeds))
    return Plan(allocations, seeds, data, conditions)


def results_path(out: Path) -> Path:
    """Give the file that says what a folder's fine-tunes are."""
    return out / "results.json"


def _compared(
    options: Options, allocation: Allocation, source: ModelSource
) -> dict[str, Allocation]:
    """Find the allocations of `--compare`: named ones, scaled to the same total, or files."""
    from studies.export import read_allocation_file

    low = min(1, *allocation.experts)
    budget = ExpertBudget(allocation.num_layers, allocation.total, low)
    found: dict[str, Allocation] = {}
    for text in options.compare:
        if text in NAMES:
            name, other = text, named(text, budget)
        elif text == ALPHALORA:
            name, other = text, allocate(alphalora_scores(source, options.out / SCORES), budget)
        else:
            name, other = Path(text).stem, read_allocation_file(Path(text))[0]
        if name == options.allocation.stem or found.get(name, other) != other:
            raise ValueError(
                f"cannot compare with {text}: another allocation is called {name!r}; rename it"
            )
        if other == allocation or other in [found[n] for n in found if n != name]:
            warnings.warn(f"{text} is not compared: it is no other allocation", stacklevel=2)
            continue
        found[name] = other
    return found


def _source(options: Options, study: dict[str, Any]) -> ModelSource:
    """Take the model from the flags, else from the file.

    A file never decides that code which comes with a model may run.
    """
    stored = study.get("model", {})
    source = ModelSource(
        stored.get("name"), stored.get("revision"), stored.get("dtype", ModelSource.dtype)
    )
    if options.model is not None:
        source = ModelSource(options.model)
    source = replace(source, trust_remote_code=options.trust_remote_code)
    if options.revision is not None:
        source = replace(source, revision=options.revision)
    return source if options.dtype is None else replace(source, dtype=options.dtype)


def _data_place(options: Options, source: ModelSource, study: dict[str, Any]) -> str | None:
    """Say where the rows are; None is the built-in task."""
    if options.data is not None:
        return options.data
    stored = study.get("data", DEMO_TASK if source.name is None else None)
    if stored == DEMO_TASK and source.name is None:
        return None
    told = "" if stored is None else f"; the study's data set is called {stored!r}"
    raise ValueError(f"say by --data where the rows are{told}")


def _adapter(document: dict[str, Any]) -> AdapterSettings:
    """Take the adapter's settings from the file; a list of counts means the paper's."""
    if not document:
        return AdapterSettings()
    names = [name for name in AdapterSettings.__dataclass_fields__ if name != "target_modules"]
    modules = document["target_modules"]
    return AdapterSettings(
        target_modules=None if modules is None else tuple(modules),
        **{name: document[name] for name in names},
    )


def _train(options: Options, source: ModelSource, rows: int) -> TrainSettings:
    """Fill in what depends on the model: the paper's settings, or the demonstration's."""
    micro_batch, learning_rate = options.micro_batch, options.learning_rate
    if source.name is None:
        learning_rate = learning_rate or DEFAULTS["learning_rate"]
    else:
        micro_batch = micro_batch or min(MICRO_BATCH, options.batch_size)
        learning_rate = learning_rate or LEARNING_RATE
    return TrainSettings(
        steps=math.ceil(options.epochs * rows / options.batch_size),
        batch_size=options.batch_size,
        micro_batch=micro_batch,
        learning_rate=learning_rate,
        warmup_steps=options.warmup_steps,
        gradient_checkpointing=options.gradient_checkpointing,
    )


def _check_layers(allocations: dict[str, Allocation], layers: int, model: str) -> None:
    for name, allocation in allocations.items():
        if allocation.num_layers != layers:
            raise ValueError(
                f"the allocation {name!r} has {allocation.num_layers} layers, but the model "
                f"({model}) has {layers}"
            )


def _load(source: ModelSource, place: str | None, template: str | None, length: int) -> TaskData:
    from mola.base import load_tokenizer
    from mola.data import encode_splits, load_splits

    name = DEMO_TASK if place is None else Path(place).resolve().name
    return encode_splits(
        load_splits(place),
        load_tokenizer(source),
        prompt_template=template,
        max_length=length,
        name=name,
    )
