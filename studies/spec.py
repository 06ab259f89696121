"""Say what makes two searches the same study, as strict JSON."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any

from mola.allocation import Allocation, ExpertBudget
from mola.settings import AdapterSettings, ModelSource, TrainSettings
from studies.strict import decode

FORMAT_VERSION = 1


@dataclass(frozen=True)
class StudySpec:
    """Everything that the objective of an allocation depends on, and the set that is searched.

    Attributes:
        num_layers: Layers of the base model.
        total: Experts over all layers.
        low: Fewest experts in a layer; one number, or one per layer.
        high: Most experts in a layer, likewise.
        model: Where the base model comes from.
        model_fingerprint: Identifies the base model's weights, wherever they lie.
        data: The data set's name, for people.
        data_fingerprint: Identifies the rows as the model sees them.
        prompt_template: How a row becomes a prompt; None is the default.
        max_length: Tokens per row at most.
        adapter: The adapter but its allocation.
        train: Length, batch and optimizer of a trial.
        rungs: Steps at which a trial is evaluated on the way.
        seed: Seed of every trial but the replicates, and of the sampler.
        objective: Unit of the objective, "nats per row" or "nats per output token".
    """

    num_layers: int
    total: int
    low: int | tuple[int, ...]
    high: int | tuple[int, ...]
    model: ModelSource
    model_fingerprint: str
    data: str
    data_fingerprint: str
    prompt_template: str | None
    max_length: int
    adapter: AdapterSettings
    train: TrainSettings
    rungs: tuple[int, ...]
    seed: int
    objective: str

    @property
    def budget(self) -> ExpertBudget:
        """The set of allocations that is searched."""
        return ExpertBudget(self.num_layers, self.total, self.low, self.high)

    @property
    def model_name(self) -> str:
        """The base model's name, for people."""
        return self.model.display_name

    def to_json(self) -> str:
        """Write the spec as one line of JSON, keys in the order of the fields."""
        document = {"format_version": FORMAT_VERSION, **dataclasses.asdict(self)}
        return json.dumps(document, ensure_ascii=False, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> StudySpec:
        """Read a spec that `to_json` wrote.

        Raises:
            ValueError: The text is not JSON, is of another format version, lacks a key, has one
                that is unknown, or has a value that is of another type or out of its range.
        """
        try:
            document = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"the study's spec is not JSON: {error}") from None
        if not isinstance(document, dict):
            raise ValueError(f"the study's spec must be a JSON object, got {document!r:.80}")
        version = document.pop("format_version", None)
        if version != FORMAT_VERSION:
            raise ValueError(
                f"the study's spec has format_version {version!r}, this version of mola-search "
                f"reads {FORMAT_VERSION}; use the version that made the study"
            )
        spec: StudySpec = decode(document, cls, "spec")
        try:
            _ = spec.budget
        except ValueError as error:
            raise ValueError(f"the study's spec contradicts itself: {error}") from None
        return spec

    def differences(self, other: StudySpec) -> list[str]:
        """Name each setting in which another spec asks for a different search.

        The model and the data are compared by their fingerprints, so that a folder may move and
        a revision may be called by another name.
        Gradient checkpointing recomputes the same numbers and is left out; the micro-batch stays
        in, because dropout masks and the balance loss depend on it.

        Args:
            other: The spec that the study was made with; self is the one asked for now.

        Returns:
            Lines like `budget (--budget): 160 here, 128 in the study`; none for equal searches.
        """
        return [
            f"{name}: {_show(here)} here, {_show(there)} in the study"
            for (name, here), (_, there) in zip(_settings(self), _settings(other), strict=True)
            if here != there
        ] + _changed_contents(self, other)


def _settings(spec: StudySpec) -> list[tuple[str, Any]]:
    """List what must agree, under the name and the flag that a user knows."""
    adapter, train, budget = spec.adapter, spec.train, spec.budget
    # Settings that follow from others count only where they were set apart.
    whole = train.micro_batch in (None, train.batch_size)
    usual = train.warmup == dataclasses.replace(train, warmup_steps=None).warmup
    return [
        ("number of layers (--model)", spec.num_layers),
        ("budget (--budget)", spec.total),
        ("fewest experts in a layer (--min-experts, --fix)", _bound(budget.low)),
        ("most experts in a layer (--max-experts, --fix)", _bound(budget.high)),
        ("dtype (--dtype)", spec.model.dtype),
        ("prompt template (--prompt-template)", spec.prompt_template),
        ("longest row in tokens (--max-length)", spec.max_length),
        ("rank (--r)", adapter.r),
        ("lora_alpha (--lora-alpha)", adapter.lora_alpha),
        ("dropout (--lora-dropout)", adapter.lora_dropout),
        ("target modules (--target-modules)", adapter.target_modules),
        ("top_k (--top-k)", adapter.top_k),
        ("balance loss (--router-aux-loss-coef)", adapter.router_aux_loss_coef),
        ("steps (--steps)", train.steps),
        ("batch size (--batch-size)", train.batch_size),
        ("micro-batch (--micro-batch)", None if whole else train.micro_batch),
        ("learning rate (--learning-rate)", train.learning_rate),
        ("warm-up steps", None if usual else train.warmup),
        ("gradient clipping", train.max_grad_norm),
        ("steps of the rungs (--rungs)", spec.rungs),
        ("seed (--seed)", spec.seed),
        ("objective", spec.objective),
    ]


def _bound(bound: int | tuple[int, ...]) -> int | str:
    """Write bounds that differ between layers in run-length form, as they are given."""
    return bound if isinstance(bound, int) else str(Allocation(bound))


def _changed_contents(here: StudySpec, there: StudySpec) -> list[str]:
    """Compare model and data by content, and say whether the name or the content changed."""
    lines = []
    same_model = here.model_fingerprint == there.model_fingerprint
    if not same_model:
        lines.append(_changed("model (--model)", here.model_name, there.model_name))
    # The rows' fingerprint depends on how they are encoded; those differences are named already.
    same_encoding = (
        same_model
        and here.prompt_template == there.prompt_template
        and here.max_length == there.max_length
    )
    if here.data_fingerprint != there.data_fingerprint and (
        same_encoding or here.data != there.data
    ):
        lines.append(_changed("data (--data, --validation-rows)", here.data, there.data))
    return lines


def _changed(what: str, here: str, there: str) -> str:
    if here == there:
        return f"{what}: what is read from {here} is not what it was when the study began"
    return f"{what}: {here} here, {there} in the study"


def _show(value: Any) -> str:
    """Print a setting short enough for a message."""
    if value is None:
        return "the default"
    if isinstance(value, tuple):
        return ",".join(map(str, value)) or "none"
    return f"{value!r:.60}" if isinstance(value, str) else f"{value}"
