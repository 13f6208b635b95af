"""What ``examples/custom/ppo_custom.py`` needs beyond the other task scripts: its settings, and its reward."""

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from trl.builtin import is_builtin
from trl.critic.types import Style
from trl.run import CriticKind, RunArgs
from trl.trainer.config import PPOConfig

if TYPE_CHECKING:
    from torch import Tensor
    from torch.utils.data import DataLoader
    from transformers import PreTrainedTokenizerBase

    from trl.data.task_prompts import TaskRow
    from trl.rewards.reward_function import ConfiguredReward, PendingReward
    from trl.rewards.user_function import FunctionReward
    from trl.trainer import PPOTrainer

PROMPTS: dict[Style, str] = {
    "sentiment": "prompts/prompt_sentiment_3shot_v2.txt",
    "toxicity": "prompts/prompt_toxicity_3shot_v2.txt",
    "summary": "prompts/prompt_summ_3shot_rouge_v2.txt",
}
QUESTIONS = "builtin:questions", str(Path(__file__).parents[1] / "configs" / "rewards" / "questions.json")
"""Data and reward of the built-in preset. They go together: one of them with a user's other half fits nothing."""


@dataclass
class CustomConfig(PPOConfig):
    """PPOConfig with this task's names for data and reward."""

    query_dataset: Annotated[str | None, tyro.conf.arg(name="data", aliases=("--query_dataset",))] = None
    """Prompts: a JSONL file of rows {"contents": …, "systemInstruction"?: …, "references"?: …}, a folder with
    train.jsonl and perhaps eval.jsonl, or builtin:questions."""
    reward_model: Annotated[str | None, tyro.conf.arg(name="reward", aliases=("--reward_model",))] = None
    """The environment: reward.json or reward.yaml (Vertex AI's reward configuration), or path/to/file.py:function,
    which is your own trusted code and runs in this process."""


@dataclass
class CustomArgs(RunArgs):
    """Settings of the custom task besides `RunArgs`."""

    ppo_config: tyro.conf.OmitArgPrefixes[CustomConfig] = field(default_factory=CustomConfig)
    eval_data: str | None = None
    """Held-out prompts; default: eval.jsonl of a --data folder, else --eval_fraction of the data."""
    eval_fraction: float = 0.1
    """Share of the prompts that is held out, by the hash of their content."""
    eval_every: int | None = 10
    """Mean reward on held-out prompts every this many steps, before the first and after the last; None: none is held
    out."""
    chat_template: Literal["auto", "on", "off"] = "auto"
    """Whether prompts go through the model's chat template; auto: where it has one."""
    samples_per_prompt: int = 1
    """Responses to each prompt of a batch; batch_size counts responses."""
    min_new_tokens: int | None = None
    """A response's limit is drawn from min_new_tokens to max_new_tokens. Default: it is max_new_tokens, so that a
    response ends earlier only where the model ends it."""
    max_new_tokens: int = 32
    """Longest response."""
    max_prompt_tokens: int | None = None
    """Of longer prompts the last tokens are kept. Default: what the model's context leaves."""
    nan_policy: Literal["strict", "renormalise"] = "strict"
    """What a missing reward does to a sample of a composite: strict leaves the sample out of training; renormalise: the
    others make up its total."""
    reward_timeout: float | None = None
    """Seconds for one evaluation of a configured reward. Default: judges 60, snippets 100, services 300."""
    judge_base_url: str | None = None
    """OpenAI-compatible endpoint of the reward's judges; default OPENAI_BASE_URL, else OpenAI's."""
    judge_cache: str | None = None
    """Folder that keeps the judges' answers."""
    allow_http: bool = False
    """Ask reward services over plain http on other machines, too."""
    critic_style: Style = "sentiment"
    """What --prompt_file asks for: sentiment (good and bad spans), toxicity (bad spans), summary (flaws of a response,
    shown with its prompt as the document and its score out of 10)."""
    critic_score_bounds: tuple[float, float] = (-1.0, 1.0)
    """In the summary style, the rewards that the critic is shown as 0 and 10."""
    prompt_file: str = ""
    """Few-shot prompt of the critic (openai, local); default: the shipped one of --critic_style."""
    intrinsic_reward_threshold: float = 0.5
    """The critic is asked where the raw reward is at or below this."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.lengths[0] <= self.lengths[1]:
            raise ValueError(f"expected 1 <= min <= max new tokens, got {self.min_new_tokens}, {self.max_new_tokens}")
        if self.samples_per_prompt < 1 or self.ppo_config.batch_size % self.samples_per_prompt:
            raise ValueError(
                f"--samples_per_prompt is {self.samples_per_prompt}; expected a divisor of --batch_size "
                f"({self.ppo_config.batch_size})"
            )
        if self.eval_data is not None and self.eval_every is None:
            raise ValueError("--eval_data is for --eval_every, which is None; give a number of steps")
        if self.reward_timeout is not None and not 0 < self.reward_timeout < math.inf:
            raise ValueError(f"--reward_timeout is {self.reward_timeout}; expected seconds, more than 0")
        if not 0 < self.eval_fraction < 1:
            raise ValueError(f"--eval_fraction is {self.eval_fraction}; expected more than 0 and less than 1")
        if self.max_prompt_tokens is not None and self.max_prompt_tokens < 1:
            raise ValueError(f"--max_prompt_tokens is {self.max_prompt_tokens}; expected at least 1")
        if not self.critic_score_bounds[0] < self.critic_score_bounds[1]:
            raise ValueError(f"--critic_score_bounds are {self.critic_score_bounds}; expected the lower one first")

    def check_files(self) -> None:
        """Exit with one line that names the flag where a file is not there; before anything heavy is loaded."""
        file, has_function, _ = str(self.ppo_config.reward_model).rpartition(".py:")
        reward = f"{file}.py" if has_function else self.ppo_config.reward_model
        given = {"data": self.ppo_config.query_dataset, "eval_data": self.eval_data, "reward": reward}
        for flag, path in (given | {"critic_replay": self.critic_replay}).items():
            if path is not None and not is_builtin(path) and not Path(path).exists():
                raise SystemExit(f"error: --{flag} {path}: there is no such file or folder")

    @property
    def default_critic_kind(self) -> CriticKind:
        """The small built-in model is of no use as a critic of summaries; the reward itself is."""
        kind = super().default_critic_kind
        return "attribution" if kind == "score" and self.critic_style == "summary" else kind

    @property
    def lengths(self) -> tuple[int, int]:
        """Lowest and highest limit of a response's tokens."""
        return self.max_new_tokens if self.min_new_tokens is None else self.min_new_tokens, self.max_new_tokens

    def longest_prompt(self, context: int | None) -> int | None:
        """Most tokens of a prompt for a model with ``context`` positions; None: no limit. Exits where none fit."""
        room = None if context is None else context - self.max_new_tokens
        if room is not None and room < 1:
            raise SystemExit(
                f"error: --max_new_tokens {self.max_new_tokens} leaves no room in the model's {context} positions"
            )
        return min((limit for limit in (room, self.max_prompt_tokens) if limit is not None), default=None)


class TaskReward:
    """The environment of a custom task: a configured reward or a function, asked about rows of the data.

    Args:
        reward: from `load_task_reward`.
        rows: all rows of batches (`trl.data.task_prompts.encode_rows`), to find a prompt's row again by its text.
        tokenizer: the policy's.
        chat: whether completions are conversations.
    """

    def __init__(
        self,
        reward: "ConfiguredReward | FunctionReward",
        rows: Sequence[Mapping[str, Any]],
        tokenizer: "PreTrainedTokenizerBase",
        chat: bool,
    ) -> None:
        from trl.rewards.user_function import FunctionReward

        self._reward, self._rows, self._tokenizer, self._chat = reward, rows, tokenizer, chat
        # of a configured reward, a column of the data can't be meant: it finds what it needs in references
        self._takes_own_columns = isinstance(reward, FunctionReward)

    @functools.cached_property
    def _by_prompt(self) -> "dict[str, TaskRow]":
        """By the prompt as data and critics show it, blanks made one."""
        found: dict[str, TaskRow] = {}
        for row in self._rows:
            for text in (row["query"], str(self._tokenizer.decode(row["critic_ids"], skip_special_tokens=True))):
                found.setdefault(_folded(text), row["row"])
        return found

    def submit(
        self, batch: Mapping[str, list[Any]], texts: Sequence[str], responses: "Sequence[Tensor]", step: int
    ) -> "PendingReward":
        """Start scoring a batch of a training step; failures count towards stopping the run."""
        ids = [response.tolist() for response in responses]
        columns = self._columns(batch["row"], texts, ids)
        if not self._takes_own_columns:
            columns["step"] = step
        return self._reward.submit(**columns)

    def score(self, batch: Mapping[str, list[Any]], texts: Sequence[str]) -> list[float]:
        """The rewards of held-out responses, NaN for no verdict; nothing is counted.

        Exits with one line where an endpoint refuses the key.
        """
        from trl.clients import EndpointAuthError

        columns = self._columns(batch["row"], texts, batch["completion_ids"])
        try:
            return [each.reward for each in self._reward.details(**columns)]
        except EndpointAuthError as error:
            raise SystemExit(f"error: {error}") from None

    def __call__(self, *, prompts: Sequence[str], completions: Sequence[str], **_ignored: Any) -> list[float | None]:
        """The same by the prompts' readable text, for the attribution critic; None for prompts that no row has.

        Of rows with equal prompts, the references of the first count.
        """
        rows = [self._by_prompt.get(_folded(prompt)) for prompt in prompts]
        pairs = [(row, text) for row, text in zip(rows, completions, strict=True) if row is not None]
        found = [row for row, _ in pairs]
        texts = [text for _, text in pairs]
        ids = [list(self._tokenizer(text, add_special_tokens=False)["input_ids"]) for text in texts]
        rewards = iter(self._reward.details(**self._columns(found, texts, ids)) if found else ())
        return [None if row is None else next(rewards).reward for row in rows]

    def _columns(self, rows: "Sequence[TaskRow]", texts: Sequence[str], ids: Sequence[list[int]]) -> dict[str, Any]:
        """Keyword lists as every reward function takes them."""
        return {
            **(own_columns(rows) if self._takes_own_columns else {}),
            "prompts": [row.tuning.messages if self._chat else _plain(row) for row in rows],
            "completions": [[{"role": "assistant", "content": text}] for text in texts] if self._chat else list(texts),
            "completion_ids": list(ids),
            "references": [row.tuning.references for row in rows],
            "examples": [row.tuning.example for row in rows],
        }


def own_columns(rows: "Sequence[TaskRow]") -> dict[str, list[Any]]:
    """The columns that the data themselves have: the references' keys and the rows' further keys; None: missing."""
    values = [{**row.tuning.references, **row.columns} for row in rows]
    return {name: [each.get(name) for each in values] for name in dict.fromkeys(key for each in values for key in each)}


def load_task_reward(args: CustomArgs, rows: "Sequence[TaskRow]") -> "ConfiguredReward | FunctionReward":
    """The reward that ``--reward`` names, checked against the data's rows.

    Exits with one line where a judge has no key. Raises DataFileError (a configuration, file or column that can't be
    used) and OSError.
    """
    from trl.clients import EndpointAuthError
    from trl.jsonl import DataFileError
    from trl.rewards.autorater import JudgeSettings
    from trl.rewards.configured import load_reward
    from trl.rewards.user_function import FunctionReward

    location = str(args.ppo_config.reward_model)
    if ".py:" in location:
        function = FunctionReward(location)
        function.check({*own_columns(rows), "prompts", "completions", "completion_ids", "references", "examples"})
        return function
    if location.endswith(".py"):
        raise DataFileError(f"--reward {location}: expected the function's name too, {location}:NAME")
    try:
        configured = load_reward(
            location,
            nan_policy=args.nan_policy,
            timeout=args.reward_timeout,
            base_url=args.judge_base_url,
            judge=JudgeSettings(cache=args.judge_cache),
            allow_http=args.allow_http,
        )
    except EndpointAuthError as error:
        raise SystemExit(f"error: {error}") from None
    configured.check([row.tuning.references for row in rows])
    return configured


def batches_of(
    rows: Sequence[Mapping[str, Any]], trainer: "PPOTrainer", samples_per_prompt: int
) -> "DataLoader[dict[str, list[Any]]]":
    """Shuffled batches of this process's share, as lists by column, with each prompt ``samples_per_prompt`` times."""
    import torch
    from torch.utils.data import DataLoader

    from trl.trainer.batches import ShardedBatches

    prompts = ShardedBatches(
        len(rows),
        trainer.config.batch_size // samples_per_prompt,
        rank=trainer.accelerator.process_index,
        world=trainer.accelerator.num_processes,
        seed=trainer.config.seed,
    )

    def collate(group: list[Mapping[str, Any]]) -> dict[str, list[Any]]:
        return {key: [row[key] for row in group for _ in range(samples_per_prompt)] for key in group[0]}

    own = torch.Generator()  # as in PPOTrainer: a pass leaves the global one as it is
    return DataLoader(list(rows), batch_sampler=prompts, collate_fn=collate, generator=own)  # type: ignore[arg-type]


def _plain(row: "TaskRow") -> str:
    return "\n\n".join(message["content"] for message in row.tuning.messages)


def _folded(text: str) -> str:
    return " ".join(text.split())
