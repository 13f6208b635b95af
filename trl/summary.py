"""What the two summarization scripts share: their settings, and an environment that is asked by document."""

import logging
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from trl.builtin import is_builtin
from trl.run import CriticKind, RunArgs, check_lengths

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

Reward = Callable[..., Sequence[float | None]]


@dataclass
class SummaryArgs(RunArgs):
    """Settings that the summarization scripts have besides `RunArgs`."""

    prompt_file: str = "prompts/prompt_summ_3shot_rouge_v2.txt"
    """Few-shot prompt of the critic (openai, local): document, summary and score out of 10."""
    intrinsic_reward_threshold: float = 100.0
    """The critic is asked where the environment's raw score is at or below this."""
    critic_score_bounds: tuple[float, float] = (0.0, 100.0)
    """The environment's scores that the critic is shown as 0 and 10; linear between them, cut off beyond."""
    output_min_length: int = 30
    """Shortest summary in tokens, unless the model ends earlier."""
    output_max_length: int = 50
    """Longest summary in tokens."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_lengths(self.output_min_length, self.output_max_length)
        low, high = self.critic_score_bounds
        if not low < high:
            raise ValueError(f"--critic_score_bounds are {low} and {high}; expected the lower one first")

    @property
    def default_critic_kind(self) -> CriticKind:
        """The small built-in model is of no use as a critic of summaries; the reward itself is."""
        is_builtin = self.preset == "builtin" or (self.ppo_config.model_name or "").startswith("builtin:")
        return "attribution" if is_builtin and self.critic_replay is None else super().default_critic_kind


@dataclass
class RLHFArgs(SummaryArgs):
    """Settings of PPO with a preference reward, a reference and, if wanted, a value network of its own."""

    prompt_file: str = "prompts/prompt_summ_3shot_rouge_rlhf.txt"
    """Few-shot prompt of the critic (openai, local): document, summary and score out of 10."""
    critic_score_bounds: tuple[float, float] = (-5.0, 5.0)
    """The reward model's scores that the critic is shown as 0 and 10; linear between them, cut off beyond."""

    reward_model_ckpt_path: str | None = None
    """Reward model: a folder of reward_model_summ.py, or the public 6B layout (needs --reward_model_config)."""
    reward_model_config: str | None = None
    """Model that gives configuration and tokenizer to the public 6B layout (its SFT model), which is then read as it
    was trained: <|startoftext|> before a text, no EOS after it."""
    reward_model_device: str | None = None
    """Device of the reward model, such as cpu or cuda:1; default: the policy's."""
    rw_batch_size: int = 16
    """Texts per pass of the reward model."""
    reward_clip: float = 5.0
    """Limit of the normalised score, both ways."""
    length_penalty: float = 0.0
    """Taken off the score for every word that the summary has less than min_words."""
    min_words: int = 20
    """Words of a summary that length_penalty asks for."""
    gibberish_guard: str | None = None
    """A text classifier (hub id or folder) with a class called clean; off by default."""
    gibberish_penalty: float = 1.0
    """Taken off the score, times the guard's probability that the summary is not clean."""
    nan_policy: Literal["strict", "renormalise"] = "strict"
    """Where the guard gives no verdict: strict leaves the sample out, renormalise only the guard."""

    value_model_path: str | None = None
    """Start a separate value network from this model, usually the reward model; default: the policy's value head. Of
    its blocks, --num_shared_layers are frozen too."""
    value_learning_rate: float | None = None
    """Learning rate of the value network; default: the policy's."""
    reference: Literal["shared", "copy", "adapter"] | None = None
    """shared: a frozen model that shares the lower --num_shared_layers blocks, the default where that is given; copy: a
    frozen second model, the default elsewhere; adapter: the policy is a LoRA, and its base model is the reference."""
    lora_r: int = 16
    """Rank of the adapter; its scale is twice that."""
    ptx_coef: float = 0.0
    """Weight of a language-model loss on ptx_file, mixed into every update (PPO-ptx); 0: none."""
    ptx_file: str | None = None
    """Unsupervised text for it: a .jsonl or .csv file with a text column, or a data set."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.preset == "builtin" and self.reference in ("copy", "adapter"):
            self.num_shared_layers = None
        if (self.reference_kind == "shared") != (self.num_shared_layers is not None):
            raise ValueError(f"--reference {self.reference} and --num_shared_layers {self.num_shared_layers} disagree")
        if (self.ptx_coef > 0) != (self.ptx_file is not None):
            raise ValueError("--ptx_coef and --ptx_file go together: a weight above 0, and the text it is for")

    @property
    def reference_kind(self) -> Literal["shared", "copy", "adapter"]:
        """The reference that was chosen, or the default."""
        return self.reference or ("copy" if self.num_shared_layers is None else "shared")

    @property
    def environment_name(self) -> str:
        """What gives the environment's scores."""
        return str(self.reward_model_ckpt_path)


def check_policy(name: str | None) -> None:
    """Exit in one line without a policy, and warn where it is a built-in model, which was never taught to sum up."""
    if name is None:
        raise SystemExit("error: --model_name is needed: a supervised checkpoint, such as one of sft_summ.py")
    if is_builtin(name):
        logger.warning("PPO starts from %s, which never learned to sum up; sft_summ.py makes a better start", name)


def of_documents(reward: Reward, rows: Sequence[Mapping[str, Any]]) -> Reward:
    """``reward`` as a function of ``prompts`` (here: documents) and ``completions`` alone.

    The policy's prompt and the human summary are found by document, so that the attribution critic, which knows
    documents only, asks for the same reward that the environment gives. A document that occurs several times is
    scored against all of its human summaries (`RougeReward`: the best match counts).

    Args:
        reward: called with keyword lists ``prompts``, ``completions`` and ``references`` (lists of texts).
        rows: ``query``, ``label`` and ``document`` of each sample, see `trl.data.summarization`.
    """
    queries: dict[str, str] = {}
    references: defaultdict[str, dict[str, None]] = defaultdict(dict)
    for row in rows:
        queries.setdefault(row["document"], row["query"])
        references[row["document"]][row["label"]] = None

    def of(*, prompts: Sequence[str], completions: Sequence[str], **_ignored: object) -> Sequence[float | None]:
        return reward(
            prompts=[queries[document] for document in prompts],
            completions=completions,
            references=[list(references[document]) for document in prompts],
        )

    return of


def locate_device(name: str | None) -> "torch.device":
    """A device as flags name it: 0 is cuda:0, as published commands have it; None an accelerator if there is one.

    Where there is no such GPU, the CPU takes its place, with a warning. Exits with one line where it is no device.
    """
    import torch

    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(f"cuda:{name}" if name.isdigit() else name)
    except RuntimeError as error:
        raise SystemExit(f"error: {name!r} is no device such as 0, cuda:0 or cpu ({error})") from None
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        logger.warning("there is no device %s here: the CPU takes its place", device)
        return torch.device("cpu")
    return device
