import json
import math
import multiprocessing
import os
from pathlib import Path
from typing import Any

import pytest

from tests.critic.test_intrinsic import TOKENIZER, ids_of
from trl.critic.intrinsic import IntrinsicReward
from trl.critic.lexicon import LexiconCritic
from trl.critic.replay import RecordingCritic, ReplayCritic
from trl.critic.types import Critique, CritiqueRequest, Span
from trl.jsonl import DataFileError

TEXTS = ["A great film.", "A bad film with a great cast.", "A film.", "naïve “bad” 🎬\tfilm \ud83d"]


class Fixed:
    """A critic with one answer."""

    def __init__(self, answer: Critique) -> None:
        self.answer = answer

    def critique(self, requests: Any) -> list[Critique]:
        return [self.answer for _ in requests]


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def row(text: str, *quotes: str, **fields: Any) -> dict[str, Any]:
    spans = [{"text": quote, "polarity": "negative"} for quote in quotes]
    return {"request": {"text": text}, "spans": spans, **fields}


def test_replay_gives_what_was_recorded(tmp_path: Path) -> None:
    path = tmp_path / "new" / "critiques.jsonl"
    requests = [CritiqueRequest(text, score=0.5, start=2) for text in TEXTS]
    critic = RecordingCritic(LexiconCritic(), path)
    recorded = critic.critique(requests[:3]) + critic.critique(requests[3:])
    assert recorded == LexiconCritic().critique(requests)
    assert ReplayCritic(path).critique(requests) == recorded
    # the order and number of requests don't matter
    assert ReplayCritic(path).critique([requests[1], requests[0], requests[1]]) == [recorded[i] for i in (1, 0, 1)]
    assert len(ReplayCritic(path)) == 4


def test_row_format(tmp_path: Path) -> None:
    answer = Critique((Span("bad", "negative", "Incoherent"),), "ok", reply="Span 1: bad (Label: Incoherent)")
    request = CritiqueRequest("a bad text", document="The post", score=-math.inf, start=1)
    RecordingCritic(Fixed(answer), tmp_path / "c.jsonl").critique([request])
    assert json.loads((tmp_path / "c.jsonl").read_text()) == {
        "request": {"text": "a bad text", "document": "The post", "score": None, "start": 1},
        "reply": "Span 1: bad (Label: Incoherent)",
        "status": "ok",
        "spans": [{"text": "bad", "polarity": "negative", "label": "Incoherent"}],
        "error": None,
        "call": None,
    }
    assert ReplayCritic(tmp_path / "c.jsonl").critique([request]) == [answer]


def test_replay_of_a_run(tmp_path: Path) -> None:
    """Every run with a critic leaves such a file."""
    critic = LexiconCritic()
    reward = IntrinsicReward(
        critic,
        TOKENIZER,
        "sentiment",
        threshold=1,
        positive_value=1,
        negative_value=-1,
        log_path=tmp_path / "critiques.jsonl",
    )
    responses = [ids_of(" a great film"), ids_of(" a bad end")]
    rewards = reward.submit([ids_of("It is")] * 2, responses, [0.0, 0.5]).result()
    again = IntrinsicReward(
        ReplayCritic(tmp_path / "critiques.jsonl"),
        TOKENIZER,
        "sentiment",
        threshold=1,
        positive_value=1,
        negative_value=-1,
    )
    replayed = again.submit([ids_of("It is")] * 2, responses[::-1], [0.5, 0.0]).result()
    assert [reward.tolist() for reward in replayed] == [reward.tolist() for reward in rewards[::-1]]
    assert all(any(reward.tolist()) for reward in rewards)


def test_every_call_is_on_disk_when_it_returns(tmp_path: Path) -> None:
    critic = RecordingCritic(LexiconCritic(), tmp_path / "c.jsonl")
    for count in (1, 2, 3):
        critic.critique([CritiqueRequest("A film.")])
        assert (tmp_path / "c.jsonl").read_text().count("\n") == count
    critic.critique([])
    assert (tmp_path / "c.jsonl").read_text().count("\n") == 3


def test_recording_continues_after_a_torn_line(tmp_path: Path) -> None:
    path = write(tmp_path / "c.jsonl", row("first", "first"))
    with path.open("a") as file:
        file.write('{"request": {"text": "to')
    replayed = ReplayCritic(path).critique([CritiqueRequest("first"), CritiqueRequest("torn")])
    assert [critique.status for critique in replayed] == ["ok", "failed"]
    RecordingCritic(LexiconCritic(), path).critique([CritiqueRequest("A film.")])
    assert [json.loads(line)["request"]["text"] for line in path.read_text().splitlines()] == ["first", "A film."]


def test_missing_entry_fails_and_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "c.jsonl", row("a bad film", "bad"))
    (critique,) = ReplayCritic(path).critique([CritiqueRequest("another film")])
    assert (critique.status, critique.spans, critique.reply) == ("failed", (), None)
    assert critique.error is not None
    assert "another film" in critique.error and str(path) in critique.error
    (critique,) = ReplayCritic(path).critique([CritiqueRequest("x" * 10_000)])
    assert critique.error is not None and len(critique.error) < 200 + len(str(path))
    # the document is part of the question
    assert ReplayCritic(path).critique([CritiqueRequest("a bad film", document="post")])[0].status == "failed"
    assert ReplayCritic(path).critique([CritiqueRequest("a bad film", score=3.0, start=1)])[0].status == "ok"


def test_last_answer_counts_and_failures_do_not_replace_answers(tmp_path: Path) -> None:
    path = write(
        tmp_path / "c.jsonl",
        row("twice", "one"),
        row("twice", "two"),
        row("later", status="failed", error="HTTP 500"),
        row("later", "found"),
        row("earlier", "found"),
        row("earlier", status="failed", error="HTTP 500"),
        row("earlier", status="skipped"),
        row("never", status="failed", error="HTTP 500"),
        row("never", status="failed", error="HTTP 429"),
        row("refused", "found"),
        row("refused", status="unparsable", reply="I can't."),
    )
    texts = ["twice", "later", "earlier", "never", "refused"]
    critiques = ReplayCritic(path).critique([CritiqueRequest(text) for text in texts])
    assert [[span.text for span in critique.spans] for critique in critiques] == [["two"], ["found"], ["found"], [], []]
    assert [critique.status for critique in critiques] == ["ok", "ok", "ok", "failed", "unparsable"]
    assert (critiques[3].error, critiques[4].reply) == ("HTTP 429", "I can't.")


def test_file_by_hand(tmp_path: Path) -> None:
    """Only text and spans are needed, blank lines and other fields don't matter, nor does the last newline."""
    path = tmp_path / "c.jsonl"
    lines = [row("bad film", "bad", token_rewards=[0, 1]), row("good film")]
    path.write_text("\n\n".join(map(json.dumps, lines)))
    critiques = ReplayCritic(path).critique([CritiqueRequest("bad film"), CritiqueRequest("good film")])
    assert critiques == [Critique((Span("bad", "negative"),), "ok"), Critique((), "none")]


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        ("{not json", "JSON"),
        ("[1]", "object"),
        ({"text": "a"}, "request"),
        ({"request": {"text": 3}, "spans": []}, "request"),
        ({"request": {"text": "a"}, "spans": None}, "request"),
        ({"request": {"text": "a", "document": 3}, "spans": []}, "document"),
        (row("a", status="fine"), "'fine'"),
        (row("a", reply=3), "reply"),
        ({"request": {"text": "a"}, "spans": ["bad"]}, "span"),
        ({"request": {"text": "a"}, "spans": [{"text": "bad", "polarity": "neutral"}]}, "neutral"),
        ({"request": {"text": "a"}, "spans": [{"text": "bad", "polarity": "negative", "label": 1}]}, "span"),
    ],
)
def test_bad_line_is_named(tmp_path: Path, bad: Any, reason: str) -> None:
    path = write(tmp_path / "c.jsonl", row("fine"), bad, row("fine too"))
    with pytest.raises(DataFileError, match=r"(line|row) 2") as raised:
        ReplayCritic(path)
    assert str(path) in str(raised.value) and reason in str(raised.value)


def test_empty_or_missing_file(tmp_path: Path) -> None:
    with pytest.raises(DataFileError, match="empty"):
        ReplayCritic(write(tmp_path / "c.jsonl"))
    with pytest.raises(FileNotFoundError):
        ReplayCritic(tmp_path / "none.jsonl")


def test_unwritable_file_is_an_error_at_start(tmp_path: Path) -> None:
    with pytest.raises(OSError):
        RecordingCritic(LexiconCritic(), tmp_path)


def _record(path: Path, name: str, calls: int) -> None:
    critic = RecordingCritic(LexiconCritic(), path)
    for call in range(calls):
        critic.critique([CritiqueRequest(f"{name} {call} {row} " + "a great film " * 500) for row in range(4)])


def test_processes_share_a_recording(tmp_path: Path) -> None:
    path = tmp_path / "c.jsonl"
    context = multiprocessing.get_context("fork" if os.name == "posix" else "spawn")
    workers = [context.Process(target=_record, args=(path, name, 10)) for name in "abc"]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(120)
        assert worker.exitcode == 0
    assert len(path.read_text().splitlines()) == len(ReplayCritic(path)) == 120
