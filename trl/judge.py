"""Which of two texts is better? A chat model says so, asked in both orders, so that liking the first one cancels out.

Judges prefer a place (Zheng et al. 2023, arXiv:2306.05685, §3.3). A pair's score is the mean over both orders: one half
where the judge took the same place twice.
"""

import json
import logging
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from trl.chat_session import Reply
from trl.clients import ChatClient
from trl.reply_cache import ReplyCache, reply_key
from trl.rewards.placeholders import fill, names_in

logger = logging.getLogger(__name__)

PROMPT = """Two writers were given the same beginning. Compare what they wrote by this criterion: {{criterion}}

Beginning:
{{prompt}}

Text 1:
{{first}}

Text 2:
{{second}}

Their order means nothing, and length alone is no merit. Which text is better by the criterion? Reply with one word: 1,
2 or tie."""
CRITERION = "how well it continues the beginning: sense, fluency, relevance"

_VERDICT = re.compile(
    r"\W*(?:(?:the|my|final|verdict|answer|winner|choice|better|best|text|is)\W+)*(1|2|tie)\W*", re.IGNORECASE
)
MOST_FAILURES_IN_A_ROW = 20
DEADLINE = 3600.0
"""Seconds that one question may wait for limits per minute and for retries."""

Pair = tuple[str, str, str]
"""Prompt, the baseline's text, the other run's text."""


class JudgeGoneError(RuntimeError):
    """So many questions failed one after another that going on makes no sense; the replies so far are kept."""


@dataclass(frozen=True)
class Verdicts:
    scores: list[float | None]
    """Of each pair what the second run won of it, 0 to 1; None without two readable replies."""
    problems: dict[str, int]
    """Why replies are missing: reason → how many."""
    agreeing: int
    """Pairs whose two orders gave the same verdict."""
    first_preferred: float | None
    """Share of the replies for one text that were for the one shown first; 0.5 is a judge without a preferred place."""
    tokens_in: int
    tokens_out: int
    """Of all these replies, whenever they were asked for."""


class PairwiseJudge:
    """Asks an OpenAI-compatible endpoint about pairs of texts. Every reply is kept on disk as it arrives.

    Args:
        client: the endpoint, with its limits and budget.
        cache: folder of the replies; a later call asks only for what is not there.
        template: prompt with {{first}} and {{second}}, and if wanted {{prompt}} and {{criterion}}.
        criterion: what is better.

    Raises ValueError where the template lacks a text.
    """

    def __init__(
        self, client: ChatClient, cache: str | Path, template: str = PROMPT, criterion: str = CRITERION
    ) -> None:
        missing = {"first", "second"} - set(names_in(template))
        if missing:
            raise ValueError(f"the judge's prompt lacks {' and '.join(f'{{{{{name}}}}}' for name in sorted(missing))}")
        self._client, self._cache = client, ReplyCache(cache)
        self._template, self._criterion = template, criterion

    def compare(self, pairs: Sequence[Pair], on_reply: Callable[[], object] = lambda: None) -> Verdicts:
        """The verdicts on all pairs; ``on_reply`` is called once per question.

        Raises EndpointAuthError where the endpoint refuses key or model, JudgeGoneError where it fails for good.
        """
        prompts = [self._filled(*pair) for pair in pairs] + [self._filled(p, b, a) for p, a, b in pairs]
        replies = self._replies(prompts, on_reply)
        problems: Counter[str] = Counter()
        picks = []  # which text each reply prefers, 0 for neither, None for no verdict
        for prompt in prompts:
            pick, problem = _verdict(replies[prompt])
            picks.append(pick)
            problems.update([problem] if problem else [])
        scores: list[float | None] = []
        agreeing = 0
        for given, swapped in zip(picks[: len(pairs)], picks[len(pairs) :], strict=True):
            if given is None or swapped is None:
                scores.append(None)
                continue
            won = _SHARE[given], 1 - _SHARE[swapped]
            agreeing += won[0] == won[1]
            scores.append(sum(won) / 2)
        choices = [pick for pick in picks if pick]
        used = [replies[prompt] for prompt in dict.fromkeys(prompts)]
        return Verdicts(
            scores,
            dict(sorted(problems.items())),
            agreeing,
            choices.count(1) / len(choices) if choices else None,
            sum(reply.tokens_in for reply in used),
            sum(reply.tokens_out for reply in used),
        )

    def _filled(self, prompt: str, first: str, second: str) -> str:
        values = {"prompt": prompt, "first": first, "second": second, "criterion": self._criterion}
        return fill(self._template, values).encode(errors="replace").decode()  # half characters can't be sent

    def _replies(self, prompts: Sequence[str], on_reply: Callable[[], object]) -> dict[str, Reply]:
        keys = {prompt: self._key(prompt) for prompt in prompts}
        kept = self._cache.get(list(keys.values()))
        replies = {prompt: _from_json(kept[key]) for prompt, key in keys.items() if key in kept}
        for _ in replies:
            on_reply()
        unknown = [prompt for prompt in keys if prompt not in replies]
        logger.info("%d of %d replies are kept from before", len(replies), len(keys))
        if unknown:
            logger.info("Judge: texts are sent to %s (model %s)", self._client.endpoint, self._client.model)
            self._client.preflight()
        failures = 0
        for index, reply in self._client.complete_each(unknown):
            prompt = unknown[index]
            if reply.text is not None:
                self._cache.put({keys[prompt]: _to_json(reply)})
            replies[prompt] = reply
            on_reply()
            failures = failures + 1 if reply.text is None and not reply.over_budget else 0
            if failures == MOST_FAILURES_IN_A_ROW:
                raise JudgeGoneError(f"{failures} questions in a row failed ({reply.error}); what was answered is kept")
        return replies

    def _key(self, prompt: str) -> str:
        asked = {"endpoint": self._client.endpoint, "model": self._client.model, "tokens": self._client.max_tokens}
        return reply_key(judge="pairwise", prompt=prompt, **asked)


_SHARE = {0: 0.5, 1: 0.0, 2: 1.0}
"""What a reply for neither, the first or the second text is worth to the second."""


def _verdict(reply: Reply) -> tuple[int | None, str | None]:
    """Which text a reply is for (0: neither), or why that is not known. The last line counts."""
    if reply.text is None:
        return None, "over the budget" if reply.over_budget else f"no reply: {reply.error}"
    lines = reply.text.strip().splitlines()
    found = _VERDICT.fullmatch(lines[-1]) if lines else None
    if found is None:
        return None, "not 1, 2 or tie"
    return (0 if found[1].lower() == "tie" else int(found[1])), None


def _to_json(reply: Reply) -> str:
    return json.dumps({"text": reply.text, "tokens_in": reply.tokens_in, "tokens_out": reply.tokens_out})


def _from_json(kept: str) -> Reply:
    return Reply(**json.loads(kept))
