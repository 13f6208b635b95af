"""The critic that a script's ``--critic`` flag names."""

from typing import Any, Literal

from trl.critic.types import Critic, Style

SCORE_PROMPTS = {"sentiment": "prompts/score_sentiment.txt"}


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
) -> Critic:
    """``kind`` is openai, local, score or lexicon.

    local and score use ``model`` if one is named, else ``lm`` and ``tokenizer`` (for self-critique: the
    policy's own frozen initial weights), in bf16 if ``half_precision``. Raises what the critic raises on a bad prompt file or model.
    """
    if kind == "lexicon":
        from trl.critic.lexicon import LexiconCritic

        return LexiconCritic(style)
    from trl.critic.template import PromptTemplate

    if kind == "openai":
        from trl.critic.openai import OpenAICritic

        template = PromptTemplate.from_file(prompt_file, style=style)
        return OpenAICritic(template, model or "gpt-3.5-turbo", base_url=base_url)
    if kind not in ("local", "score"):
        raise ValueError(f"unknown critic {kind!r}: expected openai, local, score or lexicon")
    import torch

    from trl.critic.local import LocalCritic

    if model is not None:
        from trl.generation import load_causal_lm

        lm, tokenizer = load_causal_lm(model)
    file = prompt_file if kind == "local" else SCORE_PROMPTS[style]
    template = PromptTemplate.from_file(file, style=style)
    mode: Literal["generate", "score"] = "generate" if kind == "local" else "score"
    return LocalCritic(template, lm, tokenizer, mode, dtype=torch.bfloat16 if half_precision else None)
