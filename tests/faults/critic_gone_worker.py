"""One process of a run of two whose critic dies for the second process alone; ends as the scripts do.

critic_gone_worker.py GOOD_URL DEAD_URL PROMPT_FILE FOLDER
"""

import sys
from pathlib import Path

from tests.tiny import tiny_llama
from tests.trainer.test_ppo import BATCH, make_trainer
from trl.critic import IntrinsicReward, OpenAICritic, PromptTemplate
from trl.loop import RunRecord
from trl.run import RunArgs

good_url, dead_url, prompt_file, folder = sys.argv[1:]
trainer = make_trainer(tiny_llama(layers=2), batch_size=8, mini_batch_size=8)
critic = OpenAICritic(
    PromptTemplate.from_file(prompt_file, style="sentiment"),
    "m",
    base_url=dead_url if trainer.accelerator.process_index else good_url,
    max_retries=0,
    fuse_seconds=0,
)
intrinsic = IntrinsicReward(
    critic, trainer.tokenizer, "sentiment", threshold=9, positive_value=0.5, negative_value=-0.5
)
queries, responses = BATCH
scores = [0.0] * len(queries)
batch, texts = {"input_ids": queries, "query": ["a"] * 8}, ["b"] * 8
with RunRecord(RunArgs(), trainer, Path(folder), total=20) as record:
    for _ in range(20):
        pending = intrinsic.submit(queries, responses, scores)
        stats = trainer.step(queries, responses, record.merged(scores, pending), scores_are_scaled=True)
        record.step(stats, batch, responses, texts, scores, pending)
