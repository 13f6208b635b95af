"""cloudRunRewardScorer: a reward service of the user's own, asked over HTTP.

The service gets ``{"example", "response", "metadata": {"step", "tuning_job_id"}}`` and answers
``{"reward": number, "user_requested_aux_info"?: text}``.

The environment variable REWARD_SERVICE_TOKEN, where it is set, is sent as a bearer token to every service of the
configuration (never over plain http to another machine); no log line, error or repr of this module holds it.
"""

import logging
import math
import os
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

from trl.loopback import is_loopback
from trl.rewards.endpoint import Answer, JsonEndpoint, public_url
from trl.rewards.scoring import Sample, Verdict, failure

logger = logging.getLogger(__name__)

TOKEN_VARIABLE = "REWARD_SERVICE_TOKEN"
SECONDS = 300.0
"""What one answer may take."""
RETRIES = 5
"""After 2, 4, 8, 16 and 32 seconds."""
_LONGEST_AUX = 10_000


class CloudRunReward:
    """Asks one service about every response.

    Lost connections, timeouts, 429 and 5xx are retried; every other failure, and a reply without a finite number as
    its reward, is no verdict at once.

    Args:
        uri: https, or http on this machine.
        timeout: seconds for one answer.
        allow_http: also plain http on other machines.
        tuning_job_id: what the service is told.
        backoff: the first wait before a retry, in units of 2 seconds.

    Raises ValueError for an address that may not be asked.
    """

    def __init__(
        self,
        uri: str,
        *,
        timeout: float | None = None,
        allow_http: bool = False,
        tuning_job_id: int = 0,
        max_concurrency: int = 16,
        backoff: float = 1.0,
    ) -> None:
        safe = urlsplit(uri).scheme == "https" or is_loopback(uri)
        if not safe and not allow_http:
            raise ValueError(
                f"{public_url(uri)!r} is not https; expected https, http on this machine, or allow_http for plain "
                "http elsewhere"
            )
        token = os.environ.get(TOKEN_VARIABLE, "").strip()
        if token and not safe:
            logger.warning("%s is not sent to %s: not https", TOKEN_VARIABLE, public_url(uri))
        self._endpoint = JsonEndpoint(
            uri,
            {"authorization": f"Bearer {token}" if token and safe else None},
            max_concurrency=max_concurrency,
            timeout=SECONDS if timeout is None else timeout,
            max_retries=RETRIES,
            backoff=backoff,
            jitter=False,
        )
        self._job, self._token = tuning_job_id, token
        logger.info("Reward service: data rows and responses are sent to %s", self._endpoint.url)

    def score(self, samples: Sequence[Sample]) -> list[Verdict]:
        return [_verdict(answer, self._token) for answer in self._endpoint.post_all(map(self._body, samples))]

    def close(self) -> None:
        self._endpoint.close()

    def _body(self, sample: Sample) -> dict[str, Any]:
        metadata = {"step": sample.step, "tuning_job_id": self._job}
        return {"example": sample.example, "response": sample.content, "metadata": metadata}


def _verdict(answer: Answer, token: str) -> Verdict:
    if answer.error is not None:
        return failure(f"the service gave no reward: {answer.error}")
    if not isinstance(answer.data, dict) or "reward" not in answer.data:
        return failure("the service's reply has no reward")
    aux = answer.data.get("user_requested_aux_info")
    shown = str(aux).replace(token, "[token]") if token else str(aux)  # services echo what they get
    stages = {} if aux is None else {"aux info": shown[:_LONGEST_AUX]}
    reward = answer.data["reward"]
    if isinstance(reward, bool) or not isinstance(reward, int | float):
        return failure(f"the service's reward is a {type(reward).__name__}, not a number", stages)
    try:
        value = float(reward)
    except OverflowError:
        value = math.inf
    return (
        Verdict(value, None, stages) if math.isfinite(value) else failure("the service's reward is not finite", stages)
    )
