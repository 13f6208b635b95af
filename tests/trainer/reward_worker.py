"""One process of a reward model's training; writes its measures and weights, which must not depend on the split."""

import json
import os
import sys
import tempfile
from pathlib import Path

from tests.trainer.test_reward_trainer import BAD, PAIRS, make

world = int(os.environ.get("WORLD_SIZE", "1"))
pairs = [{**pair, "rejected": f" It is{BAD}{'!' * n}"} for pair in PAIRS for n in range(3)]
with tempfile.TemporaryDirectory() as folder:
    trainer = make(Path(folder), pairs=pairs, held_out=pairs[:7], batch_size=6 // world, steps=3)
    metrics = trainer.train()
weights = [float(p.detach().double().abs().sum()) for p in trainer.unwrapped.parameters()]
kept = {name: value for name, value in metrics.items() if not name.startswith("time/")}
result = {"world": trainer.accelerator.num_processes, "weights": weights, "metrics": kept}
Path(sys.argv[1], f"{trainer.accelerator.process_index}.json").write_text(json.dumps(result))
trainer.accelerator.wait_for_everyone()
trainer.accelerator.end_training()
