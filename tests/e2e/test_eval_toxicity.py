"""The toxicity evaluation as users run it: subprocesses against a real local server, kills at random points."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.e2e.killing import count_lines, kill_when_written, tear_last_line
from tests.fake_openai import Answer
from tests.fake_perspective import FakePerspective, google_error, score_of
from tests.rewards.toy_classifiers import TEXTS as WORDS
from tests.rewards.toy_classifiers import save_classifier
from trl.jsonl import read_jsonl
from trl.metrics import bootstrap_interval

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "eval_scripts" / "eval_toxicity_perspective.py"
KEY = "AIzaSy-test-0123456789abcdef"
NAMES = [
    "toxicity",
    "severe_toxicity",
    "identity_attack",
    "insult",
    "profanity",
    "threat",
    "sexually_explicit",
    "flirtation",
]


def environment(**more: str) -> dict[str, str]:
    quiet = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    inherited = {name: value for name, value in os.environ.items() if name != "PERSPECTIVE_API_KEY"}
    return {**inherited, **quiet, **more}


def command(data: Path, output: Path, *arguments: Any) -> list[str]:
    return [
        *(sys.executable, str(SCRIPT), "--data_file", str(data), "--output_file", str(output)),
        *map(str, arguments),
    ]


def start(data: Path, output: Path, *arguments: Any, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(data, output, *arguments), env=environment(**more), capture_output=True, text=True, timeout=300
    )


def run(data: Path, output: Path, *arguments: Any, **more: str) -> dict[str, Any]:
    """Run to the end; the last line on stdout is one strict JSON object."""
    done = start(data, output, *arguments, **more)
    assert done.returncode == 0, done.stderr
    assert KEY not in done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1], parse_constant=lambda name: pytest.fail(f"{name} in JSON"))


def perspective(server: FakePerspective, qps: float = 2000) -> tuple[Any, ...]:
    return ("--toxicity_endpoint", server.url, "--perspective_qps", qps, "--num_thread", 4)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """30 prompts with 4 generations; some texts occur twice, some are blank."""
    draw = random.Random(0)
    rows = []
    for index in range(30):
        texts = [f" continuation {draw.randrange(80)} é🙂" for _ in range(3)] + [" \n" if index % 10 == 0 else "same"]
        generations = [{"text": text, "nll": index} for text in texts]
        rows.append({"prompt": {"text": f"prompt {index}"}, "id": index, "generations": generations})
    path = tmp_path / "generations.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def distinct(data: Path) -> set[str]:
    return {item["text"] for row in read_jsonl(data) for item in row["generations"] if item["text"].strip()}


def test_scores_statistics_and_rows(data: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    with FakePerspective() as server:
        summary = run(data, output, *perspective(server), "--save_scores", PERSPECTIVE_API_KEY=KEY)
    assert server.asked == dict.fromkeys(distinct(data), 1)
    assert set(server.keys) == {KEY}
    rows, written = read_jsonl(data), read_jsonl(output)
    groups: dict[str, list[list[float]]] = {name: [] for name in NAMES}
    for row, result in zip(rows, written, strict=True):
        assert {**result, "generations": None} == {**row, "generations": None}
        for name in NAMES:
            groups[name].append([])
        for item, scored in zip(row["generations"], result["generations"], strict=True):
            assert scored["nll"] == item["nll"]
            blank = not item["text"].strip()
            assert scored.get("score_error") == ("empty text, not scored" if blank else None)
            for name in NAMES:
                expected = None if blank else score_of(item["text"], name.upper())
                assert scored[name] == expected
                if expected is not None:
                    groups[name][-1].append(expected)
    assert list(summary["attributes"]) == NAMES
    for name in NAMES:
        got = summary["attributes"][name]
        assert (got["prompts"], got["scored"]) == (30, 117)
        for statistic, of_group in {"average": np.mean, "expected_maximum": np.max}.items():
            interval = bootstrap_interval([of_group(group) for group in groups[name]])
            assert got[statistic] == pytest.approx(interval._asdict())
        shares = [float(any(score >= 0.5 for score in group)) for group in groups[name]]
        assert got["probability"] == pytest.approx(bootstrap_interval(shares)._asdict())
    assert (summary["prompts"], summary["generations"], summary["most_generations_per_prompt"]) == (30, 120, 4)
    assert summary["errors"] == {"empty text, not scored": 3}
    assert summary["prompts_with_errors"] == 3


def test_without_save_scores_the_file_holds_the_result_and_nothing_is_asked_again(data: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    with FakePerspective() as server:
        summary = run(data, output, *perspective(server))
        assert read_jsonl(output) == [summary]
        assert run(data, output, *perspective(server)) == summary
        run(data, output, *perspective(server), "--save_scores")
    assert len(read_jsonl(output)) == 30
    assert set(server.asked.values()) == {1}


@pytest.mark.parametrize("seed", [0, 1])
def test_killed_at_random_points_it_ends_with_the_same_file_and_pays_no_score_twice(
    data: Path, tmp_path: Path, seed: int
) -> None:
    long = [{"text": sign * 9000} for sign in ("bad ", "плохо", "糟", "🤬", "e\u0301")]
    with data.open("a") as file:
        file.write(json.dumps({"prompt": {"text": "long"}, "generations": long}) + "\n")
    whole, output = tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    scores = tmp_path / "out.jsonl.scores.jsonl"
    texts = distinct(data)

    def storms(text: str, nth: int) -> Answer | None:
        return google_error(429, "quota", retry_after="0") if nth == 1 and score_of(text) < 0.3 else None

    with FakePerspective() as server:
        expected = run(data, whole, *perspective(server), "--save_scores")
    draw = random.Random(seed)
    points = sorted(draw.sample(range(2, len(texts) - 8), 3))
    lost = 0
    with FakePerspective(storms, delay=0.02) as server:
        arguments = (*perspective(server, qps=100), "--save_scores")
        for point in points:
            before = server.answered.copy()
            kept = count_lines(scores)
            kill_when_written(command(data, output, *arguments), scores, point, environment())
            server.wait_idle()
            assert not output.exists()
            lost += sum((server.answered - before).values()) - (count_lines(scores) - kept)
            if seed:  # and its last line is torn
                content = scores.read_bytes()
                scores.write_bytes(content[: content.rstrip(b"\n").rfind(b"\n") + 1 + 20])
                lost += 1
        assert run(data, output, *arguments) == {**expected, "output_file": str(output)}
        repeated = sum(server.answered.values()) - len(texts)
        assert server.too_long == []
    assert output.read_bytes() == whole.read_bytes()
    assert sorted(row["text"] for row in read_jsonl(scores)) == sorted(texts)
    # Only what the server had sent and the killed process had not yet written is asked again: one text per thread.
    assert repeated == lost <= 3 * (4 + 1)


def test_passing_failures_are_asked_again_by_the_next_run_and_others_are_not(data: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    bad = sorted(distinct(data))[:4]
    down = {"now": True}

    def fault(text: str, nth: int) -> Answer | None:
        if text == bad[0]:
            return google_error(400, "Attribute INSULT does not support request languages: tlh")
        if text == bad[1]:
            return Answer(200, b'{"attributeScores": {}}')
        return Answer(200, b"not JSON") if text in bad[2:] and down["now"] else None

    with FakePerspective(fault) as server:
        first = run(data, output, *perspective(server), "--save_scores")
        down["now"] = False
        second = run(data, output, *perspective(server), "--save_scores")
    count = {text: sum(item["text"] == text for r in read_jsonl(data) for item in r["generations"]) for text in bad}
    final = {"language not supported": count[bad[0]], "empty text, not scored": 3}
    missing = f"no score for {', '.join(name.upper() for name in NAMES)} in the reply"
    final[missing] = count[bad[1]]
    assert second["errors"] == final
    assert first["errors"] == {**final, "malformed reply (not JSON)": count[bad[2]] + count[bad[3]]}
    assert [server.asked[text] for text in bad] == [1, 1, 2, 2]
    items = [item for row in read_jsonl(output) for item in row["generations"]]
    assert all((item["toxicity"] is None) == ("score_error" in item) for item in items)


def test_a_service_that_is_gone_stops_the_run_with_all_scores_kept(tmp_path: Path) -> None:
    path, output = tmp_path / "generations.jsonl", tmp_path / "out.jsonl"
    rows = [{"prompt": {"text": "p"}, "generations": [{"text": f"text {n}"}]} for n in range(300)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with FakePerspective(lambda text, nth: Answer(200, b"{") if len(server.answered) >= 20 else None) as server:
        done = start(path, output, *perspective(server), PERSPECTIVE_API_KEY=KEY)
    assert done.returncode == 1
    assert "50 texts in a row got no score (malformed reply (not JSON))" in done.stderr
    assert "Traceback" not in done.stderr and KEY not in done.stderr
    assert 20 <= count_lines(tmp_path / "out.jsonl.scores.jsonl") < 60
    assert sum(server.asked.values()) < 120


def test_a_classifier_replaces_the_service_and_resumes(tmp_path: Path) -> None:
    from trl.rewards.toxicity import load_toxicity_scorer

    model = str(save_classifier(tmp_path / "model", ["non-toxic", "toxic"]))
    draw = random.Random(0)
    words = " ".join(WORDS).split()
    texts = [" ".join(draw.choices(words, k=draw.randint(1, 20))) for _ in range(3000)]
    rows = [
        {"prompt": {"text": "p"}, "generations": [{"text": text} for text in texts[start : start + 3]]}
        for start in range(0, 3000, 3)
    ]
    path, output = tmp_path / "generations.jsonl", tmp_path / "out.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    summary = run(path, output, "--scorer", model, "--save_scores")
    written = [item[model] for row in read_jsonl(output) for item in row["generations"]]
    np.testing.assert_allclose(written, load_toxicity_scorer(model)(texts), atol=1e-5)
    maxima = [max(written[start : start + 3]) for start in range(0, 3000, 3)]
    assert summary["attributes"][model]["expected_maximum"]["mean"] == pytest.approx(np.mean(maxima))
    again, scores = tmp_path / "again.jsonl", tmp_path / "again.jsonl.scores.jsonl"
    line = command(path, again, "--scorer", model, "--save_scores")
    kill_when_written(line, scores, random.Random(3).randrange(100, 1000), environment())
    assert not again.exists()
    tear_last_line(scores)
    assert run(path, again, "--scorer", model, "--save_scores") == {**summary, "output_file": str(again)}
    assert again.read_bytes() == output.read_bytes()
    other = str(save_classifier(tmp_path / "other", ["sunny", "rainy"]))
    done = start(path, tmp_path / "weather", "--scorer", other)
    assert done.returncode == 1 and "rainy" in done.stderr and "Traceback" not in done.stderr


def test_sample_size_draws_rows_reproducibly(data: Path, tmp_path: Path) -> None:
    with FakePerspective() as server:
        for name in ("a", "b"):
            summary = run(data, tmp_path / name, *perspective(server), "--sample_size", 7, "--save_scores")
            assert summary["prompts"] == 7
    ids = [row["id"] for row in read_jsonl(tmp_path / "a")]
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert ids == sorted(ids) and ids != list(range(7))


def test_the_key_is_nowhere(data: Path, tmp_path: Path) -> None:
    echo = google_error(400, f"odd request with key {KEY}")
    with FakePerspective(lambda text, nth: echo if text == "same" else None) as server:
        run(data, tmp_path / "out.jsonl", *perspective(server), "--perspective_api", KEY, "--save_scores")
    assert set(server.keys) == {KEY} and not any(KEY in path for path in server.paths)
    with FakePerspective(lambda text, nth: google_error(403, f"not with {KEY}")) as server:
        done = start(data, tmp_path / "refused.jsonl", *perspective(server), "--perspective_api", KEY)
    assert done.returncode == 1
    assert "answered HTTP 403" in done.stderr and "builtin:toxicity" in done.stderr
    assert "Traceback" not in done.stderr and KEY not in done.stdout + done.stderr
    files = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert len(files) >= 4
    assert all(KEY.encode() not in file.read_bytes() for file in files)


def test_problems_are_one_line(data: Path, tmp_path: Path) -> None:
    precious = tmp_path / "precious.jsonl"
    precious.write_text('{"precious": 1}\n')
    for output, arguments, message in (
        (tmp_path / "out", (), "set the environment variable PERSPECTIVE_API_KEY"),
        (tmp_path / "out", ("--perspective_api", "x", "--perspective_qps", 0), "qps is 0"),
        (precious, (), "precious.jsonl exists and"),
        (data, (), "is the data file"),
        (tmp_path / "out", ("--sample_size", 0), "--sample_size is 0"),
    ):
        done = start(data, output, *arguments)
        assert done.returncode == 1
        assert message in done.stderr and "Traceback" not in done.stderr
        assert done.stderr.strip().splitlines()[-1].startswith("error: ")
    assert precious.read_text() == '{"precious": 1}\n'
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"prompt": {"text": "a"}, "generations": [{"text": 3}]}\n')
    done = start(bad, tmp_path / "out")
    assert done.returncode == 1 and "row 1: expected" in done.stderr


def test_help_says_that_the_service_ends_and_names_the_replacement() -> None:
    done = subprocess.run([sys.executable, str(SCRIPT), "--help"], env=environment(), capture_output=True, text=True)
    text = " ".join(done.stdout.split())
    assert "ends on 2026-12-31" in text and "--scorer builtin:toxicity" in text
    assert all(
        flag in text
        for flag in ("--data_file", "--output_file", "--sample_size", "--num_thread", "--save_scores", "--scorer")
    )
