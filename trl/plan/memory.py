"""Bytes that one process of a run needs, from sizes alone; a plan with the models loaded is `memory_plan`.

Counted exactly: weights, gradients and Adam's moments, and how ZeRO divides them (Rajbhandari et al. 2020). An
estimate, within a third of what was measured for GPT-2, GPT-NeoX and Llama: the activations that a backward pass keeps.
Not counted: the framework itself, fragmentation, a reward that is not given as a reward model.
"""

from dataclasses import asdict, dataclass
from typing import Literal

from trl.plan.flops import Workload
from trl.plan.shape import ModelShape

ZeroStage = Literal[0, 1, 2, 3]
MOMENTS = 8
"""Adam's two fp32 moments, in bytes per trained parameter."""
KEPT = 2.0
"""Activations kept per token and block: so many times its weights divided by its width (measured: 1.5 to 2.3)."""
MIXED_BYTES = 2.1
"""Mean bytes of a kept activation under bf16 autocast, whose norms and sums stay fp32 (measured: 1.6 to 2.5)."""
SMALLEST_PASS = 8
"""Samples per pass without gradients, at least (`trl.trainer.rollout`)."""
GENERATED_TOGETHER = 32
"""Responses per batch of generation, at most (`PPOTrainer.generate`)."""


@dataclass(frozen=True)
class Setting:
    """How a run is spread and in which numbers it computes; sizes are per process."""

    batch: int
    mini_batch: int
    processes: int = 1
    zero: ZeroStage = 0
    """DeepSpeed's stage; 0 is plain data parallelism, every process with everything."""
    bf16: bool = False

    def __post_init__(self) -> None:
        if min(self.batch, self.mini_batch, self.processes) < 1 or self.mini_batch > self.batch:
            raise ValueError(f"expected a batch and processes of 1 or more, a mini-batch within the batch; got {self}")


@dataclass(frozen=True)
class ProcessMemory:
    """Bytes of one process. The first five are always there; of the last three, only the largest at a time."""

    weights: float
    """Of the policy and a separate value model, with the bf16 copies that sampling and autocast use."""
    frozen_models: float
    """Reference and reward model."""
    gradients: float
    optimizer: float
    """Adam's moments; under DeepSpeed in bf16 also the fp32 weights."""
    trunk_states: float
    """Of a batch, kept over the epochs."""
    generation: float
    """Key-value cache; under ZeRO-3 also the gathered weights."""
    passes: float
    """Logits of the passes without gradients."""
    update: float
    """Activations and logits of a mini-batch."""

    @property
    def total(self) -> float:
        lasting = self.weights + self.frozen_models + self.gradients + self.optimizer + self.trunk_states
        return lasting + max(self.generation, self.passes, self.update)

    def rows(self) -> dict[str, float]:
        """By name, the total last."""
        return {**asdict(self), "total": self.total}


def trained_parameters(shape: ModelShape, work: Workload) -> int:
    """Of the policy: all, those above the shared layers, or the adapters of the query and value maps."""
    if work.lora_rank:
        return shape.layers * work.lora_rank * (2 * shape.width + shape.attention + shape.keys)
    if not work.shared_layers:
        return shape.parameters
    return (shape.layers - work.shared_layers) * shape.block_parameters + (0 if shape.tied else shape.head_weights)


def process_memory(
    policy: ModelShape,
    work: Workload,
    setting: Setting,
    *,
    value_model: ModelShape | None = None,
    reward_model: ModelShape | None = None,
) -> ProcessMemory:
    """Bytes of one process in a step of `work`; raises ValueError for what the trainer can't do.

    The reference is what the trainer makes: the policy without adapters, the blocks above the shared ones, or a copy.
    """
    if work.lora_rank and work.shared_layers:
        raise ValueError("LoRA's reference is the policy without adapters, which shares all: leave out shared layers")
    if setting.zero == 3 and work.shared_layers:
        raise ValueError("ZeRO-3 divides each model's weights, so that two can't share layers: leave out shared layers")
    deepspeed = setting.zero > 0
    size = 2 if deepspeed and setting.bf16 else 4  # without DeepSpeed, mixed precision is autocast over fp32 weights
    share = [1 / setting.processes if setting.zero >= stage else 1.0 for stage in (1, 2, 3)]

    trained = trained_parameters(policy, work)
    own = policy.parameters + (trained if work.lora_rank else 0)
    reference = 0 if work.lora_rank else trained if work.shared_layers else policy.parameters
    if value_model is not None:
        frozen_below = work.shared_layers * value_model.block_parameters
        frozen_below += value_model.head_weights if work.shared_layers else 0  # its embeddings
        own += value_model.body_parameters
        trained += value_model.body_parameters - frozen_below
    weights = own * size * share[2]
    if setting.bf16 and not deepspeed:
        weights += 2 * (0 if work.lora_rank else policy.parameters) + 2 * trained
    frozen = reference * size * share[2]
    if reward_model is not None:
        frozen += reward_model.body_parameters * (2 if setting.bf16 else 4) * share[2]
    buckets = 2 if setting.processes > 1 and not deepspeed else 1  # DDP sends copies of the gradients
    return ProcessMemory(
        weights=weights,
        frozen_models=frozen,
        gradients=trained * size * buckets * share[1],
        optimizer=trained * (MOMENTS + (4 if size == 2 else 0)) * share[0],
        trunk_states=setting.batch * work.inputs * policy.width * 4 if work.shared_layers else 0.0,
        generation=_generation(policy, work, setting) + (policy.parameters * size if setting.zero == 3 else 0),
        # elsewhere logits are worked through in slices of a few megabytes
        passes=2 * _logits(policy, work, max(setting.mini_batch, SMALLEST_PASS)) if setting.zero == 3 else 0.0,
        update=_update(policy, work, setting) + (0 if value_model is None else _kept(value_model, work, setting)),
    )


def _generation(shape: ModelShape, work: Workload, setting: Setting) -> float:
    rows = min(setting.batch, GENERATED_TOGETHER)
    per_token = 2 * shape.layers * shape.keys * (2 if setting.bf16 else 4)
    return rows * (work.prompt_tokens + work.response_tokens) * per_token


def _logits(shape: ModelShape, work: Workload, samples: int) -> float:
    """One fp32 tensor (tokens, vocabulary)."""
    return samples * work.response_tokens * shape.vocab * 4


def _update(shape: ModelShape, work: Workload, setting: Setting) -> float:
    """The blocks' activations, and logits whose place softmax and gradient take; with ZeRO-3 all three are there."""
    copies = 3 if setting.zero == 3 else 1
    return copies * _logits(shape, work, setting.mini_batch) + _kept(shape, work, setting)


def _kept(shape: ModelShape, work: Workload, setting: Setting) -> float:
    tokens = setting.mini_batch * work.inputs
    bytes_each = MIXED_BYTES if setting.bf16 else 4
    block = tokens * KEPT * shape.block_weights / shape.width * bytes_each
    layers = shape.layers - work.shared_layers
    return layers * tokens * shape.width * 4 + block if work.checkpointing else layers * block
