"""The scripts' command line and run folder: spellings of flags, presets, and no secret on disk."""

import json
import sys
from dataclasses import dataclass, field, replace

import pytest
import tyro

from trl.run import RunArgs, ToxicityArgs, parse_args, prepare_output_dir
from trl.trainer.config import PPOConfig
from trl.trainer.supervised_config import SupervisedConfig


@dataclass
class Args(ToxicityArgs, RunArgs):
    """Settings of a made-up task."""

    ppo_config: tyro.conf.OmitArgPrefixes[PPOConfig] = field(
        default_factory=lambda: PPOConfig(batch_size=8, mini_batch_size=8)
    )

    @classmethod
    def builtin(cls) -> "Args":
        return cls(
            ppo_config=replace(cls().ppo_config, model_name="builtin:smollm2", learning_rate=5e-5), num_shared_layers=20
        )


@pytest.mark.parametrize("flag", ["--use_instric_reward", "--use_intrinsic_rewad", "--use-intrinsic-reward"])
@pytest.mark.parametrize("prefix", ["--", "--ppo_config.", "--ppo-config."])
def test_all_spellings_of_a_flag_are_one_flag(flag, prefix):
    args = parse_args(Args, [flag, f"{prefix}learning_rate", "3e-5", f"{prefix}seed=7", "--model_save_path", "out"])
    assert args.use_intrinsic_reward
    assert args.ppo_config.learning_rate == 3e-5
    assert args.ppo_config.seed == 7
    assert args.output_dir == "out"


def test_a_builtin_policy_implies_the_preset_for_what_is_not_given():
    for argv in (["--preset", "builtin"], ["--ppo_config.model_name=builtin:smollm2"]):
        args = parse_args(Args, [*argv, "--batch_size", "16"])
        assert args.num_shared_layers == 20
        assert args.ppo_config.learning_rate == 5e-5
        assert args.ppo_config.batch_size == 16
        assert args.critic_kind == "score"
    plain = parse_args(Args, ["--model_name", "gpt2"])
    assert plain.num_shared_layers is None
    assert plain.critic_kind == "openai"


def test_run_json_holds_no_key_and_no_password(tmp_path, monkeypatch):
    flags = ["--perspective_api", "KEY-1234", "--critic_base_url", "https://me:PASS-5678@host/v1"]
    monkeypatch.setattr(sys, "argv", ["ppo.py", *flags, "--perspective-api=KEY-9999"])
    args = parse_args(Args, [*flags, "--output_dir", str(tmp_path / "run")])
    text = (prepare_output_dir(args) / "run.json").read_text()
    assert not any(secret in text for secret in ("KEY-1234", "KEY-9999", "PASS-5678"))
    assert json.loads(text)["args"]["critic_base_url"] == "https://***@host/v1"


@pytest.mark.parametrize(
    ("argv", "path"),
    [
        (["--resume"], "latest"),
        (["--resume", "--batch_size", "4"], "latest"),
        (["--resume", "out/checkpoint-3"], "out/checkpoint-3"),
        (["--resume=out/checkpoint-3", "--seed", "1"], "out/checkpoint-3"),
        ([], None),
    ],
)
def test_resume_works_without_a_path(argv, path):
    @dataclass
    class Supervised(SupervisedConfig):
        """Settings of a supervised task."""

        overwrite: bool = False

    assert parse_args(Supervised, argv).resume == path


@pytest.mark.parametrize(
    ("critic", "warned"), [("score", True), ("lexicon", True), ("random", False), ("openai", False), ("local", False)]
)
def test_a_prompt_file_that_the_critic_does_not_read_is_said(critic, warned, caplog):
    """``random`` is here the control of openai, the default of a policy that is not built in."""
    flags = ["--use_intrinsic_reward", "--critic", critic, "--model_name", "gpt2"]
    parse_args(Args, flags)
    assert not caplog.records  # the default prompt was not asked for
    parse_args(Args, [*flags, "--prompt_file", "mine.txt"])
    assert ["--prompt_file mine.txt is not read" in record.getMessage() for record in caplog.records] == [True] * warned


def test_trackers_which_record_the_command_line_see_no_key(monkeypatch):
    words = ["ppo.py", "--perspective_api", "KEY-1234", "--critic_base_url=https://me:PASS-5678@host/v1", "--seed", "7"]
    monkeypatch.setattr(sys, "argv", words)
    args = parse_args(Args)
    assert (args.perspective_api, args.ppo_config.seed) == ("KEY-1234", 7)
    assert args.critic_base_url == "https://me:PASS-5678@host/v1"
    assert sys.argv == [*words[:2], "***", "--critic_base_url=https://***@host/v1", *words[4:]]


def test_tensorboard_writes_into_the_run_folder():
    args = parse_args(Args, ["--log_with", "tensorboard", "--output_dir", "somewhere"])
    assert args.ppo_config.project_kwargs == {"logging_dir": "somewhere"}
    assert Args().ppo_config.project_kwargs == {}
