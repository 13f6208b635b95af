"""The custom task's settings, its reward, and its batches."""

import json
import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from accelerate.state import AcceleratorState

from examples.custom.ppo_custom import Args
from tests.fake_openai import Answer
from tests.fake_reward import FakeReward
from tests.tiny import tiny_tokenizer
from tests.trainer.test_ppo import make_trainer
from trl.custom import CustomArgs, TaskReward, batches_of, load_task_reward, own_columns
from trl.data.task_prompts import encode_rows, read_task_rows
from trl.jsonl import DataFileError
from trl.run import parse_args

REWARD = {
    "rewardName": "right",
    "stringMatchRewardScorer": {
        "correctAnswerReward": 1.0,
        "wrongAnswerReward": 0.0,
        "stringMatchExpression": {"matchOperation": "EXACT_MATCH", "expression": "{{references.answer}}"},
    },
}
FUNCTION = """
def keep(prompts, completions, completion_ids, solution, references, **columns):
    global seen
    seen = {"prompts": prompts, "completions": completions, "completion_ids": completion_ids, "solution": solution,
            "references": references, "columns": sorted(columns)}
    return [len(ids) for ids in completion_ids]
"""


@pytest.fixture(autouse=True)
def fresh_accelerator_state() -> Iterator[None]:
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture
def data(tmp_path: Path) -> str:
    rows: list[dict[str, Any]] = [
        {
            "systemInstruction": "Be brief.",
            "contents": [{"role": "user", "parts": [{"text": f"What is\n{n} + {n}?"}]}],
            "references": {"answer": str(2 * n), "solution": f"${2 * n}$"},
            **({"level": n} if n else {}),
        }
        for n in range(6)
    ]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "reward.json").write_text(json.dumps(REWARD))
    (tmp_path / "mine.py").write_text(FUNCTION)
    return str(tmp_path / "train.jsonl")


def args_of(data: str, reward: str, *more: str) -> Args:
    return parse_args(Args, ["--data", data, "--reward", str(Path(data).parent / reward), *more])


def task(data: str, reward: str, chat: bool, *more: str) -> tuple[TaskReward, list[dict[str, Any]]]:
    rows = read_task_rows(data)
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}<assistant>"
    encoded = encode_rows(rows, tokenizer, chat=chat, longest=None)
    return TaskReward(load_task_reward(args_of(data, reward, *more), rows), encoded, tokenizer, chat), encoded


def as_batch(rows: list[dict[str, Any]]) -> dict[str, list[Any]]:
    return {key: [row[key] for row in rows] for key in rows[0]}


@pytest.mark.parametrize("chat", [True, False])
def test_a_configured_reward_finds_each_rows_references(data: str, chat: bool) -> None:
    environment, rows = task(data, "reward.json", chat)
    batch = as_batch(rows[:3])
    ids = [row["input_ids"][:2] for row in rows[:3]]
    pending = environment.submit(batch, ["0", "2", "5"], ids, 1)
    assert pending.result() == [1.0, 1.0, 0.0]
    assert pending.stats["reward/right"] == pytest.approx(2 / 3)
    held_out = {**batch, "completion_ids": [each.tolist() for each in ids]}
    assert environment.score(held_out, ["1", "2", "4"]) == [0.0, 1.0, 1.0]


def test_columns_of_the_data_may_have_any_name(data: str) -> None:
    """What a reward is told by the run itself is not mistaken for the data's column of that name."""
    rows = [json.loads(line) for line in Path(data).read_text().splitlines()]
    columns = {"step": "s", "prompts": "p", "completions": "c", "completion_ids": 1, "examples": 2, "batch": 3}
    for row in rows:
        row["references"] |= columns
    Path(data).write_text("".join(json.dumps({**row, **columns}) + "\n" for row in rows))
    for reward in ("reward.json", "mine.py:keep"):
        environment, encoded = task(data, reward, False)
        ids = [row["input_ids"][:1] for row in encoded[:2]]
        right = environment.submit(as_batch(encoded[:2]), ["0", "2"], ids, 1).result()
        held_out = {**as_batch(encoded[:2]), "completion_ids": [each.tolist() for each in ids]}
        assert right == environment.score(held_out, ["0", "2"]) == [1.0, 1.0]
    seen = environment._reward._function.__globals__["seen"]  # type: ignore[union-attr]
    assert seen["completions"] == ["0", "2"]


@pytest.mark.parametrize("chat", [True, False])
def test_a_function_gets_conversations_ids_and_every_column(data: str, chat: bool) -> None:
    environment, rows = task(data, "mine.py:keep", chat)
    ids = [row["input_ids"][: n + 1] for n, row in enumerate(rows[:2])]
    assert environment.submit(as_batch(rows[:2]), ["zero", "two"], ids, 1).result() == [1.0, 2.0]
    seen = environment._reward._function.__globals__["seen"]  # type: ignore[union-attr]
    if chat:
        system = {"role": "system", "content": "Be brief."}
        assert seen["prompts"][1] == [system, {"role": "user", "content": "What is\n1 + 1?"}]
        assert seen["completions"] == [[{"role": "assistant", "content": "zero"}],
                                       [{"role": "assistant", "content": "two"}]]  # fmt: skip
    else:
        assert seen["prompts"][1] == "Be brief.\n\nWhat is\n1 + 1?"
        assert seen["completions"] == ["zero", "two"]
    assert seen["completion_ids"] == [each.tolist() for each in ids]
    assert seen["solution"] == ["$0$", "$2$"]
    assert seen["references"][1] == {"answer": "2", "solution": "$2$"}
    assert {"answer", "level"} <= set(seen["columns"])
    assert own_columns([row["row"] for row in rows[:2]])["level"] == [None, 1]


@pytest.mark.parametrize("chat", [True, False])
def test_the_attribution_critic_can_ask_by_the_prompts_text(data: str, chat: bool) -> None:
    environment, rows = task(data, "reward.json", chat)
    shown = "What is 3 + 3? " if chat else "Be brief.  What is 3 + 3?"  # as critics see it: one line
    rewards = environment(prompts=[shown, rows[2]["query"], "Unknown"], completions=["6", "6", "6"])
    assert rewards[:2] == [1.0, 0.0] and rewards[2] is None


def test_the_reward_is_checked_against_the_data(data: str) -> None:
    rows = read_task_rows(data)
    config = {**REWARD, "rewardName": "other"}
    folder = Path(data).parent
    scorer = REWARD["stringMatchRewardScorer"] | {  # type: ignore[operator]
        "stringMatchExpression": {"matchOperation": "EXACT_MATCH", "expression": "{{references.gold}}"}
    }
    (folder / "reward.yaml").write_text(json.dumps({**config, "stringMatchRewardScorer": scorer}))
    with pytest.raises(DataFileError, match=r"references\.gold.* not defined in row 1"):
        load_task_reward(args_of(data, "reward.yaml"), rows)
    (folder / "mine.py").write_text("def f(completions, gold): return [0.0]")
    with pytest.raises(DataFileError, match=r"needs the column 'gold'.*answer.*level.*solution"):
        load_task_reward(args_of(data, "mine.py:f"), rows)
    with pytest.raises(DataFileError, match="the function's name too"):
        load_task_reward(args_of(data, "mine.py"), rows)
    with pytest.raises(FileNotFoundError):
        load_task_reward(args_of(data, "none.json"), rows)


def test_a_composites_missing_part(data: str) -> None:
    """Under renormalise the string match makes up the total while the service is down."""
    with FakeReward(lambda body, nth: Answer(400)) as server:
        service = {"rewardName": "service", "cloudRunRewardScorer": {"cloudRunUri": server.url}}
        parts = [{"rewardConfig": REWARD, "weight": 1}, {"rewardConfig": service, "weight": 1}]
        (Path(data).parent / "reward.json").write_text(json.dumps({"weightedRewardConfigs": parts}))
        for policy, expected in (("strict", math.nan), ("renormalise", 1.0)):
            environment, rows = task(data, "reward.json", True, "--nan_policy", policy)
            score = environment.score({**as_batch(rows[:1]), "completion_ids": [[1]]}, ["0"])
            assert score == pytest.approx([expected], nan_ok=True)


@pytest.mark.parametrize("samples", [1, 4])
def test_batches_hold_each_prompt_so_many_times(data: str, samples: int) -> None:
    rows = encode_rows(read_task_rows(data) * 4, tiny_tokenizer(), chat=False, longest=None)
    loader = batches_of(rows, make_trainer(), samples)
    batches = list(loader)
    assert [len(batch["query"]) for batch in batches] == [8] * (3 * samples)
    for batch in batches:
        for start in range(0, 8, samples):
            assert len({id(row) for row in batch["row"][start : start + samples]}) == 1
    assert sorted(query for batch in batches for query in batch["query"]) == sorted(
        row["query"] for row in rows for _ in range(samples)
    )


def test_defaults_depend_on_what_is_given() -> None:
    assert Args().lengths == (32, 32)
    assert parse_args(Args, ["--max_new_tokens", "5"]).lengths == (5, 5)
    assert parse_args(Args, ["--max_new_tokens", "5", "--min-new-tokens", "2"]).lengths == (2, 5)
    preset = parse_args(Args, ["--preset", "builtin", "--data", "mine.jsonl"])
    assert preset.ppo_config.query_dataset == "mine.jsonl"
    assert preset.ppo_config.reward_model is None  # the built-in task's reward is not for other data
    assert preset.default_critic_kind == "score"
    implied = parse_args(Args, ["--model_name=builtin:smollm2", "--critic_style=summary", "--query_dataset=mine.jsonl"])
    assert implied.default_critic_kind == "attribution" and implied.num_shared_layers == 20
    assert implied.ppo_config.query_dataset == "mine.jsonl"
    assert CustomArgs(max_new_tokens=8).longest_prompt(100) == 92
    assert CustomArgs(max_new_tokens=8, max_prompt_tokens=50).longest_prompt(100) == 50
    assert CustomArgs(max_prompt_tokens=50).longest_prompt(None) == 50
    assert CustomArgs().longest_prompt(None) is None
    with pytest.raises(SystemExit, match="leaves no room"):
        CustomArgs(max_new_tokens=100).longest_prompt(100)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--samples_per_prompt", "3"], "a divisor of --batch_size"),
        (["--eval_fraction", "1"], "--eval_fraction is 1.0"),
        (["--min_new_tokens", "9", "--max_new_tokens", "8"], "expected 1 <= min <= max"),
        (["--max_prompt_tokens", "0"], "--max_prompt_tokens is 0"),
        (["--reward_timeout", "0"], "--reward_timeout is 0"),
        (["--critic_score_bounds", "1", "0"], "the lower one first"),
        (["--eval_data", "x.jsonl", "--eval_every", "None"], "--eval_data is for --eval_every"),
    ],
)
def test_flags_that_cannot_be_right(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        parse_args(Args, flags)
    assert message in " ".join((str(stopped.value) + capsys.readouterr().err).replace("│", " ").split())


@pytest.mark.parametrize("given", [["--data", "mine.jsonl"], ["--reward", "mine.json"]])
def test_the_presets_data_and_reward_go_together(given: list[str]) -> None:
    """A user's half is never joined by the built-in task's other half."""
    missing = "reward" if "--data" in given else "data"
    done = subprocess.run(
        [sys.executable, "examples/custom/ppo_custom.py", "--model_name", "builtin:smollm2", *given, "--dry_run"],
        cwd=Path(__file__).resolve().parents[1],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1
    assert done.stderr.strip().startswith(f"error: --{missing} is needed")
