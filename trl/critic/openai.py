"""OpenAICritic: an LLM behind any endpoint that speaks OpenAI's chat protocol."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from trl.chat_session import Reply
from trl.clients import ChatClient, EndpointAuthError
from trl.critic.fuse import Fuse
from trl.critic.parse import parse_critique
from trl.critic.template import PromptTemplate
from trl.critic.types import Call, CriticGoneError, Critique, CritiqueRequest
from trl.limits import Budget, RateLimit
from trl.reply_cache import ReplyCache, reply_key

logger = logging.getLogger(__name__)


class CriticAuthError(EndpointAuthError, CriticGoneError):
    """The critic's endpoint refuses the key (401, 403) or does not know the model (404)."""


class OpenAICritic:
    """Shows each text to a chat model (OpenAI, vLLM, llama.cpp, Ollama, ``transformers serve``).

    The key is read from OPENAI_API_KEY. Before the first critique one tiny request, outside cache and budget,
    checks key and model. A request that fails for another reason, after its retries, costs that sample its
    critique: status "failed", with the reason in ``error``. Identical prompts of one batch are asked once.

    Limits are for the whole run: its processes (``WORLD_SIZE``) get an equal part each.

    Args:
        template: the prompt, which also sets style and stop sequences.
        model: the model's name at the endpoint.
        base_url: the endpoint; None: OpenAI (or OPENAI_BASE_URL).
        max_tokens, max_concurrency, timeout, deadline, max_retries, backoff: see
            :class:`trl.clients.ChatClient`; times in seconds. One ``critique`` takes at most ``deadline``.
        requests_per_minute, tokens_per_minute: how fast to ask. Tokens are those of prompt and reply.
        cache: folder that keeps replies, also for other processes and later runs. Failures are not kept.
        budget_requests: most requests to send, with retries. What is over the budget is "skipped".
        budget_usd: most dollars to spend; needs ``prices``.
        prices: dollars per million prompt tokens and per million reply tokens.
        fuse_seconds: see :class:`trl.critic.fuse.Fuse`. Until the fuse blows, a critic of which more than 80 % of
            the calls fail is asked one request per ``critique``, without retries; the others fail unasked.

    Raises:
        CriticAuthError: no key; or from ``critique``: the endpoint answered 401, 403 or 404. Once a request
            has succeeded only 401 raises, since hosts also answer 403 for a text that they moderate.
        CriticFuseError: from ``critique``, when the critic has been gone for ``fuse_seconds``.
    """

    def __init__(
        self,
        template: PromptTemplate,
        model: str = "gpt-3.5-turbo",
        *,
        base_url: str | None = None,
        max_tokens: int = 256,
        max_concurrency: int = 16,
        timeout: float = 30.0,
        deadline: float = 120.0,
        max_retries: int = 5,
        backoff: float = 0.5,
        requests_per_minute: int | None = None,
        tokens_per_minute: int | None = None,
        cache: str | Path | None = None,
        budget_requests: int | None = None,
        budget_usd: float | None = None,
        prices: tuple[float, float] | None = None,
        fuse_seconds: float = 300.0,
    ) -> None:
        self._template = template
        try:
            self._client = ChatClient(
                model,
                base_url=base_url,
                max_tokens=max_tokens,
                stop=template.stop,
                max_concurrency=max_concurrency,
                timeout=timeout,
                deadline=deadline,
                max_retries=max_retries,
                backoff=backoff,
                rate=RateLimit.of_run(requests_per_minute, tokens_per_minute),
                budget=Budget.of_run(budget_requests, budget_usd, prices),
            )
        except EndpointAuthError as error:
            raise CriticAuthError(str(error)) from None
        self._cache = None if cache is None else ReplyCache(cache)
        self._sampling = {"temperature": 0, "max_tokens": max_tokens, "stop": list(template.stop)}
        self._fuse = Fuse(fuse_seconds)
        self._checked = False  # True once the endpoint was asked whether it accepts us
        self._accepted = False  # True once it has answered a request
        logger.info("Critic: prompts and responses are sent to %s (model %s)", self._client.endpoint, model)

    def preflight(self) -> None:
        """Ask one tiny question, the first time, to learn whether key, endpoint and model are accepted.

        Another failure (the server is starting, say) is logged; the requests that follow show what it was.

        Raises:
            CriticAuthError: the endpoint answered 401, 403 or 404.
        """
        if self._checked:
            return
        try:
            reply = self._client.preflight()
        except EndpointAuthError as error:
            raise CriticAuthError(str(error)) from None
        self._checked = True
        self._accepted = reply.error is None
        if reply.error is not None:
            logger.warning("Critic: the first request to %s failed: %s", self._client.endpoint, reply.error)

    def critique(self, requests: Sequence[CritiqueRequest]) -> list[Critique]:
        """One critique per request, in order."""
        if not requests:
            return []
        self.preflight()
        prompts = [self._template.fill(request) for request in requests]
        distinct = list(dict.fromkeys(prompts))
        critiques = self._from_cache(distinct)
        unknown = [prompt for prompt in distinct if prompt not in critiques]
        if self._fuse.tripping:
            unasked = Critique((), "failed", error="not asked: the critic's endpoint is failing", call=Call(requests=0))
            critiques |= dict.fromkeys(unknown[1:], unasked)
            replies = self._client.complete(unknown[:1], retry=False)
        else:
            replies = self._client.complete(unknown)
        answered = dict(zip(unknown, replies, strict=False))
        self._keep(answered)
        self._watch(replies)
        critiques |= {prompt: self._critique(reply) for prompt, reply in answered.items()}
        return _in_order(prompts, critiques)

    def close(self) -> None:
        """Close the connections to the endpoint."""
        self._client.close()

    def _key(self, prompt: str) -> str:
        return reply_key(
            endpoint=self._client.endpoint,
            model=self._client.model,
            template=self._template.digest,
            sampling=self._sampling,
            prompt=prompt,
        )

    def _from_cache(self, prompts: Sequence[str]) -> dict[str, Critique]:
        if self._cache is None:
            return {}
        keys = {prompt: self._key(prompt) for prompt in prompts}
        replies = self._cache.get(list(keys.values()))
        return {
            prompt: replace(parse_critique(replies[key], self._template.style), call=Call(requests=0, cached=True))
            for prompt, key in keys.items()
            if key in replies
        }

    def _keep(self, answered: dict[str, Reply]) -> None:
        if self._cache is not None:
            self._cache.put({self._key(p): reply.text for p, reply in answered.items() if reply.text is not None})

    def _watch(self, replies: Sequence[Reply]) -> None:
        """Stop for good where the endpoint refuses us or is gone."""
        for reply in replies:
            if reply.status_code == 401 or not self._accepted:
                try:
                    self._client.raise_if_refused(reply)
                except EndpointAuthError as error:
                    raise CriticAuthError(str(error)) from None
        self._accepted = self._accepted or any(reply.error is None for reply in replies)
        sent = [reply for reply in replies if reply.attempts]  # what the limits held back says nothing here
        for reply in sent:
            self._fuse.record(reply.error)
        if sent:
            self._fuse.check()

    def _critique(self, reply: Reply) -> Critique:
        call = Call(
            requests=reply.attempts,
            latency=reply.latency,
            tokens_in=reply.tokens_in,
            tokens_out=reply.tokens_out,
            usd=reply.usd,
        )
        if reply.over_budget:
            return Critique((), "skipped", error=reply.error, call=call)
        if reply.text is None:
            return Critique((), "failed", error=reply.error, call=call)
        return replace(parse_critique(reply.text, self._template.style), call=call)


def _in_order(prompts: Sequence[str], critiques: dict[str, Critique]) -> list[Critique]:
    """One critique per prompt; where a prompt comes again, getting its critique took nothing."""
    ordered, seen = [], set()
    for prompt in prompts:
        critique = critiques[prompt]
        if prompt in seen:
            cached = critique.call is not None and critique.call.cached
            critique = replace(critique, call=Call(requests=0, cached=cached))
        seen.add(prompt)
        ordered.append(critique)
    return ordered
