"""critiques.jsonl: everything that was asked of the critic, what it said, and what that was worth."""

from collections.abc import Sequence
from dataclasses import asdict
from io import FileIO
from pathlib import Path

from torch import Tensor

from trl.critic.types import Critique, CritiqueRequest
from trl.jsonl import append_rows

FILE = "critiques.jsonl"


class CritiqueLog:
    """Appends to one file, which several processes may share: each batch is a single write.

    A row is ``{step, request: {text, document, score, start}, status, reply, error, spans, call, rewards}``: a
    recording that :class:`trl.critic.replay.ReplayCritic` reads, and more. ``step`` is the training step, ``call`` says
    what an endpoint took, ``rewards`` has one number per response token.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)

    def write(
        self, step: int, requests: Sequence[CritiqueRequest], critiques: Sequence[Critique], rewards: Sequence[Tensor]
    ) -> None:
        """Append one batch. Raises OSError when the file can't be written."""
        rows = [
            {
                "step": step,
                "request": asdict(request),
                **asdict(critique),
                "rewards": [round(value, 5) for value in reward.tolist()],
            }
            for request, critique, reward in zip(requests, critiques, rewards, strict=True)
        ]
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with FileIO(self._path, "a") as file:
            append_rows(file, rows)
