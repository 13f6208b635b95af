"""One process of two PPO steps on a fixed global batch of eight; writes what must not depend on the split to a file.

What it samples after that, which must depend on the process, comes with it.
"""

import json
import os
import sys
from pathlib import Path

from tests.tiny import tiny_llama
from tests.trainer.test_ppo import BATCH, SCORES, make_trainer
from tests.trainer.test_value_model import make_trainer as make_value_trainer

kind = sys.argv[1]
world = int(os.environ.get("WORLD_SIZE", "1"))
sizes = {"batch_size": 8 // world, "mini_batch_size": 8 // world}
if kind == "value model":
    sizes = {"batch_size": 8 // world, "mini_batch_size": 2, "gradient_accumulation_steps": 4 // world}
    trainer = make_value_trainer(**sizes)
else:
    shared = 2 if kind == "trunk cache" else None
    trainer = make_trainer(tiny_llama(layers=4), shared=shared, sgd=True, **sizes)
accelerator = trainer.accelerator
mine = slice(accelerator.process_index * 8 // world, (accelerator.process_index + 1) * 8 // world)
queries, responses = BATCH
for _ in range(2):
    stats = trainer.step(queries[mine], responses[mine], SCORES[mine])
networks = [trainer.policy, *([trainer.value_model] if trainer.value_model is not None else [])]
weights = [float(w.double().abs().sum()) for network in networks for w in network.state_dict().values()]
kept = {name: value for name, value in stats.items() if not name.startswith("time/")}
sampled = [ids.tolist() for ids in trainer.generate(queries[:1] * 4, max_new_tokens=8, return_prompt=False)]
result = {"world": accelerator.num_processes, "weights": weights, "stats": kept, "sampled": sampled}
Path(sys.argv[2], f"{accelerator.process_index}.json").write_text(json.dumps(result))
accelerator.wait_for_everyone()  # who leaves early closes connections that the other still reads
accelerator.end_training()
