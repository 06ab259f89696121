"""Define the format of allocation.json."""

from __future__ import annotations

from dataclasses import dataclass

from mola.settings import ModelSource, TrainSettings

FORMAT_VERSION = 1


@dataclass(frozen=True)
class Difference:
    """Objective minus that of uniform, within the seeds that selection did not see.

    Attributes:
        mean: Negative is better than uniform.
        low: Lower end of the interval; None where the seeds do not suffice for one.
        high: Upper end.
        confidence: Probability with which this and all other intervals of the study hold.
        seeds: Number of seeds.
    """

    mean: float
    low: float | None
    high: float | None
    confidence: float
    seeds: int


@dataclass(frozen=True)
class Origin:
    """The study that an allocation comes from, and how it was measured there.

    Attributes:
        name: Name of the study.
        trial: Number of the allocation's trial.
        objective: Unit of the objective; lower is better.
        objective_mean: Mean over the seeds.
        objective_standard_error: Of the mean, from the spread over the seeds; None with one seed.
        seeds: Number of seeds.
        accuracy: Mean fraction of validation rows that are right.
        difference_to_uniform: None where uniform was not run on the same fresh seeds.
        model: Where the base model came from.
        model_fingerprint: Identifies its weights.
        data: Name of the data set.
        data_fingerprint: Identifies its rows.
        prompt_template: How a row became a prompt; None is the default.
        max_length: Tokens per row at most.
        train: How the trial was trained.
        seed: Seed of the study.
    """

    name: str
    trial: int
    objective: str
    objective_mean: float
    objective_standard_error: float | None
    seeds: int
    accuracy: float | None
    difference_to_uniform: Difference | None
    model: ModelSource
    model_fingerprint: str
    data: str
    data_fingerprint: str
    prompt_template: str | None
    max_length: int
    train: TrainSettings
    seed: int


@dataclass(frozen=True)
class AllocationFile:
    """The content of allocation.json, in the order of its keys.

    Attributes:
        format_version: Version of this format.
        base_model: Name of the base model; `study.model` says how to load it.
        num_layers: Number of layers.
        total_experts: Experts over all layers.
        experts_per_layer: Layer 0 first.
        top_k: Experts that a token is sent to; all of a layer's, where it has fewer.
        r: Rank of each expert.
        lora_alpha: The adapter's output is scaled by `lora_alpha / r`.
        lora_dropout: Probability with which an expert's input is dropped in training.
        target_modules: Suffixes of the adapted modules; None is every linear layer of the blocks.
        router_aux_loss_coef: Weight of the balance loss.
        study: Where the allocation comes from.
        versions: Version of Python and of each package, at the time of the export.
        upstream_args: Arguments of the reference implementation (GCYZSL/MoLA) for the same
            adapter; None where it has none, as for a layer without experts.
    """

    format_version: int
    base_model: str
    num_layers: int
    total_experts: int
    experts_per_layer: tuple[int, ...]
    top_k: int
    r: int
    lora_alpha: float
    lora_dropout: float
    target_modules: tuple[str, ...] | None
    router_aux_loss_coef: float
    study: Origin
    versions: dict[str, str]
    upstream_args: str | None
