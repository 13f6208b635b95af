"""decoding.py beyond plain models: LoRA adapters, and settings that contradict each other."""

import json
import subprocess
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from tests.e2e.test_eval_scripts import ENVIRONMENT, command, run
from tests.test_metrics import byte_level_tokenizer, tiny_gpt2
from trl.jsonl import read_jsonl


@pytest.fixture
def base(tmp_path: Path) -> Path:
    tokenizer = byte_level_tokenizer()
    tiny_gpt2(len(tokenizer)).save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": {"text": "the film"}}) + "\n")
    return tmp_path / "base"


def texts(model: Path, folder: Path) -> list[str]:
    output = folder / f"{model.name}.jsonl"
    run("decoding.py", "--lm_dir", model, "--prompts_file", folder / "prompts.jsonl", "--output_file", output)
    return [item["text"] for row in read_jsonl(output) for item in row["generations"]]


def test_a_lora_adapter_is_decoded_with_its_base(base: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = LoraConfig(r=4, lora_alpha=64, task_type="CAUSAL_LM", init_lora_weights=False, fan_in_fan_out=True)
    adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
    adapted.save_pretrained(tmp_path / "adapter")
    byte_level_tokenizer().save_pretrained(tmp_path / "adapter")
    merged = adapted.merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    byte_level_tokenizer().save_pretrained(tmp_path / "merged")
    got = texts(tmp_path / "adapter", tmp_path)
    assert got == texts(tmp_path / "merged", tmp_path)
    assert got != texts(base, tmp_path)


def test_settings_that_contradict_each_other_are_one_line(base: Path, tmp_path: Path) -> None:
    arguments = ("--lm_dir", base, "--prompts_file", tmp_path / "prompts.jsonl", "--output_file", tmp_path / "out")
    for wrong, message in (
        (("--no-do_sample",), "25 equal texts"),
        (("--max_length", 5), "min <= max"),
        (("--batch_size", 0), "--batch_size is 0"),
    ):
        done = subprocess.run(
            command("decoding.py", *arguments, *wrong), env=ENVIRONMENT, capture_output=True, text=True
        )
        assert done.returncode == 1
        assert message in done.stderr.splitlines()[-1] and "Traceback" not in done.stderr
