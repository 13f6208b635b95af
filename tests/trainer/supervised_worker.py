"""One process of a supervised run whose global batch has seven rows; writes what must not depend on the split."""

import json
import os
import sys
import tempfile
from pathlib import Path

from tests.trainer.test_supervised import ROWS, Regression, config, weights

world = int(os.environ.get("WORLD_SIZE", "1"))
groups = [list(range(start, start + 7)) for start in (0, 7)]
with tempfile.TemporaryDirectory() as folder:
    settings = config(Path(folder), batch_size=8 // world, gradient_accumulation_steps=8 // world, steps=4)
    trainer = Regression(settings, dropout=0.0, rows=ROWS[:14], groups=groups)
    metrics = trainer.train()
result = {"weights": weights(trainer).tolist(), "loss": metrics["loss"]}
Path(sys.argv[1], f"{trainer.accelerator.process_index}.json").write_text(json.dumps(result))
trainer.accelerator.wait_for_everyone()
trainer.accelerator.end_training()
