"""The two commands as users run them: in a process of their own, without a network."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.fake_openai import Answer, FakeOpenAI, completion, error

ROOT = Path(__file__).parents[2]
SENTIMENT = "prompts/prompt_sentiment_3shot_v2.txt"
TOXICITY = "prompts/prompt_toxicity_3shot_v2.txt"
SUMMARY = "prompts/prompt_summ_3shot_rouge_v2.txt"
REPLY = "[Span 1]: charming\n\nIdentified Negative Text Span:\n[Span 1]: weak ending\n[Span 2]: boring"


def run(*args: str | Path, ok: bool = True, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("OPENAI_")}
    done = subprocess.run(
        [sys.executable, "-m", "trl.critic", *map(str, args)],
        cwd=ROOT,
        env={**kept, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "COLUMNS": "80", **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert (done.returncode == 0) is ok, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done


def sections(output: str) -> dict[str, str]:
    parts = ("\n" + output).split("\n--- ")[1:]
    return {title: body.strip() for title, _, body in (part.partition("\n") for part in parts)}


# --- help


@pytest.mark.parametrize("command", [[], ["try"], ["check"]])
def test_help_is_quick_and_loads_no_torch(command: list[str]) -> None:
    start = time.monotonic()
    shown = run(*command, "--help").stdout
    assert time.monotonic() - start < 3
    assert "python -m trl.critic" in shown
    code = (
        "import sys, trl.critic.__main__; sys.exit(any(m in sys.modules for m in ('torch', 'transformers', 'openai')))"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


# --- try


def test_try_reads_a_pasted_reply() -> None:
    text = "A charming\nfilm with a weak ending"
    shown = sections(
        run("try", "--prompt_file", SENTIMENT, "--style", "sentiment", "--text", text, "--reply", REPLY).stdout
    )
    assert list(shown) == ["Prompt", "Reply", "Status", "Spans", "Text"]
    assert shown["Prompt"].endswith(
        "Sentence to be Labeled:\nA charming film with a weak ending\n\nIdentified Positive Text Span:"
    )
    assert (shown["Reply"], shown["Status"]) == (REPLY, "ok")
    assert shown["Spans"].splitlines()[:2] == ["+ charming", "- weak ending"]
    assert shown["Spans"].splitlines()[2].startswith("- boring   <- not in the text")
    assert shown["Text"] == "A [+charming] film with a [-weak ending]"


def test_try_reads_a_reply_file_and_needs_no_prompt_file(tmp_path: Path) -> None:
    reply = tmp_path / "reply.txt"
    reply.write_text("I'm sorry, I can't help with that.", encoding="utf-8")
    shown = sections(run("try", "--style", "toxicity", "--text", "Hello there", "--reply_file", reply).stdout)
    assert (shown["Status"], shown["Text"]) == ("unparsable", "Hello there")
    assert "Spans" not in shown and "Prompt" not in shown


def test_try_colours_on_a_terminal_and_lets_no_reply_steer_it() -> None:
    args = ["try", "--style", "toxicity", "--text", "you fool", "--reply", "Toxic Span 1: fool\nsee \x1b]0;owned\x07"]
    shown = run(*args, FORCE_COLOR="1", TERM="xterm-256color").stdout
    assert re.search(r"you \x1b\[[0-9;]+m\[-fool\]\x1b\[0m", shown)
    assert "\x1b]0" not in shown and "\x07" not in shown


def test_try_knows_summary_prompts_by_their_placeholders() -> None:
    common = ["try", "--prompt_file", SUMMARY, "--text", "He moved to Rome.", "--reply"]
    reply = "Span 1: Rome (Label: Factually Incorrect)"
    shown = sections(run(*common, reply, "--document", "I moved to Oslo.", "--score", "4.25").stdout)
    assert "Score (out of 10): 4.2\n" in shown["Prompt"]
    assert shown["Spans"] == "- Rome (Factually Incorrect)"
    assert shown["Text"] == "He moved to [-Rome]."
    assert "needs --document and --score" in run(*common, reply, ok=False).stderr


def test_try_asks_for_a_style_that_the_file_does_not_show() -> None:
    refused = run("try", "--prompt_file", TOXICITY, "--text", "x", "--reply", "y", ok=False).stderr
    assert "add --style sentiment or --style toxicity" in refused
    assert "add --style sentiment, toxicity or summary" in run("try", "--text", "x", "--reply", "y", ok=False).stderr


def test_try_with_the_lexicon_needs_no_prompt() -> None:
    shown = sections(run("try", "--critic", "lexicon", "--text", "A wonderful film, not boring").stdout)
    assert shown["Text"] == "A [+wonderful] film, [+not boring]"


def test_try_asks_an_endpoint() -> None:
    with FakeOpenAI(lambda body: completion(REPLY)) as server:
        args = ["--critic_base_url", server.url, "--critic_model", "m", "--text", "A charming film"]
        shown = sections(run("try", "--prompt_file", SENTIMENT, "--style", "sentiment", *args).stdout)
    assert shown["Text"] == "A [+charming] film"
    assert server.requests[-1]["messages"][-1]["content"].startswith(shown["Prompt"])


def test_errors_are_one_line_that_says_what_to_do(tmp_path: Path) -> None:
    broken = tmp_path / "broken.txt"
    broken.write_text("Which words? {} {}")
    common = ["--style", "sentiment", "--text", "x"]
    for args, message in (
        (["--prompt_file", broken, "--reply", "y"], "too many placeholders"),
        (["--prompt_file", tmp_path / "none.txt", "--reply", "y"], "cannot be read"),
        (["--prompt_file", SENTIMENT, "--reply", "y", "--reply_file", broken], "expected one of them"),
        (["--prompt_file", SENTIMENT], "OPENAI_API_KEY"),
        (["--critic", "local"], "add --prompt_file"),
        (["--critic", "score", "--critic_model", "builtin:nothing"], "nothing"),
    ):
        stderr = run("try", *common, *args, ok=False).stderr.strip()
        assert stderr.splitlines()[-1].startswith("error: ") and message in stderr, stderr
    unfit = run("try", "--prompt_file", broken, "--text", "x", "--reply", "y", ok=False).stderr
    assert "sentiment style" in unfit and "summary" in unfit


# --- check


def test_check_measures_the_lexicon_for_people_and_machines() -> None:
    args = ["check", "--critic", "lexicon", "--labelled", "prompts/labelled/sentiment.jsonl"]
    table = run(*args).stdout
    found = json.loads(run(*args, "--json").stdout)
    result = found["styles"]["sentiment"]
    assert (found["critic"], list(found["styles"]), result["texts"]) == ("lexicon", ["sentiment"], 24)
    assert sum(result["status"].values()) == 24
    assert result["hallucinated"] == 0  # it quotes what it read
    row = result["words"]["positive"]
    assert row["precision"]["low"] <= row["precision"]["value"] <= row["precision"]["high"]
    assert row["precision"]["value"] == pytest.approx(row["right"] / (row["right"] + row["wrong"]))
    assert 0 < result["words"]["all"]["f1"]["value"] < 1
    line = next(line for line in table.splitlines() if line.startswith("words, positive"))
    assert line.split()[-1] == f"{row['right']}/{row['wrong']}/{row['missed']}"
    assert f"{row['f1']['value']:.2f}".removeprefix("0") in line
    assert "…" not in table and max(map(len, table.splitlines())) <= 80


def test_check_of_an_endpoint_that_knows_the_labels_is_perfect(tmp_path: Path) -> None:
    """The style comes from the labelled texts; the prompt goes out and the reply comes back over HTTP."""
    rows = [json.loads(line) for line in (ROOT / "prompts/labelled/toxicity.jsonl").read_text("utf-8").splitlines()]

    def answer(body: dict[str, Any]) -> Answer:
        prompt = body["messages"][-1]["content"]
        spans = [span for row in rows if row["text"] in prompt for span in row["spans"]]
        lines = [f"Toxic Span {n}: {span[0]}" for n, span in enumerate(spans, start=1)]
        return completion("\n".join(lines) or "None identified")

    with FakeOpenAI(answer) as server:
        args = ["--prompt_file", TOXICITY, "--labelled", "prompts/labelled/toxicity.jsonl", "--json"]
        result = json.loads(run("check", *args, "--critic_base_url", server.url).stdout)["styles"]["toxicity"]
    for level in ("words", "spans"):
        (row,) = result[level].values()
        assert (row["precision"]["value"], row["recall"]["value"]) == (1.0, 1.0)
    assert result["status"] == {"ok": 12, "none": 12}


def test_check_stops_when_nothing_answers_and_when_styles_do_not_fit() -> None:
    toxicity, summary = "prompts/labelled/toxicity.jsonl", "prompts/labelled/summary.jsonl"
    with FakeOpenAI([error(401)]) as server:
        args = ["check", "--prompt_file", TOXICITY, "--critic_base_url", server.url, "--labelled"]
        assert "answered 401" in run(*args, toxicity, ok=False).stderr
        assert "add --style" in run(*args, toxicity, summary, ok=False).stderr
        assert "expected some of style summary" in run(*args, toxicity, "--style", "summary", ok=False).stderr
    with FakeOpenAI([error(400)]) as server:
        refused = run(*args[:-2], server.url, "--labelled", toxicity, ok=False).stderr
        assert "all 24 requests failed" in refused


@pytest.mark.builtin
def test_try_with_the_built_in_model_scores_words() -> None:
    args = ["--critic", "score", "--style", "toxicity", "--text", "Shut up, you stupid idiot"]
    shown = sections(run("try", *args).stdout)
    assert "[-" in shown["Text"] and "idiot" in shown["Spans"]
