"""OpenAICritic: an LLM behind any endpoint that speaks OpenAI's chat protocol."""

import logging
from collections.abc import Sequence

from trl.clients import ChatClient, EndpointAuthError, Reply
from trl.critic.parse import parse_critique
from trl.critic.template import PromptTemplate
from trl.critic.types import Critique, CritiqueRequest

logger = logging.getLogger(__name__)


class CriticAuthError(EndpointAuthError):
    """The critic's endpoint refuses the key (401, 403) or does not know the model (404)."""


class OpenAICritic:
    """Shows each text to a chat model (OpenAI, vLLM, llama.cpp, Ollama, ``transformers serve``).

    The key is read from OPENAI_API_KEY. Before the first critique one tiny request checks key and model.
    A request that fails for another reason, after its retries, costs that sample its critique: status
    "failed", with the reason in ``error``. Identical prompts of one batch are asked once.

    Args:
        template: the prompt, which also sets style and stop sequences.
        model: the model's name at the endpoint.
        base_url: the endpoint; None: OpenAI (or OPENAI_BASE_URL).
        max_tokens, max_concurrency, timeout, deadline, max_retries, backoff: see
            :class:`trl.clients.ChatClient`; times in seconds. One ``critique`` takes at most ``deadline``.

    Raises:
        CriticAuthError: no key; or from ``critique``: the endpoint answered 401, 403 or 404. Once a request
            has succeeded only 401 raises, since hosts also answer 403 for a text that they moderate.
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
            )
        except EndpointAuthError as error:
            raise CriticAuthError(str(error)) from None
        self._accepted = False  # True once the endpoint has answered a request
        logger.info("Critic: prompts and responses are sent to %s (model %s)", self._client.endpoint, model)

    def preflight(self) -> None:
        """Ask one tiny question to learn whether key, endpoint and model are accepted.

        Another failure (the server is starting, say) is logged, and the next ``critique`` asks again.

        Raises:
            CriticAuthError: the endpoint answered 401, 403 or 404.
        """
        try:
            reply = self._client.preflight()
        except EndpointAuthError as error:
            raise CriticAuthError(str(error)) from None
        self._accepted = reply.error is None
        if reply.error is not None:
            logger.warning("Critic: the first request to %s failed: %s", self._client.endpoint, reply.error)

    def critique(self, requests: Sequence[CritiqueRequest]) -> list[Critique]:
        """One critique per request, in order."""
        if not requests:
            return []
        if not self._accepted:
            self.preflight()
        prompts = [self._template.fill(request) for request in requests]
        distinct = list(dict.fromkeys(prompts))
        replies = self._client.complete(distinct)
        for reply in replies:
            self._stop_if_refused(reply)
        self._accepted = self._accepted or any(reply.error is None for reply in replies)
        critiques = {prompt: self._critique(reply) for prompt, reply in zip(distinct, replies, strict=True)}
        return [critiques[prompt] for prompt in prompts]

    def close(self) -> None:
        """Close the connections to the endpoint."""
        self._client.close()

    def _stop_if_refused(self, reply: Reply) -> None:
        if reply.status_code == 401 or not self._accepted:
            try:
                self._client.raise_if_refused(reply)
            except EndpointAuthError as error:
                raise CriticAuthError(str(error)) from None

    def _critique(self, reply: Reply) -> Critique:
        if reply.text is None:
            return Critique(spans=(), status="failed", error=reply.error)
        return parse_critique(reply.text, self._template.style)
