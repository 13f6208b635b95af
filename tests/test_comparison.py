"""Paired comparison against values worked out by hand or by a slow twin; what can't be paired is said."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trl.comparison import differences, paired_texts, read_runs
from trl.jsonl import DataFileError
from trl.metrics import bootstrap_interval, distinct_n
from trl.report.runlog import RunLog


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def generated(prompt: str, *items: dict[str, Any]) -> dict[str, Any]:
    return {"prompt": {"text": prompt}, "generations": [{"text": "some words here", **item} for item in items]}


def test_differences_are_taken_prompt_by_prompt(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    hard = draw.normal(0, 5, 40)  # what the prompts themselves differ in
    scores = {name: hard[:, None] + shift + draw.normal(0, 0.3, (40, 2)) for name, shift in (("a", 0.0), ("b", 0.4))}
    paths = []
    for name, order in (("a", range(40)), ("b", reversed(range(40)))):  # the order of the rows does not matter
        rows = [generated(f"p{i}", *({"score": value} for value in scores[name][i])) for i in order]
        paths.append(write(tmp_path / f"{name}.jsonl", rows))
    a, b = read_runs(paths)
    found = differences(a, b, seed=3)["score"]
    each = scores["b"].mean(axis=1) - scores["a"].mean(axis=1)
    assert (found.baseline, found.run) == pytest.approx((scores["a"].mean(), scores["b"].mean()))
    assert (found.difference, found.low, found.high) == pytest.approx(bootstrap_interval(each, seed=3))
    assert found.effect == pytest.approx(each.mean() / each.std(ddof=1))
    assert found.units == 40
    assert 0 < found.low < 0.4 < found.high < 0.7  # unpaired, the prompts' deviation of 5 would drown it


def test_metrics_of_generations(tmp_path: Path) -> None:
    first = [
        generated("x", {"text": "a b a", "p": 0.6, "nll": 2.0, "tokens": 2, "perplexity": math.e, "n": 3, "ok": True}),
        generated("y", {"text": "", "p": None, "nll": 0.0, "tokens": 0, "perplexity": None, "n": 9, "ok": False}),
    ]
    second = json.loads(json.dumps(first).replace("0.6", "0.2").replace("2.0", "6.0"))
    a, b = read_runs([write(tmp_path / "a.jsonl", first), write(tmp_path / "b.jsonl", second)])
    found = differences(a, b)
    assert set(found) == {"p", "p > 0.5", "p, maximum", "log perplexity", "n", "words", "dist-1", "dist-2", "dist-3"}
    assert {name: each.units for name, each in found.items()} == {
        **dict.fromkeys(found, 1),
        "n": 2,
        "words": 2,
    }
    assert (found["p > 0.5"].baseline, found["p > 0.5"].run) == (1.0, 0.0)
    assert (found["log perplexity"].baseline, found["log perplexity"].run) == (1.0, 3.0)
    assert found["dist-1"].baseline == distinct_n([["a b a"]], 1)[0]
    assert found["n"].effect is None and found["n"].difference == 0
    assert set(differences(a, b, metrics=("n",))) == {"n"}
    with pytest.raises(DataFileError, match="have no toxicity in common; they have p, "):
        differences(a, b, metrics=("n", "toxicity"))


def test_equal_prompts_are_paired_in_their_order(tmp_path: Path) -> None:
    rows = {name: [generated("same", {"s": k}), generated("same", {"s": k * 10})] for name, k in (("a", 1), ("b", 2))}
    a, b = read_runs([write(tmp_path / f"{name}.jsonl", each) for name, each in rows.items()])
    found = differences(a, b)["s"]
    assert (found.units, found.difference) == (2, pytest.approx((1 + 10) / 2))


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ([generated("p", {"s": 1}), generated("r", {"s": 1})], "1 of the 2 prompts of a are not in b .first: 'q'"),
        ([generated("p", {"s": 1})], "are not in b"),
        ([generated("p", {"s": 1}), generated("q", {"s": 1}), generated("q", {"s": 1})], "of b are not in a"),
        ([generated("p", {"s": 1}, {"s": 2}), generated("q", {"s": 1}, {"s": 2})], "1 generations per prompt and b 2"),
        ([{"prompt": {"text": "p"}, "generations": []}], "every row's list is empty"),
        ([{"prompt": {"text": "p"}}], "row 1: expected"),
    ],
)
def test_what_cannot_be_paired(tmp_path: Path, other: list[dict[str, Any]], message: str) -> None:
    paths = [write(tmp_path / "a.jsonl", [generated("p", {"s": 1}), generated("q", {"s": 1})])]
    with pytest.raises(DataFileError, match=message):
        differences(*read_runs([*paths, write(tmp_path / "b.jsonl", other)]))


def test_summaries(tmp_path: Path) -> None:
    tables = {
        "a": 'pred,truth,post,pref_score,rouge1\r\n"one, two",t,"post\n1",,10.0\r\nx,t,post 2,,30.0\r\n',
        "b": 'pred,truth,post,pref_score,rouge1\r\nq,t,"post\n1",1.5,20.0\r\nz,t,post 2,2.5,30.0\r\n',
    }
    for name, text in tables.items():
        (tmp_path / f"{name}.csv").write_text(text, newline="")
    a, b = read_runs([tmp_path / "a.csv", tmp_path / "b.csv"])
    found = differences(a, b)
    assert set(found) == {"rouge1", "words"}  # one of them has no preference score
    assert (found["rouge1"].units, found["rouge1"].difference) == (2, 5.0)
    assert paired_texts(a, b) == [("post\n1", "one, two", "q"), ("post 2", "x", "z")]
    for text, message in (("pred,truth\r\na,b\r\n", "columns pred and post"), (tables["a"] + "p,t,q,,high", "row 3")):
        (tmp_path / "c.csv").write_text(text, newline="")
        with pytest.raises(DataFileError, match=message):
            read_runs([tmp_path / "a.csv", tmp_path / "c.csv"])


def train(folder: Path, shift: float, queries: str = "q", steps: int = 30) -> Path:
    draw = np.random.default_rng(steps)
    with RunLog(folder) as log:
        log.log_metrics(0, {"eval/score": 0.0})
        for step in range(1, steps + 1):
            score = step / 10 + shift + draw.normal(0, 0.1)
            stats = {"objective/score": score, "objective/kl": step / 5, "time/step": 1.0, "ppo/policy/ratio": 1.0}
            log.log_metrics(step, stats | ({"eval/score": score} if step % 10 == 0 else {}))
            samples = [{"query": f"{queries}{step}-{i}", "response": f"{shift} {step}"} for i in range(2)]
            log.log_samples(step, samples)
    return folder


def test_trainings_are_paired_by_step(tmp_path: Path) -> None:
    a, b = read_runs([train(tmp_path / "a", 0.0), train(tmp_path / "b", 1.0, steps=29)])
    found = differences(a, b, last=10, seed=1)
    assert set(found) == {"objective/score", "objective/kl", "eval/score"}
    assert (found["objective/score"].units, found["eval/score"].units) == (10, 1)
    each = [b.units["step", n]["objective/score"] - a.units["step", n]["objective/score"] for n in range(20, 30)]
    assert found["objective/score"].low == pytest.approx(bootstrap_interval(each, seed=1, block=2).low)
    assert set(differences(a, b, metrics=("time/step",))) == {"time/step"}
    assert differences(a, b)["eval/score"].units == 3  # before the first step, 10, 20
    assert paired_texts(a, b) == [("q29-0", "0.0 29", "1.0 29"), ("q29-1", "0.0 29", "1.0 29")]
    other, *_ = read_runs([train(tmp_path / "c", 0.0, queries="other")])
    with pytest.raises(DataFileError, match="queries of step 1 differ; compare trainings with the same --seed"):
        differences(a, other)


def test_runs_are_of_one_kind_and_have_names_of_their_own(tmp_path: Path) -> None:
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        write(tmp_path / folder / "out.jsonl", [generated("p", {"s": 1})])
    names = [run.name for run in read_runs([tmp_path / "one" / "out.jsonl", tmp_path / "two" / "out.jsonl"])]
    assert names == ["one/out", "two/out"]
    with pytest.raises(DataFileError, match="is a generation file and run a run folder"):
        read_runs([tmp_path / "one" / "out.jsonl", train(tmp_path / "run", 0.0)])


def test_blocks_keep_what_neighbours_have_in_common() -> None:
    """Of an AR(1) series the interval of independent units is far too narrow; that of blocks is nearly right."""
    draw, slopes = np.random.default_rng(0), 0.9
    series = np.empty(2000)
    series[0] = 0.0
    for index in range(1, len(series)):
        series[index] = slopes * series[index - 1] + draw.normal()
    true_half = 1.96 / (1 - slopes) / math.sqrt(len(series))  # of the mean of an AR(1) process
    naive, blocks = (bootstrap_interval(series, resamples=2000, block=block) for block in (1, 100))
    assert (naive.high - naive.low) / 2 < 0.4 * true_half
    assert (blocks.high - blocks.low) / 2 == pytest.approx(true_half, rel=0.25)
    assert blocks.mean == naive.mean == pytest.approx(series.mean())
