"""The LLM critic: prompt → reply → spans → token rewards. Names are loaded on first use."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trl.critic.align import SpanRewards, critic_text, span_rewards, token_ranges
    from trl.critic.attribution import AttributionCritic
    from trl.critic.fuse import CriticFuseError
    from trl.critic.intrinsic import IntrinsicReward
    from trl.critic.lexicon import LexiconCritic
    from trl.critic.local import LocalCritic
    from trl.critic.openai import CriticAuthError, OpenAICritic
    from trl.critic.parse import parse_critique
    from trl.critic.random_spans import RandomSpanCritic
    from trl.critic.replay import RecordingCritic, ReplayCritic
    from trl.critic.template import PromptFileError, PromptTemplate
    from trl.critic.types import Critic, CriticGoneError, Critique, CritiqueRequest, Span

_HOME = {
    "AttributionCritic": "attribution",
    "Critic": "types",
    "CriticAuthError": "openai",
    "CriticFuseError": "fuse",
    "CriticGoneError": "types",
    "Critique": "types",
    "CritiqueRequest": "types",
    "IntrinsicReward": "intrinsic",
    "LexiconCritic": "lexicon",
    "LocalCritic": "local",
    "OpenAICritic": "openai",
    "PromptFileError": "template",
    "PromptTemplate": "template",
    "RandomSpanCritic": "random_spans",
    "RecordingCritic": "replay",
    "ReplayCritic": "replay",
    "Span": "types",
    "SpanRewards": "align",
    "critic_text": "align",
    "parse_critique": "parse",
    "span_rewards": "align",
    "token_ranges": "align",
}
__all__ = [
    "AttributionCritic",
    "Critic",
    "CriticAuthError",
    "CriticFuseError",
    "CriticGoneError",
    "Critique",
    "CritiqueRequest",
    "IntrinsicReward",
    "LexiconCritic",
    "LocalCritic",
    "OpenAICritic",
    "PromptFileError",
    "PromptTemplate",
    "RandomSpanCritic",
    "RecordingCritic",
    "ReplayCritic",
    "Span",
    "SpanRewards",
    "critic_text",
    "parse_critique",
    "span_rewards",
    "token_ranges",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'trl.critic' has no attribute {name!r}")
    return getattr(importlib.import_module(f"trl.critic.{_HOME[name]}"), name)
