"""The model card of a trained policy: what was run, what came out, and no secret."""

import json
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard

from trl.report.model_card import write_model_card
from trl.report.runlog import RunLog

COMMAND = ["python", "examples/sentiment/ppo_sentiment.py", "--critic_base_url", "http://***@host/v1", "--x", "a b`c"]


def write_run(folder: Path, args: dict[str, Any], command: list[str] = COMMAND) -> None:
    with RunLog(folder) as log:
        log.log_metrics(0, {"eval/score": 0.25})
        for step in range(1, 41):
            critic = {"critic/requests": 3.0, "critic/cost_usd": 0.001}
            held_out = {"eval/score": step / 32} if step % 20 == 0 else {}
            log.log_metrics(step, {"objective/score": float(step), "objective/kl": 0.1 * step, **critic, **held_out})
    (folder / "run.json").write_text(json.dumps({"command": command, "args": args}))


ARGS = {
    "ppo_config": {
        "model_name": "lvwerra/gpt2-imdb",
        "query_dataset": "imdb",
        "reward_model": "sentiment-analysis:lvwerra/distilbert-imdb",
        "tracker_kwargs": {"wandb": {"key": "secret-1"}},
        "seed": 3,
    },
    "use_intrinsic_reward": True,
    "critic": "openai",
    "perspective_api": "secret-2",
    "critic_base_url": "http://user:secret-3@host/v1",
    "steps": None,
}


def test_the_card_has_command_settings_and_results(tmp_path: Path) -> None:
    write_run(tmp_path, ARGS)
    write_model_card(tmp_path, {})
    card = ModelCard.load(tmp_path / "README.md")
    assert card.data.to_dict() == {
        "base_model": "lvwerra/gpt2-imdb",
        "datasets": "imdb",
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["ppo", "relc", "reinforcement-learning"],
    }
    for line in (
        "| held-out reward, step 40 | 1.25 |",
        "| held-out reward, before training | 0.25 |",
        "| reward of the training batches, last steps | 38.5 |",  # mean of 37 to 40
        "| KL from the reference model, nats per response, last steps | 3.85 |",
        "| critic requests | 120 |",
        "| critic cost, $ | 0.04 |",
        "python examples/sentiment/ppo_sentiment.py --critic_base_url 'http://***@host/v1' --x 'a b`c'",
    ):
        assert line in card.text.splitlines()
    assert (
        "the reward `sentiment-analysis:lvwerra/distilbert-imdb` and token rewards from the critic `openai`"
        in card.text
    )
    shown = json.loads(card.text.split("```json\n")[1].split("```")[0])
    assert shown["ppo_config"]["seed"] == 3 and "steps" not in shown
    assert "secret" not in card.content


def test_a_checkpoint_has_the_results_so_far_and_a_local_name_is_no_hub_id(tmp_path: Path) -> None:
    args = {**ARGS, "ppo_config": {"model_name": str(tmp_path), "query_dataset": "builtin:imdb"}}
    write_run(tmp_path, args, command=["python", "x.py", "--text", "```"])
    checkpoint = tmp_path / "checkpoint-40"
    checkpoint.mkdir()
    (checkpoint / "adapter_config.json").write_text("{}")
    write_model_card(checkpoint, {})
    card = ModelCard.load(checkpoint / "README.md")
    assert card.data.base_model is None and card.data.datasets is None and card.data.library_name == "peft"
    assert "| critic requests | 120 |" in card.text
    assert "````bash\npython x.py --text '```'\n````" in card.text  # what is quoted can't end the quotation


@pytest.mark.parametrize("content", [None, '{"args": {"ste'])
def test_a_model_that_no_script_trained(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "run.json").write_text(content)
    write_model_card(tmp_path, {"model_name": "gpt2", "learning_rate": 1e-5, "tracker_kwargs": {"key": "secret"}})
    text = (tmp_path / "README.md").read_text()
    assert "base_model: gpt2" in text and '"learning_rate": 1e-05' in text
    assert "None were recorded" in text and "Not recorded" in text and "secret" not in text
