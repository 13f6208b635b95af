"""Runs become arms, arms become curves, and curves say who got where the baseline ends: all by hand."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.report.fake_run import write_run, write_settings
from trl.jsonl import DataFileError
from trl.report.arms import Arm, baseline, differences, group_runs
from trl.report.curves import arm_curve, arm_progress, logged_metrics, moving_mean, progress
from trl.report.efficiency import efficiency, final_value
from trl.report.html import render
from trl.report.runlog import MATCH_RATE, Run, RunLog, load_run, load_runs
from trl.report.totals import cost_table, efficiency_table, final_table, findings, mean_and_spread

REWARD = "objective/score"


def run_of(values: list[float | None], name: str = "run", seed: int = 0, **more: Any) -> Run:
    """A run that logged one reward per step, with settings that ``more`` is part of."""
    rows = [{"step": step, REWARD: value} for step, value in enumerate(values, start=1)]
    return Run(name, rows, [], {"ppo_config": {"seed": seed}, **more}, Path("/runs") / name)


def names(folders: list[str], same: bool = True) -> list[str]:
    runs = [run_of([1.0], folder, seed=i, arm=0 if same else i) for i, folder in enumerate(folders)]
    return [arm.name for arm in group_runs(runs)]


def test_runs_that_differ_only_in_seed_and_folder_are_one_arm(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("ppo_s1", "ppo_s2", "critic_s1", "bare")]
    for i, folder in enumerate(folders):
        write_run(folder, steps=2, seed=i, critic="critic" in folder.name, settings=folder.name != "bare")
    arms = group_runs(load_runs(folders))
    assert [(arm.name, [run.name for run in arm.runs]) for arm in arms] == [
        ("ppo", ["ppo_s1", "ppo_s2"]),
        ("critic_s1", ["critic_s1"]),
        ("bare", ["bare"]),
    ]
    assert [run.seed for run in arms[0].runs] == [0, 1] and arms[2].runs[0].seed is None
    assert differences(arms) == {"use_intrinsic_reward": ["false", "true", "not recorded"]}
    assert baseline(arms) is arms[0] and baseline(arms[1:]) is arms[2]  # without a critic, though not the first


@pytest.mark.parametrize(
    ("folders", "expected"),
    [
        (["seed0/ppo", "seed1/ppo"], "ppo"),
        (["ppo/seed0", "ppo/seed1"], "ppo"),
        (["ppo/seed10", "ppo/seed11"], "ppo"),
        (["ppo-1", "ppo-2"], "ppo"),
        (["gpt2_s3", "gpt2_s4"], "gpt2"),
        (["left", "right"], "left, right"),
    ],
)
def test_an_arm_is_called_what_its_folders_share(folders: list[str], expected: str) -> None:
    assert names(folders) == [expected]


def test_no_two_arms_have_one_name() -> None:
    runs = [run_of([1.0], f"a/{i}", seed=i, lr=i // 2) for i in range(4)]
    assert [arm.name for arm in group_runs(runs)] == ["a, a/0, a/1", "a, a/2, a/3"]


def test_folders_are_named_by_as_little_as_tells_them_apart(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / name, steps=1) for name in ("x/one/run", "y/one/run", "y/two/run")]
    assert [run.name for run in load_runs([*folders, folders[0]])] == ["x/one/run", "y/one/run", "y/two/run"]
    assert [run.name for run in load_runs(folders[1:])] == ["one/run", "two/run"]
    with pytest.raises(FileNotFoundError, match="no run folder"):
        load_runs([tmp_path / "later"])
    assert load_runs([tmp_path / "later"], started_only=True) == []


def test_a_band_is_the_mean_and_deviation_of_the_seeds_where_all_have_values() -> None:
    runs = [run_of([1.0, 2.0, 3.0, 4.0]), run_of([3.0, 4.0, None, 8.0, 9.0], seed=1)]
    curve = arm_curve(group_runs(runs)[0], REWARD)
    assert curve is not None and curve.seeds == 2
    assert (curve.steps, curve.mean) == ([1, 2, 4], [2.0, 3.0, 6.0])
    half = [math.sqrt(2), math.sqrt(2), math.sqrt(8)]  # of n - 1
    np.testing.assert_allclose(curve.high, np.add(curve.mean, half))
    np.testing.assert_allclose(curve.low, np.subtract(curve.mean, half))
    assert curve.runs == [([1, 2, 3, 4], [1.0, 2.0, 3.0, 4.0]), ([1, 2, 4, 5], [3.0, 4.0, 8.0, 9.0])]


def test_a_seed_that_has_just_begun_does_not_cut_the_band() -> None:
    runs = [run_of([float(i)] * 10, seed=i) for i in range(2)] + [run_of([9.0, 9.0], seed=2)]
    curve = arm_curve(group_runs(runs)[0], REWARD)
    assert curve is not None and (len(curve.steps), curve.seeds) == (10, 2)
    assert set(curve.mean) == {0.5} and len(curve.runs) == 3


def test_a_single_run_has_no_band_and_its_steps_behind_the_moving_mean() -> None:
    values = [float(i % 2) for i in range(48)]
    curve = arm_curve(Arm("a", (run_of(list(values)),), {}), REWARD)
    assert curve is not None and curve.low == curve.high == []
    assert curve.runs == [(list(range(1, 49)), values)]
    np.testing.assert_allclose(curve.mean, moving_mean(values))
    short = arm_curve(Arm("a", (run_of([1.0]),), {}), REWARD)
    assert short is not None and (short.steps, short.mean, short.runs) == ([1], [1.0], [])
    assert arm_curve(Arm("a", (run_of([None]),), {}), REWARD) is None


def test_long_runs_are_thinned_with_both_ends() -> None:
    curve = arm_curve(Arm("a", (run_of([float(i) for i in range(5000)]),), {}), REWARD)
    assert curve is not None and len(curve.steps) == len(curve.runs[0][0]) == 160
    assert curve.steps[0] == 1 and curve.steps[-1] == 5000


def test_moving_mean_shrinks_at_the_ends() -> None:
    values = np.arange(48.0) ** 2
    smooth = moving_mean(values)
    assert smooth[0] == values[:3].mean()
    assert smooth[20] == values[18:23].mean()
    assert smooth[-1] == values[-3:].mean()
    np.testing.assert_array_equal(moving_mean([1.0, 5.0]), [1.0, 5.0])


def test_axes_add_up_what_was_logged() -> None:
    rows = [
        {"step": 0, "eval/score": 1.0},
        {"step": 1, "tokens/queries": 34.0, "tokens/queries_len_mean": 34 / 16, "critic/requests": 10.0},
        {"step": 2, "tokens/queries": 7.0, "tokens/queries_len_mean": 7 / 15, "critic/requests": None},
        {"step": 3, "tokens/queries": 5.0, "tokens/queries_len_mean": 5 / 16, "critic/requests": 4.0},
    ]
    run = Run("a", rows, [])
    assert progress(run, "step") == [0, 1, 2, 3]
    assert progress(run, "samples") == [0, 16, 31, 47]
    assert progress(run, "calls") == [0, 10, 10, 14]
    assert progress(run, "usd") == [0, 0, 0, 0]  # a critic of this process
    paid = Run("b", [row | {"critic/http_requests": 4.0} for row in rows[1:]], [])
    assert progress(paid, "usd") is None  # an endpoint whose prices are not known
    priced = Run("c", [row | {"critic/http_requests": 4.0, "critic/cost_usd": 0.25} for row in rows[1:]], [])
    assert progress(priced, "usd") == [0.25, 0.5, 0.75]
    assert progress(run_of([1.0]), "samples") is None
    assert arm_progress(Arm("a", (run, paid), {})) == {
        "step": [0, 1, 2, 3],
        "samples": [0, 16, 31, 47],
        "calls": [0, 10, 10, 14],
    }


def test_sample_efficiency_by_hand() -> None:
    slow = [run_of([0.0, 0.0, 1.0, 2.0], "slow/0"), run_of([0.0, 0.0, 0.0, 4.0], "slow/1", seed=1)]
    fast = [run_of([0.0, 3.0, 4.0, 4.0], "fast/0", critic=1), run_of([0.0, 1.0, 2.0, 2.5], "fast/1", seed=1, critic=1)]
    never = [run_of([0.0], "never", critic=2)]
    arms = group_runs([*slow, *fast, *never])
    found = efficiency(arms)
    assert found is not None and found.baseline.name == "slow" and found.target == 3.0
    assert [[reach.at.get("step") for reach in reaches] for _, reaches in found.arms] == [[None, 4], [2, None], [None]]
    assert findings(found) == {
        "fast": "Reached the final reward of slow after 2 of its 4 steps (50%), on average, in 1 of 2 runs.",
        "never": "Did not reach the final reward of slow.",
    }
    table = efficiency_table(found)
    assert table.columns == ["arm", "runs that got there", "share of the baseline's steps", "steps"]
    assert table.rows == [
        ["slow", "1 of 2", "100%", "4"],
        ["fast", "1 of 2", "50%", "2"],
        ["never", "0 of 1", "–", "–"],
    ]
    assert efficiency(arms[:1]) is None


def test_final_values_are_of_the_last_tenth() -> None:
    assert final_value(run_of([0.0] * 18 + [1.0, 3.0]), REWARD) == 2.0
    assert final_value(run_of([5.0, None]), REWARD) == 5.0
    assert final_value(run_of([]), REWARD) is None
    assert mean_and_spread([0.708]) == "0.708" and mean_and_spread([]) == "–"
    assert mean_and_spread([1.0, 2.0, 3.0]) == "2.0 ± 1.0"
    assert mean_and_spread([-10.0, -10.5]) == "−10.25 ± 0.35"
    assert mean_and_spread([3.0, 3.0]) == "3 ± 0"


def test_tables_of_final_values_and_costs(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / f"ppo_{seed}", steps=20, critic=False, seed=seed) for seed in range(2)]
    folders.append(write_run(tmp_path / "llm", steps=20, prices=True))
    arms = group_runs(load_runs(folders))
    final = final_table(arms)
    assert final is not None and final.columns[:3] == ["arm", "seeds", "Environment reward"]
    assert [row[:2] for row in final.rows] == [["ppo", 2], ["llm", 1]]
    costs = cost_table(arms)
    table = {row[0]: dict(zip(costs.columns[1:], row[1:], strict=True)) for row in costs.rows}
    assert table["ppo"]["samples"] == "320" and table["ppo"]["critic calls"] == "0"
    assert table["ppo"]["critic cost, $"] == "0.00" and table["ppo"]["critic tokens in"] is None
    assert table["llm"]["critic calls"] == "240" and table["llm"]["critic tokens in"] == "104,000"
    assert 0.04 < float(str(table["llm"]["critic cost, $"])) < 0.06
    assert final_table(group_runs([Run("a", [], [])])) is None


def test_known_metrics_come_first_and_empty_ones_not_at_all() -> None:
    rows = [{"step": 1, "zz": 1.0, "aa": 2, "objective/kl": 0.1, "none": None, "text": "x", "nan": float("nan")}]
    rows.append({"step": 2, REWARD: 1.0})
    assert logged_metrics([Arm("a", (Run("a", rows, []),), {})]) == ([REWARD, "objective/kl"], ["aa", "zz"])


def test_the_match_rate_is_derived_where_spans_were_quoted(tmp_path: Path) -> None:
    with RunLog(tmp_path) as log:
        for step, (matched, unmatched) in enumerate([(3, 1), (0, 0), (0, 2)], start=1):
            log.log_metrics(step, {"critic/matched": matched, "critic/unmatched": unmatched})
    assert load_run(tmp_path).series(MATCH_RATE) == ([1, 3], [0.75, 0.0])


def test_numbers_that_other_writers_leave_are_no_values(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 1, "a": NaN}\n{"step": 2, "a": Infinity}\n{"step": 3, "a": true}\n{"step": 4, "a": 2.5}\n'
    )
    assert load_run(tmp_path).series("a") == ([4], [2.5])


def test_settings_that_cannot_be_read_are_none(tmp_path: Path) -> None:
    write_run(tmp_path, steps=1)
    for broken in ('{"args": {"ppo_con', "[]", '{"args": 3}'):
        (tmp_path / "run.json").write_text(broken)
        run = load_run(tmp_path)
        assert run.settings == {} and run.seed is None
    write_settings(tmp_path, 7)
    assert load_run(tmp_path).seed == 7 and load_run(tmp_path).settings["script"] == "x.py"


@pytest.mark.parametrize("cut", [1, 40, 400])
def test_a_run_that_is_being_written_is_shown(tmp_path: Path, cut: int) -> None:
    write_run(tmp_path, steps=5)
    for name in ("metrics.jsonl", "samples.jsonl"):
        path = tmp_path / name
        path.write_bytes(path.read_bytes()[:-cut])
    assert "No run yet" not in render([load_run(tmp_path)])


def test_runs_of_different_length_of_one_step_and_with_missing_columns_share_a_page(tmp_path: Path) -> None:
    with RunLog(tmp_path / "odd") as log:
        log.log_metrics(1, {"objective/kl": 1.0})
        log.log_samples(
            1, [{"query": None, "response": "text"}, {"tokens": [{"kl": "?"}], "spans": [{}], "score": "x"}]
        )
    folders = [
        tmp_path / "odd",
        write_run(tmp_path / "one", steps=1),
        write_run(tmp_path / "long", steps=70, critic=False),
    ]
    text = render(load_runs(folders))
    assert "At the end of training" in text


def test_a_page_of_nothing_waits() -> None:
    assert "No run yet" in render([])


def test_a_damaged_line_in_the_middle_is_named(tmp_path: Path) -> None:
    write_run(tmp_path, steps=2)
    path = tmp_path / "metrics.jsonl"
    path.write_text(path.read_text().replace('"step": 1,', '"step": "one",'))
    with pytest.raises(DataFileError, match="whole number called step"):
        load_run(tmp_path)
