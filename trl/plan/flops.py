"""FLOPs of one PPO step, phase by phase, as `trl.trainer` computes it.

A multiplication and its addition are two FLOPs. A block costs 2 per weight and token, and 4·T²·A for the scores and
mixtures of attention over T tokens (A: heads times their width; kernels that skip what lies above the diagonal do half
of it). A backward pass costs one forward pass for the gradients of activations and one for those of trained weights
(Kaplan et al. 2020, section 2.1). Norms, activation functions, biases, the value head, samplers, LoRA's own low-rank
products and padding are left out.
"""

from dataclasses import dataclass

from trl.plan.shape import ModelShape


@dataclass(frozen=True)
class Workload:
    """What one PPO step does, with mean lengths. ``shared_layers`` is n of the trunk cache, 0 without it."""

    samples: int
    """Of all processes together."""
    prompt_tokens: float
    response_tokens: float
    ppo_epochs: int = 4
    shared_layers: int = 0
    lora_rank: int = 0
    """0: no adapters, every weight above the shared layers is trained."""
    checkpointing: bool = False
    """Gradient checkpointing: the blocks' forward pass is repeated in the backward pass (at most: all of it)."""

    whole_batch: bool = False
    """An optimizer step is one pass over the whole batch: the log-probs' pass is the first epoch's forward pass too."""

    @property
    def inputs(self) -> float:
        """Tokens per sample that the models read: the last one's successor interests nobody."""
        return self.prompt_tokens + self.response_tokens - 1


@dataclass(frozen=True)
class StepFlops:
    """FLOPs of one PPO step, over all processes."""

    generate: float
    passes: float
    """Log-probs of policy and reference, values of a separate value model."""
    reward: float
    """A reward model's pass; 0 where the reward is computed elsewhere."""
    update: float

    @property
    def total(self) -> float:
        return self.generate + self.passes + self.reward + self.update


def flops_plan(
    policy: ModelShape,
    work: Workload,
    *,
    value_model: ModelShape | None = None,
    reward_model: ModelShape | None = None,
) -> StepFlops:
    """FLOPs of one step. ``value_model`` is a separate network; the value head costs nothing worth counting.

    Raises ValueError where no block is left above the shared layers.
    """
    for shape in (policy, *([value_model] if value_model else [])):
        shape.check_shared_layers(work.shared_layers)
    head = 2 * policy.head_weights * work.response_tokens
    top = policy.layers - work.shared_layers
    passes = _blocks(policy, policy.layers, work.inputs) + _blocks(policy, top, work.inputs) + 2 * head
    update = _training(policy, work, head, head_is_trained=not (work.lora_rank or (work.shared_layers and policy.tied)))
    saved = _blocks(policy, top, work.inputs) + head
    if value_model is not None:
        whole = _blocks(value_model, value_model.layers, work.inputs)
        passes += whole
        saved += whole
        frozen = _blocks(value_model, work.shared_layers, work.inputs)  # it has no trunk cache
        update += frozen + _training(value_model, work, head=0, head_is_trained=False, is_full=True)
    reward = 0.0
    if reward_model is not None:
        reward = _blocks(reward_model, reward_model.layers, work.prompt_tokens + work.response_tokens)
    return StepFlops(
        generate=work.samples * _generation(policy, work),
        passes=work.samples * passes,
        reward=work.samples * reward,
        update=work.samples * (work.ppo_epochs * update - (saved if work.whole_batch else 0)),
    )


def _blocks(shape: ModelShape, layers: int, tokens: float) -> float:
    """A forward pass of so many blocks over one sample."""
    return layers * (2 * shape.block_weights * tokens + 4 * tokens**2 * shape.attention)


def _generation(shape: ModelShape, work: Workload) -> float:
    """One response, with a key-value cache: the prompt at once, then token by token; the last token is not read."""
    prompt, steps = work.prompt_tokens, work.response_tokens - 1
    seen = steps * prompt + steps * (steps + 1) / 2  # positions that the single tokens look at
    attention = 4 * shape.attention * (prompt**2 + seen)
    weights = 2 * shape.block_weights * (prompt + steps)
    return shape.layers * (weights + attention) + 2 * shape.head_weights * work.response_tokens


def _training(shape: ModelShape, work: Workload, head: float, *, head_is_trained: bool, is_full: bool = False) -> float:
    """Forward and backward pass of one sample through the blocks above the shared ones, and the head."""
    top = shape.layers - work.shared_layers
    forward = _blocks(shape, top, work.inputs)
    weights = 2 * shape.block_weights * top * work.inputs
    backward = forward + 4 * top * work.inputs**2 * shape.attention  # of attention both factors are activations
    if is_full or not work.lora_rank:
        backward += weights
    again = forward if work.checkpointing else 0.0
    return forward + backward + again + head * (3 if head_is_trained else 2)
