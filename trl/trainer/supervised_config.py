"""Settings that the supervised trainers (fine-tuning, reward model) have in common. Imports nothing heavy."""

from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

LATEST = "latest"


@dataclass
class SupervisedConfig:
    """Hyperparameters of a supervised run; sizes are per process."""

    output_dir: Annotated[str, tyro.conf.arg(aliases=("--model_save_path",))] = "outputs/run"
    """Run folder: the final model, metrics.jsonl, checkpoint-N/."""
    seed: int = 0
    """Seed of the data's order and of dropout."""
    epochs: int = 1
    """Passes over the data."""
    steps: int | None = None
    """Stop after this many optimizer steps; the learning rate's schedule ends there too."""
    batch_size: int = 16
    """Rows per optimizer step and process."""
    gradient_accumulation_steps: int = 1
    """Forward-backward passes that a step's rows are divided over; the result is the same, memory is less."""
    learning_rate: float = 1e-5
    """Peak learning rate of AdamW."""
    lr_scheduler: Literal["cosine", "linear", "constant"] = "cosine"
    """What the learning rate does after the warm-up."""
    warmup_ratio: float = 0.05
    """Share of the steps in which the learning rate rises from 0."""
    weight_decay: float = 0.0
    """Weight decay of AdamW."""
    max_grad_norm: float | None = 1.0
    """Clip the gradient's norm to this."""
    max_length: int | None = None
    """Most tokens of a text; default: as many as the model has positions for."""
    bf16: bool = False
    """bf16 mixed precision; losses stay in fp32."""
    num_frozen_layers: int | None = None
    """Leave the embeddings (and an LM head tied to them) and this many lower blocks as they are: faster."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, a third more time."""
    eval_every: int | None = None
    """Evaluate on held-out rows every this many steps, besides before the first and after the last."""
    save_steps: int | None = None
    """Save OUTPUT_DIR/checkpoint-N every this many steps, to resume from."""
    keep_checkpoints: int = 2
    """How many checkpoints stay on disk."""
    resume: str | None = None
    """Continue from a checkpoint folder, or from the newest one in output_dir ("latest")."""
    log_with: Literal["wandb", "tensorboard", "trackio"] | None = None
    """Experiment tracker, besides the metrics file that is always written."""

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size", "gradient_accumulation_steps", "keep_checkpoints"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("steps", "max_length", "num_frozen_layers", "eval_every", "save_steps"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}; leave it out for the default")
        for name in ("learning_rate", "weight_decay", "warmup_ratio"):
            if not getattr(self, name) >= 0:  # also true for NaN
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")
        if self.warmup_ratio > 1:
            raise ValueError(f"warmup_ratio is a share of the steps, from 0 to 1; got {self.warmup_ratio}")
        if self.max_grad_norm is not None and not self.max_grad_norm > 0:
            raise ValueError(f"max_grad_norm must be positive, got {self.max_grad_norm}; None clips nothing")
        if self.batch_size % self.gradient_accumulation_steps:
            raise ValueError(
                f"batch_size ({self.batch_size}) must be a multiple of gradient_accumulation_steps "
                f"({self.gradient_accumulation_steps}), which divides it"
            )
