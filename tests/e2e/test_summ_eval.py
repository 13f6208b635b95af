"""summ_eval.py as users run it: a tail, a kill in the middle, a reward model with another tokenizer."""

import csv
import json
import random
import runpy
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import tyro

from tests.e2e.killing import kill_when_written, tear_last_line
from tests.e2e.test_eval_scripts import ENVIRONMENT, SCRIPTS, command, run
from tests.test_metrics import byte_level_tokenizer, tiny_gpt2
from tests.tiny import stable_normal, tiny_llama, tiny_tokenizer
from trl.generation import Sampling, batch_seed, sample_continuations
from trl.jsonl import DataFileError, read_jsonl
from trl.metrics import bootstrap_interval
from trl.models import RewardModel
from trl.rewards import PreferenceReward, RougeReward

MEASURES = ("rouge1", "rouge2", "rougeL", "rougeLsum")
WORDS = ("the", "film", "was", "good", "and", "the", "plot", "was", "dull", "but", "acting", "saved")
SCRIPT = runpy.run_path(str(SCRIPTS / "summ_eval.py"))


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A policy of 128 positions, a reward model with another tokenizer, 23 posts of which one is longer than that."""
    folder = tmp_path_factory.mktemp("inputs")
    tokenizer = byte_level_tokenizer()
    tiny_gpt2(len(tokenizer), positions=128).save_pretrained(folder / "policy")
    tokenizer.save_pretrained(folder / "policy")
    model = RewardModel.from_pretrained(tiny_llama(1))
    with torch.no_grad():
        model.head.weight.copy_(stable_normal("head", model.head.weight.shape, 3))
    model.save_pretrained(folder / "reward")
    tiny_tokenizer().save_pretrained(folder / "reward")
    (folder / "data").mkdir()
    posts = [" ".join(WORDS[i % 6 : i % 6 + 4]) + f" {i}" for i in range(23)]
    posts[7] = "the film was long " * 40
    rows = [{"prompt": f"{post}\n\nTL;DR:", "label": f"it was {WORDS[i % 12]}"} for i, post in enumerate(posts)]
    (folder / "data" / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {name: folder / name for name in ("policy", "reward", "data")}


def arguments(names: dict[str, Path], save_path: Path, *more: Any) -> list[Any]:
    """The published command with local names, and batches that 23 posts don't fill."""
    flags = ["--model_name", names["policy"], "--dataset", names["data"], "--save_path", save_path]
    flags += ["--num_samples_to_eval", 6000, "--reward_model_ckpt_path", names["reward"], "--output_max_length", 12]
    return [*flags, "--batch_size", 4, "--rw_batch_size", 3, "--reward_model_device", 0, *more]


@pytest.fixture(scope="module")
def evaluated(names: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    path = tmp_path_factory.mktemp("out") / "scores.csv"
    return path, run("summ_eval.py", *arguments(names, path, "--do_sample"))


def table(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_every_sample_is_scored(names, evaluated) -> None:
    path, summary = evaluated
    rows = table(path)
    assert (summary["samples"], summary["posts_cut"], summary["empty"]) == (23, 1, sum(not row["pred"] for row in rows))
    assert list(rows[0]) == ["pred", "truth", "post", "pref_score", *MEASURES]
    given = read_jsonl(names["data"] / "test.jsonl")
    assert [(row["post"], row["truth"]) for row in rows] == [(row["prompt"], row["label"]) for row in given]
    preds = [row["pred"] for row in rows]
    assert len(set(preds)) > 11

    # the texts are those of the batches one by one, the last of three samples
    tokenizer, sampling = byte_level_tokenizer(), Sampling(max_new_tokens=12)
    model = tiny_gpt2(len(tokenizer), positions=128)
    texts = [
        text
        for index in range(6)
        for [text] in sample_continuations(
            model, tokenizer, [row["prompt"] for row in given[4 * index :][:4]], sampling, seed=batch_seed(0, index)
        )
    ]
    assert preds == [text.strip() for text in texts]

    # the scores are those of the finished file
    truths, posts = [row["truth"] for row in rows], [row["post"] for row in rows]
    columns = {name: RougeReward(name)(completions=preds, references=truths) for name in MEASURES}
    preference = PreferenceReward(str(names["reward"]), device="cpu")
    columns["pref_score"] = preference(prompts=posts, completions=[f" {pred}" for pred in preds])
    for name, values in columns.items():
        assert [float(row[name]) for row in rows] == pytest.approx(values, abs=1e-4)
        interval = bootstrap_interval([float(row[name]) for row in rows])
        assert summary[name] == pytest.approx({**interval._asdict(), "samples": 23})
    assert sum(columns["rouge1"]) > 0
    assert len(set(columns["pref_score"])) > 11


def test_a_killed_run_ends_with_the_same_file(names, evaluated, tmp_path: Path) -> None:
    path, summary = evaluated
    again = tmp_path / "scores.csv"
    work = tmp_path / "scores.csv.rows.jsonl"
    line = command("summ_eval.py", *arguments(names, again, "--do_sample"))
    assert kill_when_written(line, work, random.Random(0).randrange(4, 9), ENVIRONMENT) < 23
    assert not again.exists()  # half a table would pass for a whole one
    tear_last_line(work)
    finished = run("summ_eval.py", *arguments(names, again, "--do_sample"))
    assert again.read_bytes() == path.read_bytes()
    assert finished == {**summary, "save_path": str(again)}


def test_greedy_without_a_reward_model(names, tmp_path: Path) -> None:
    path = tmp_path / "scores.csv"
    flags = ["--model_name", names["policy"], "--dataset", names["data"], "--save_path", path, "--batch_size", 4]
    summary = run("summ_eval.py", *flags, "--num_samples_to_eval", 9, "--output_max_length", 6, "--seed", 3)
    rows = table(path)
    assert summary["samples"] == len(rows) == 9
    assert {row["pref_score"] for row in rows} == {""} and summary["pref_score"] is None
    posts = [row["prompt"] for row in read_jsonl(names["data"] / "test.jsonl")]
    chosen = [posts.index(row["post"]) for row in rows]
    assert chosen == sorted(chosen) and chosen != list(range(9))
    tokenizer = byte_level_tokenizer()
    model = tiny_gpt2(len(tokenizer), positions=128)
    texts = sample_continuations(
        model, tokenizer, [rows[-1]["post"]], Sampling(max_new_tokens=6, do_sample=False), seed=0
    )
    assert rows[-1]["pred"] == texts[0][0].strip()


def test_any_text_comes_back_from_the_table(tmp_path: Path) -> None:
    texts = ["a\rb", "a\r\nb", 'say "x", then\n', "=1+1", "\u2028", "\x00", " ", "'", "a\tb"]
    SCRIPT["write_csv"](
        tmp_path / "t.csv", [dict.fromkeys(SCRIPT["COLUMNS"]) | {"pred": text, "post": text} for text in texts]
    )
    with open(tmp_path / "t.csv", newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [row["pred"] for row in rows] == [row["post"] for row in rows] == texts
    assert {row["rouge1"] for row in rows} == {""}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (("--split", "valid"), "valid"),
        (("--batch_size", 0), "--batch_size is 0"),
        (("--num_samples_to_eval", 0), "--num_samples_to_eval is 0"),
        (("--output_min_length", 13), "min <= max"),
        (("--output_max_length", 200), "leave a prompt no room"),
        (("--reward_model_device", "gpu0"), "'gpu0' is no device"),
    ],
)
def test_what_can_be_mended(names, tmp_path: Path, wrong: tuple[Any, ...], message: str) -> None:
    flags = map(str, arguments(names, tmp_path / "scores.csv", *wrong))
    with pytest.raises((SystemExit, DataFileError), match=message):
        SCRIPT["main"](tyro.cli(SCRIPT["Args"], args=list(flags)))


def test_a_table_of_another_program_is_not_overwritten(names, tmp_path: Path) -> None:
    path = tmp_path / "scores.csv"
    path.write_text("mine\n")
    line = command("summ_eval.py", *arguments(names, path))
    done = subprocess.run(line, env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "choose another --save_path" in done.stderr.splitlines()[-1]
    assert path.read_text() == "mine\n"
