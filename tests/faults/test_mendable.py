"""What a user can mend ends a script in one line that names it: damaged and missing models, wrong settings, files."""

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from examples.custom import ppo_custom
from examples.sentiment import ppo_sentiment
from tests.e2e.test_ppo_custom import flags as custom_flags
from tests.e2e.test_ppo_custom import task
from tests.e2e.test_ppo_sentiment import SCRIPT, launch, names, published
from trl.run import run_script

__all__ = ["names", "task"]  # fixtures


def run(monkeypatch, script: ModuleType, *flags: str) -> str:
    """What the script says when it ends before training; "" if it doesn't."""
    monkeypatch.setattr(sys, "argv", ["script.py", *flags])
    try:
        run_script(script.main)
    except SystemExit as stopped:
        return str(stopped.code)
    return ""


def plan(names: dict[str, str], folder: Path, *more: str) -> list[str]:
    return published(names, folder / "run", "--critic", "lexicon", "--dry_run", *more)


def test_the_command_itself_is_fine(names, tmp_path, monkeypatch):
    assert run(monkeypatch, ppo_sentiment, *plan(names, tmp_path)) == ""


def cut(name: str) -> Callable[[Path], object]:
    def half(folder: Path) -> None:
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[: len(content) // 2])

    return half


def remove(*names: str) -> Callable[[Path], object]:
    return lambda folder: [(folder / name).unlink() for name in names]


def set_config(**values: object) -> Callable[[Path], object]:
    def write(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text()) | values
        (folder / "config.json").write_text(json.dumps(config))

    return write


DAMAGE = {
    "weights cut": (cut("model.safetensors"), "model.safetensors"),
    "weights gone": (remove("model.safetensors"), "no file named model.safetensors"),
    "configuration cut": (cut("config.json"), "config.json"),
    "unknown architecture": (set_config(model_type="no_such"), "can't be loaded as a language model"),
    "no architecture": (set_config(model_type=None), "can't be loaded as a language model"),
    "other sizes": (set_config(hidden_size=64), "other shapes than its config.json says"),
    "tokenizer cut": (cut("tokenizer.json"), "tokenizer.json"),
    "tokenizer gone": (remove("tokenizer.json", "tokenizer_config.json"), "no tokenizer"),
    "value head cut": (lambda folder: (folder / "value_head.safetensors").write_bytes(b"?"), "value_head.safetensors"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_policy(names, tmp_path, monkeypatch, damage):
    shutil.copytree(names["policy"], tmp_path / "policy")
    harm, said = DAMAGE[damage]
    harm(tmp_path / "policy")
    message = run(monkeypatch, ppo_sentiment, *plan(names, tmp_path, "--model_name", str(tmp_path / "policy")))
    assert message.startswith("error: ")
    assert said in message and str(tmp_path / "policy") in message
    assert "\n" not in message


@pytest.mark.parametrize("damage", ["weights cut", "weights gone", "configuration cut", "tokenizer cut"])
def test_a_damaged_classifier(names, tmp_path, monkeypatch, damage):
    shutil.copytree(names["classifier"], tmp_path / "classifier")
    harm, said = DAMAGE[damage]
    harm(tmp_path / "classifier")
    flags = plan(names, tmp_path, "--reward_model", str(tmp_path / "classifier"))
    message = run(monkeypatch, ppo_sentiment, *flags)
    assert message.startswith("error: ")
    assert said in message and str(tmp_path / "classifier") in message
    assert "\n" not in message


def test_a_language_model_is_no_classifier(names, tmp_path, monkeypatch):
    """Its head would be random numbers, and so would every reward."""
    message = run(monkeypatch, ppo_sentiment, *plan(names, tmp_path, "--reward_model", names["policy"]))
    assert message == f"error: {names['policy']!r} is no trained classifier: it has no weights for score.weight"


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--num_shared_layers", "9"], "num_shared_layers=9 is out of range for LlamaForCausalLM with 4 blocks"),
        (["--critic", "replay", "--critic_replay", "no.jsonl"], "[Errno 2] No such file or directory: 'no.jsonl'"),
        (["--critic", "openai", "--prompt_file", "no.txt"], "prompt file no.txt cannot be read"),
        (["--critic", "local", "--critic_model", "no/model"], "'no/model' is neither a local folder nor found"),
        (["--query_dataset", "no.jsonl"], "cannot load the split 'train' of 'no.jsonl'"),
        (["--model_name", "no/model"], "'no/model' is neither a local folder nor found"),
        (["--reward_model", "no/classifier"], "cannot load the classifier 'no/classifier'"),
    ],
)
def test_settings_and_names_of_nothing(names, tmp_path, monkeypatch, more, said):
    message = run(monkeypatch, ppo_sentiment, *plan(names, tmp_path, *more))
    assert message.startswith(f"error: {said}") or message.startswith(f"error: model {said}")
    assert "\n" not in message


def test_a_quiet_launch_adds_nothing(names, tmp_path):
    """Without --quiet, accelerate shows a traceback of its own, with the command line."""
    launcher = ["-m", "accelerate.commands.launch", "--quiet", "--num_processes=1", "--num_machines=1"]
    launcher += ["--mixed_precision=no", "--dynamo_backend=no"]
    done = launch(*launcher, SCRIPT, *published(names, tmp_path / "run", "--batch_size", "12"), check=False)
    assert done.returncode == 1
    assert "batch_size (12) must be a multiple of" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"data": "no.jsonl"}, "--data no.jsonl: there is no such file or folder"),
        ({"eval_data": "no.jsonl"}, "--eval_data no.jsonl: there is no such file or folder"),
        ({"critic_replay": "no.jsonl"}, "--critic_replay no.jsonl: there is no such file or folder"),
        ({"reward": "no.json"}, "--reward no.json: there is no such file or folder"),
        ({"reward": "no.py:reward"}, "--reward no.py: there is no such file or folder"),
    ],
)
def test_missing_files_are_named_by_their_flag_before_anything_is_loaded(task, tmp_path, monkeypatch, given, said):
    loaded = []
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", lambda *_, **__: loaded.append(1))
    flags = custom_flags(task, given.get("reward", f"{task}/mine.py:odd_share"), tmp_path / "run", "--dry_run")
    more = [f"--{name}={value}" for name, value in given.items() if name != "reward"]
    assert run(monkeypatch, ppo_custom, *flags, *more) == f"error: {said}"
    assert not loaded
    assert not (tmp_path / "run").exists()
