"""One process of a small fine-tuning run; writes what must not depend on how rows are divided over processes."""

import json
import os
import sys
import tempfile
from pathlib import Path

import torch

from tests.tiny import tiny_llama, tiny_tokenizer
from tests.trainer.test_sft import ROWS
from trl.trainer.sft import SFTConfig, SFTTrainer

world = int(os.environ.get("WORLD_SIZE", "1"))
with tempfile.TemporaryDirectory() as folder:
    config = SFTConfig(output_dir=folder, batch_size=4 // world, learning_rate=1e-2, steps=3, num_frozen_layers=1)
    trainer = SFTTrainer(config, tiny_llama(), tiny_tokenizer(), ROWS, ROWS[:5])
    metrics = trainer.train()
    learned = [p.flatten()[::7] for p in trainer.unwrapped.parameters() if p.requires_grad]
names = ("loss", "token_accuracy", "eval/loss", "eval/perplexity", "units")
result = {"weights": torch.cat(learned).tolist(), **{name: metrics[name] for name in names}}
Path(sys.argv[1], f"{trainer.accelerator.process_index}.json").write_text(json.dumps(result))
trainer.accelerator.wait_for_everyone()
trainer.accelerator.end_training()
