"""Settings of `PPOTrainer`, with the names and defaults of the classic PPO trainer."""

import math
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import tyro

_POSITIVE = (
    "target",
    "horizon",
    "cliprange",
    "cliprange_value",
    "target_kl",
    "ratio_threshold",
    "max_grad_norm",
    "score_clip",
)
_NOT_NEGATIVE = ("learning_rate", "init_kl_coef", "vf_coef")


@dataclass
class PPOConfig:
    """Hyperparameters of PPO with token-level rewards; sizes are per process."""

    model_name: str | None = None
    """Policy: a hub id, a local folder, or a builtin: name."""
    query_dataset: str | None = None
    """Data set the queries come from (recorded; the scripts read it)."""
    reward_model: str | None = None
    """Environment reward (recorded; the scripts read it)."""
    exp_name: str = "ppo"
    """Name of the run in wandb and trackio."""
    seed: int = 0
    """Seed of sampling, mini-batch order and initialisation."""

    learning_rate: float = 1e-5
    """Learning rate of Adam, when no optimizer is passed."""
    batch_size: int = 256
    """Samples per PPO step and process."""
    mini_batch_size: int = 1
    """Samples per forward-backward pass."""
    gradient_accumulation_steps: int = 1
    """Mini-batches per optimizer step."""
    ppo_epochs: int = 4
    """Passes over each batch."""
    max_grad_norm: float | None = None
    """Clip the gradient's norm to this."""

    adap_kl_ctrl: bool = True
    """Adapt the KL coefficient towards `target` (Ziegler et al. 2019); otherwise it stays at init_kl_coef."""
    init_kl_coef: float = 0.2
    """KL coefficient at the start."""
    kl_penalty: Literal["kl", "abs", "mse", "full"] = "kl"
    """Per-token divergence: lp-ref, its absolute value, half its square, or the full sum over the vocabulary."""
    target: float = 6.0
    """Mean sequence KL that the adaptive controller aims at."""
    horizon: float = 10_000.0
    """Samples over which the adaptive controller corrects."""

    gamma: float = 1.0
    """Discount."""
    lam: float = 0.95
    """GAE lambda."""
    cliprange: float = 0.2
    """Clip of the probability ratio."""
    cliprange_value: float = 0.2
    """Clip of the value's change."""
    vf_coef: float = 0.1
    """Weight of the value loss."""
    early_stopping: bool = False
    """Stop a step's epochs when the policy KL of a mini-batch exceeds 1.5 x target_kl."""
    target_kl: float = 1.0
    """Threshold of early stopping, in nats per token."""
    ratio_threshold: float = 10.0
    """Drop the optimizer step of a mini-batch whose mean probability ratio exceeds this."""

    use_score_scaling: bool = False
    """Divide each sequence's total score by the running standard deviation."""
    use_score_norm: bool = False
    """Subtract the running mean too; needs use_score_scaling."""
    score_clip: float | None = None
    """Limit each sequence's total score to plus or minus this, after scaling."""
    whiten_rewards: bool = False
    """Scale the token rewards to unit variance over the batch, keeping their mean."""

    log_with: Literal["wandb", "tensorboard", "trackio"] | None = None
    """Experiment tracker, besides the metrics file that the scripts always write."""
    tracker_project_name: str = "trl"
    """Project name in the tracker."""
    tracker_kwargs: Annotated[dict[str, Any], tyro.conf.Suppress] = field(default_factory=dict)
    """Passed to the tracker's init, by tracker name: {"wandb": {"entity": ...}}."""
    accelerator_kwargs: Annotated[dict[str, Any], tyro.conf.Suppress] = field(default_factory=dict)
    """Passed to accelerate.Accelerator (for example mixed_precision)."""
    project_kwargs: Annotated[dict[str, Any], tyro.conf.Suppress] = field(default_factory=dict)
    """Passed to accelerate's ProjectConfiguration (for example logging_dir)."""
    remove_unused_columns: bool = True
    """Drop data set columns that are not arguments of the model, nor query, response or label."""

    def __post_init__(self) -> None:
        for name in ("batch_size", "mini_batch_size", "gradient_accumulation_steps", "ppo_epochs"):
            if getattr(self, name) < 1:
                raise ValueError(f"PPOConfig.{name} must be at least 1, got {getattr(self, name)}")
        step = self.mini_batch_size * self.gradient_accumulation_steps
        if self.batch_size % step:
            raise ValueError(
                f"batch_size ({self.batch_size}) must be a multiple of mini_batch_size ({self.mini_batch_size}) x "
                f"gradient_accumulation_steps ({self.gradient_accumulation_steps}) = {step}"
            )
        if self.kl_penalty not in ("kl", "abs", "mse", "full"):
            raise ValueError(f"kl_penalty must be one of kl, abs, mse, full; got {self.kl_penalty!r}")
        for name in _POSITIVE:
            value = getattr(self, name)
            if value is not None and not value > 0:  # also true for NaN
                raise ValueError(f"PPOConfig.{name} must be positive, got {value}")
        for name in _NOT_NEGATIVE:
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"PPOConfig.{name} must be 0 or more and finite, got {getattr(self, name)}")
        for name in ("gamma", "lam"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"PPOConfig.{name} must be from 0 to 1, got {getattr(self, name)}")
        if self.log_with not in (None, "wandb", "tensorboard", "trackio"):
            raise ValueError(f"log_with must be wandb, tensorboard or trackio, got {self.log_with!r}")
        if self.use_score_norm and not self.use_score_scaling:
            raise ValueError("use_score_norm needs use_score_scaling: the mean is subtracted in scaled units")
