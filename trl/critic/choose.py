"""The critic that a script's ``--critic`` flag names."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from trl.critic.types import Critic, Style

SCORE_PROMPTS: dict[Style, str] = {
    "sentiment": "prompts/score_sentiment.txt",
    "toxicity": "prompts/score_toxicity.txt",
    "summary": "prompts/score_summary.txt",
}


def make_critic(
    kind: str,
    style: Style,
    *,
    prompt_file: str,
    model: str | None = None,
    base_url: str | None = None,
    lm: Any = None,
    tokenizer: Any = None,
    half_precision: bool = False,
    endpoint: Mapping[str, Any] | None = None,
    reward: Callable[..., Sequence[float | None]] | None = None,
    recording: str | None = None,
) -> Critic:
    """``kind`` is openai, local, score, lexicon, attribution or replay.

    local and score use ``model`` if one is named, else ``lm`` and ``tokenizer`` (for self-critique: the
    policy's own frozen initial weights), in bf16 if ``half_precision``. openai takes ``endpoint``, keywords of
    OpenAICritic for limits and cache, and asks one tiny question at once. attribution takes the environment's
    ``reward``, replay a file of recorded critiques. Raises what the critic raises on a bad prompt file, model, key
    or recording, ValueError where what the kind needs is not given.
    """
    if kind == "lexicon":
        from trl.critic.lexicon import LexiconCritic

        return LexiconCritic(style)
    if kind == "attribution":
        from trl.critic.attribution import AttributionCritic

        if reward is None:
            raise ValueError("the attribution critic asks the environment's reward function, and there is none here")
        return AttributionCritic(reward, style)
    if kind == "replay":
        from trl.critic.replay import ReplayCritic

        if recording is None:
            raise ValueError("the replay critic needs a recording: --critic_replay FILE, a run's critiques.jsonl")
        return ReplayCritic(recording)
    from trl.critic.template import PromptTemplate

    if kind == "openai":
        from trl.critic.openai import OpenAICritic

        template = PromptTemplate.from_file(_located(prompt_file), style=style)
        critic = OpenAICritic(template, model or "gpt-3.5-turbo", base_url=base_url, **(endpoint or {}))
        critic.preflight()
        return critic
    if kind not in ("local", "score"):
        raise ValueError(f"unknown critic {kind!r}: expected openai, local, score, lexicon, attribution or replay")
    import torch

    from trl.critic.local import LocalCritic

    if model is not None:
        from trl.generation import load_causal_lm

        lm, tokenizer = load_causal_lm(model)
    file = prompt_file if kind == "local" else SCORE_PROMPTS[style]
    template = PromptTemplate.from_file(_located(file), style=style)
    mode: Literal["generate", "score"] = "generate" if kind == "local" else "score"
    return LocalCritic(template, lm, tokenizer, mode, dtype=torch.bfloat16 if half_precision else None)


def _located(file: str) -> Path:
    """A shipped prompt is found from any working directory."""
    shipped = Path(__file__).parents[2] / file
    return shipped if not Path(file).exists() and shipped.exists() else Path(file)
