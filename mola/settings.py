"""Hold the settings of a fine-tune as plain data.

No torch here: the command line, the study's record and the workers exchange these objects, and
`dataclasses.asdict` turns each into JSON.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

DEMO_MODEL = "built-in demonstration model"
DEMO_TASK = "built-in task"
MAX_RANK = 65_536  # of a layer's experts together, so that a wrong file cannot fill the memory
DTYPES = ("auto", "float32", "bfloat16", "float16")


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


@dataclass(frozen=True)
class ModelSource:
    """Name a frozen base model and how it is loaded.

    Attributes:
        name: Hugging Face id or local folder; None is the built-in demonstration model.
        revision: Branch, tag or commit on the hub; None is the hub's default.
        dtype: Dtype of the frozen weights, one of `DTYPES`. `auto` is bfloat16 on a GPU that has
            it and float32 elsewhere.
        trust_remote_code: Whether code that comes with the model may run.
    """

    name: str | None = None
    revision: str | None = None
    dtype: str = "auto"
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        _require(
            self.dtype in DTYPES, f"dtype={self.dtype!r} is unknown; use one of {', '.join(DTYPES)}"
        )

    @property
    def display_name(self) -> str:
        """The model's name as people know it."""
        return DEMO_MODEL if self.name is None else self.name


@dataclass(frozen=True)
class AdapterSettings:
    """Everything about a MoLA adapter but its allocation.

    Attributes:
        r: Rank of each expert.
        lora_alpha: The adapter's output is scaled by `lora_alpha / r`.
        lora_dropout: Probability with which an input of an expert is dropped in training.
        target_modules: Suffixes of the adapted modules; None is every linear layer of the blocks.
        top_k: Experts that a token is sent to (all of a layer's, where it has fewer).
        router_aux_loss_coef: Weight of the balance loss; 0 turns it off.

    Raises:
        ValueError: A value is out of its range or not finite.
    """

    r: int = 8
    lora_alpha: float = 16
    lora_dropout: float = 0.05
    target_modules: tuple[str, ...] | None = None
    top_k: int = 2
    router_aux_loss_coef: float = 0.0

    def __post_init__(self) -> None:
        _require(1 <= self.r <= MAX_RANK, f"r={self.r} must be from 1 to {MAX_RANK}")
        _require(
            0 < self.lora_alpha < math.inf,
            f"lora_alpha={self.lora_alpha} must be a positive number",
        )
        _require(0 <= self.lora_dropout < 1, f"lora_dropout={self.lora_dropout} must be in [0, 1)")
        _require(self.top_k >= 1, f"top_k={self.top_k} must be at least 1")
        coefficient = self.router_aux_loss_coef
        _require(
            0 <= coefficient < math.inf, f"router_aux_loss_coef={coefficient} must be 0 or more"
        )

    def check_rank(self, most_experts: int) -> None:
        """Refuse experts that are too large together.

        Args:
            most_experts: Experts of the layer that has the most.

        Raises:
            ValueError: Their ranks add up to more than `MAX_RANK`.
        """
        _require(
            self.r * most_experts <= MAX_RANK,
            f"{most_experts} experts of rank {self.r} in a layer are more than {MAX_RANK} ranks in "
            "all; lower --r or --max-experts",
        )


@dataclass(frozen=True)
class TrainSettings:
    """A fine-tune's length, batch and optimizer. The seed is passed beside it.

    Attributes:
        steps: Optimizer steps.
        batch_size: Rows per optimizer step, over all processes.
        micro_batch: Rows per forward pass; None is the whole batch. Gradients are accumulated.
        learning_rate: Peak of a linear warm-up and linear decay to zero.
        warmup_steps: Steps of warm-up; None is a tenth of `steps`, at most 100.
        max_grad_norm: Gradients are clipped to this norm.
        gradient_checkpointing: Recompute activations in the backward pass to save memory.

    Raises:
        ValueError: A value is out of its range or not finite.
    """

    steps: int = 40
    batch_size: int = 8
    micro_batch: int | None = None
    learning_rate: float = 1e-3
    warmup_steps: int | None = None
    max_grad_norm: float = 1.0
    gradient_checkpointing: bool = False

    def __post_init__(self) -> None:
        _require(self.steps >= 1, f"steps={self.steps}: a fine-tune needs at least 1 step")
        _require(self.batch_size >= 1, f"batch_size={self.batch_size} must be at least 1")
        _require(
            self.micro_batch is None or 1 <= self.micro_batch <= self.batch_size,
            f"micro_batch={self.micro_batch} must be between 1 and batch_size={self.batch_size}",
        )
        _require(
            0 < self.learning_rate < math.inf,
            f"learning_rate={self.learning_rate} must be a positive number",
        )
        _require(
            self.warmup_steps is None or self.warmup_steps >= 0,
            f"warmup_steps={self.warmup_steps} must be 0 or more",
        )
        _require(
            0 < self.max_grad_norm < math.inf,
            f"max_grad_norm={self.max_grad_norm} must be a positive number",
        )

    @property
    def warmup(self) -> int:
        """Steps of warm-up in force."""
        if self.warmup_steps is not None:
            return self.warmup_steps
        return min(100, self.steps // 10)


def with_less_memory(train: TrainSettings, adapter: AdapterSettings) -> TrainSettings:
    """Trade time for memory in a way that leaves a fine-tune's result as it is.

    Activations are computed twice. The micro-batch is halved only where no dropout mask and no
    balance loss depends on it: gradients then add up to the same, but for the rounding of sums.
    """
    less = replace(train, gradient_checkpointing=True)
    if adapter.lora_dropout == 0 and adapter.router_aux_loss_coef == 0:
        less = replace(less, micro_batch=max(1, (train.micro_batch or train.batch_size) // 2))
    return less
