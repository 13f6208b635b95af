"""compare.py as users run it: files of the other scripts, a judge behind a real server, a kill in the middle."""

import json
import random
import runpy
import subprocess
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
import tyro

from tests.e2e.killing import kill_when_written
from tests.e2e.test_eval_scripts import ENVIRONMENT, SCRIPTS, command
from tests.fake_openai import Answer, FakeOpenAI, completion
from tests.test_comparison import generated, train, write
from tests.test_judge import KEY, shown
from trl.jsonl import DataFileError

ENVIRONMENT = {**ENVIRONMENT, "OPENAI_API_KEY": KEY}


def run(*arguments: Any) -> tuple[dict[str, Any], str]:
    """The final line and what the script said besides."""
    done = subprocess.run(command("compare.py", *arguments), env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert KEY not in done.stdout + done.stderr
    *_, last = done.stdout.splitlines()
    return json.loads(last, parse_constant=lambda name: pytest.fail(f"{name} in JSON")), done.stderr


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    draw = random.Random(0)
    paths = []
    for name, gain in (("base", 0.0), ("pipe|name", 0.3)):
        rows = [
            generated(
                f"prompt {i}", *({"text": f"{name} {i} {k}", "p": min(1.0, draw.random() * 0.7 + gain)} for k in (0, 1))
            )
            for i in range(60)
        ]
        paths.append(write(tmp_path / f"{name}.jsonl", rows))
    return paths


def test_the_table_and_the_final_line_agree(files: list[Path], tmp_path: Path) -> None:
    output = tmp_path / "out" / "table.md"
    summary, _ = run(*files, "--output_file", output)
    [comparison] = summary["comparisons"]
    assert (summary["baseline"], summary["kind"], comparison["run"]) == ("base", "generation file", "pipe|name")
    p = comparison["metrics"]["p"]
    assert p["units"] == 60 and 0 < p["low"] < p["difference"] < p["high"]
    rows = [line for line in output.read_text().splitlines() if line.startswith("| p |")]
    shown_interval = f"{p['difference']:+.4g} [{p['low']:+.4g}, {p['high']:+.4g}]"
    assert rows == [f"| p | 60 | {p['baseline']:.4g} | {p['run']:.4g} | **{shown_interval}** | {p['effect']:+.2f} |"]
    header = next(line for line in output.read_text().splitlines() if line.startswith("| metric"))
    assert "pipe\\|name" in header and "judge" not in comparison


def test_killed_while_the_judge_answers_it_ends_with_the_same_table_and_pays_no_reply_twice(
    files: list[Path], tmp_path: Path
) -> None:
    def answer(body: dict[str, Any]) -> Answer:
        first, second = shown(body)
        if not first:
            return completion("OK")
        score = {text: crc32(text.encode()) % 100 + 40 * text.startswith("pipe") for text in (first, second)}
        return completion("1" if score[first] > score[second] else "2", usage=(1000, 1), delay=0.02)

    def judged(server: FakeOpenAI, output: Path) -> list[Any]:
        flags = ["--judge_model", "m", "--judge_base_url", server.url, "--judge_pairs", 50, "--judge_concurrency", 2]
        return [*files, "--output_file", output, *flags, "--judge_prices", 2.0, 8.0]

    whole, again = tmp_path / "whole.md", tmp_path / "again.md"
    with FakeOpenAI(answer) as server:
        expected, _ = run(*judged(server, whole))
        judge = expected["comparisons"][0]["judge"]
        assert (judge["pairs"], judge["judged"], judge["problems"]) == (50, 50, {})
        assert judge["same_in_both_orders"] == 50 and 0.5 < judge["win_rate"]["low"] < judge["win_rate"]["mean"] < 1
        assert judge["usd"] == pytest.approx(100 * (1000 * 2 + 1 * 8) / 1e6)
        assert "judged by m in both orders" in whole.read_text() and "$0.2008" in whole.read_text()
        # the server's own record says how far the run is: kill it after a random number of its replies
        before = len(server.requests)
        seen = tmp_path / "seen"

        def count(body: dict[str, Any]) -> Answer:
            with seen.open("a") as file:
                file.write("request\n")
            return answer(body)

        server._answers = count
        kill_when_written(
            command("compare.py", *judged(server, again)), seen, random.Random(1).randrange(10, 70), ENVIRONMENT
        )
        assert not again.exists()
        asked = {json.dumps(shown(body)) for body in server.requests[before:] if shown(body)[0]}
        finished, _ = run(*judged(server, again))
        repeated = [json.dumps(shown(body)) for body in server.requests[before + len(asked) + 1 :] if shown(body)[0]]
    assert again.read_bytes() == whole.read_bytes()
    assert finished == {**expected, "output_file": str(again)}
    assert len(asked & set(repeated)) <= 2  # what was on the wire, --judge_concurrency, when it was killed
    assert len(asked | set(repeated)) == 100


def test_run_folders_and_a_budget(tmp_path: Path) -> None:
    folders = [train(tmp_path / "ppo", 0.0), train(tmp_path / "critic", 1.0)]
    with FakeOpenAI(lambda body: completion("tie")) as server:
        flags = ["--judge_model", "m", "--judge_base_url", server.url, "--judge_budget_requests", 3]
        summary, _ = run(*folders, "--output_file", tmp_path / "t.md", "--last_steps", 10, *flags)
    [comparison] = summary["comparisons"]
    assert comparison["metrics"]["objective/score"]["units"] == 10
    assert comparison["metrics"]["objective/score"]["difference"] == pytest.approx(1.0)
    assert (comparison["judge"]["pairs"], comparison["judge"]["judged"]) == (2, 1)
    assert comparison["judge"]["problems"] == {"over the budget": 1} and comparison["judge"]["usd"] is None
    assert "another seed" in (tmp_path / "t.md").read_text()


def test_problems_are_one_line(files: list[Path], tmp_path: Path) -> None:
    other = write(tmp_path / "other.jsonl", [generated("elsewhere", {"p": 1})])
    output, script = ("--output_file", tmp_path / "t.md"), runpy.run_path(str(SCRIPTS / "compare.py"))
    for arguments, message in (
        (files[:1], "two runs or more"),
        ((files[0], other), "can't be paired: 60 of the 60 prompts of base are not in other"),
        ((files[0], tmp_path), "is no run folder"),
        ((files[0], tmp_path / "absent.jsonl"), "absent.jsonl"),
        ((*files, "--metrics", "toxicity"), "have no toxicity in common"),
        ((*files, "--judge_model", "m", "--judge_budget_usd", 1), "budget_usd is 1.0 but prices is None"),
        (
            (*files, "--judge_model", "m", "--judge_base_url", "http://127.0.0.1:1/v1", "--judge_pairs", 0),
            "judge_pairs is 0",
        ),
    ):
        with pytest.raises((SystemExit, DataFileError, OSError), match=message):
            script["main"](tyro.cli(script["Args"], args=list(map(str, (*arguments, *output)))))
    line = command("compare.py", files[0], other, *output)
    done = subprocess.run(line, env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith("error: base and other can't be paired") and done.stderr.count("\n") == 1
    assert not (tmp_path / "t.md").exists()
