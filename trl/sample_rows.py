"""What samples.jsonl keeps of a step's responses."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from trl.critic.types import Critique


def sample_rows(
    queries: Sequence[str],
    responses: Sequence[str],
    scores: Sequence[float | None],
    token_texts: Sequence[Sequence[str]],
    rollout: Sequence[dict[str, Any]],
    intrinsic: Sequence[Any] = (),
    critiques: Sequence[Critique] = (),
) -> list[dict[str, Any]]:
    """Rows of samples.jsonl, one per response of ``token_texts``, token by token.

    ``rollout`` is ``PPOTrainer.last_rollout``; ``intrinsic`` (N_i,) and ``critiques`` come from the critic and
    are empty without one.
    """
    rows = []
    for i, texts in enumerate(token_texts):
        columns = {name: rollout[i][name].tolist() for name in ("kl", "value", "advantage")}
        columns["intrinsic"] = intrinsic[i].tolist() if intrinsic else [0.0] * len(texts)
        tokens = [
            {"text": text, **{name: round(values[j], 5) for name, values in columns.items()}}
            for j, text in enumerate(texts)
        ]
        critique = critiques[i] if critiques else None
        rows.append(
            {
                "query": queries[i],
                "response": responses[i],
                "score": scores[i],
                "tokens": tokens,
                "spans": [asdict(span) for span in critique.spans] if critique else [],
                "reply": critique.reply if critique else None,
                "status": critique.status if critique else None,
            }
        )
    return rows
