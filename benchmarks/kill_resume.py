"""Training scripts killed with SIGKILL at random moments and resumed, compared with a run that nobody touched.

    python -m benchmarks.kill_resume --kills 20

Runs of real scripts on tiny models, each kind once without a break; then again, killed `--kills` times, and each time
taken up with --resume by the same command. One kill in five falls into the start of the script, the others from the
moment the run is taken up to about three steps later: generating, waiting for the critic, updating, logging, saving.
A run that comes to its end between two kills is compared, and the next one started. Equal must be, to the last bit,
every file of the final model, and metrics.jsonl, samples.jsonl and critiques.jsonl but for times.

Not covered: a machine that loses power (files are synced, which a kill can't show), more than one machine.
"""

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.fake_openai import Answer, FakeOpenAI, completion
from tests.rewards.toy_classifiers import save_classifier
from tests.tiny import perturb_weights, tiny_llama, tiny_tokenizer
from trl.jsonl import read_jsonl
from trl.models import RewardModel

ROOT = Path(__file__).resolve().parents[1]
ENVIRONMENT = os.environ | {
    "OMP_WAIT_POLICY": "PASSIVE",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "OPENAI_API_KEY": "none",
    "ACCELERATE_USE_CPU": "true",
    "PYTHONPATH": str(ROOT),
}
LOGS = ("metrics.jsonl", "samples.jsonl", "critiques.jsonl")
STARTS = ("What", "A", "Nothing", "This", "I", "It", "The", "Such", "You", "My", "Bad", "Dull", "So", "He")
REVIEW = "{} film was a quiet wonder and the acting was better than anything I have seen this year."
SHOWN = re.compile(r"Sentence to be Labeled:\n(.*)\n\nIdentified Positive Text Span:\n$")


def write_inputs(folder: Path) -> None:
    """Models and data for every kind of run."""
    tokenizer = tiny_tokenizer()
    policy = tiny_llama(layers=4)
    policy.config.max_position_embeddings = 512  # rotary positions know no limit of their own
    policy.save_pretrained(folder / "policy")
    tokenizer.save_pretrained(folder / "policy")
    save_classifier(folder / "sentiment", ["NEGATIVE", "POSITIVE"])
    save_classifier(folder / "toxicity", ["nothate", "hate"])
    reward_model = RewardModel.from_pretrained(tiny_llama(seed=3))
    reward_model.backbone.config.max_position_embeddings = 512
    perturb_weights(reward_model.head, seed=4, scale=0.5)
    reward_model.save_pretrained(folder / "reward")
    tokenizer.save_pretrained(folder / "reward")
    reviews = [{"text": f"{word} {REVIEW.format('The') * 3}"} for word in STARTS]
    prompts = [{"prompt": {"text": f"{word} film was the", "toxicity": 0.9}} for word in STARTS]
    posts = [{"prompt": f"POST: {REVIEW.format(word)}\nTL;DR:", "label": f"{word} film."} for word in STARTS]
    text = [{"text": REVIEW.format("The") * 20}]
    (folder / "posts").mkdir()
    for name, rows in (("reviews", reviews), ("prompts", prompts), ("text", text), ("posts/train", posts),
                       ("posts/valid", posts[:4])):  # fmt: skip
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def command(kind: str, inputs: Path, critic_url: str) -> list[str]:
    """The training script of a kind with its flags, but for the output folder and the number of steps."""
    sizes = "--batch_size 4 --mini_batch_size 2 --ppo_epochs 2 --learning_rate 0.003 --save_freq 2 --epochs 1000"
    sentiment = (
        f"examples/sentiment/ppo_sentiment.py --model_name {inputs}/policy --query_dataset {inputs}/reviews.jsonl"
        f" --reward_model {inputs}/sentiment --min_new_tokens 4 --max_new_tokens 8 --num_shared_layers 2"
    )
    critic = "--use_intrinsic_reward --positive_reward_value 0.5 --negative_reward_value -0.5"
    match kind:
        case "scalar":
            flags = f"{sentiment} --use_score_scaling --use_score_norm"
        case "two processes":
            launcher = "-m torch.distributed.run --nproc_per_node=2 --standalone"
            flags = f"{launcher} {sentiment} {critic} --critic lexicon --use_score_scaling"
        case "critic":
            flags = (
                f"{sentiment} {critic} --critic openai --critic_base_url {critic_url} --critic_model m"
                " --critic_prices 1 2 --critic_budget_usd 9"
            )
        case "lora":
            flags = (
                f"examples/toxicity/ppo_toxicity_peft.py --model_name {inputs}/policy --lora_r 4 --lora_dropout 0.1"
                f" --query_dataset {inputs}/prompts.jsonl --reward_model {inputs}/toxicity --output_min_length 4"
                f" --output_max_length 8 {critic} --critic lexicon --intrinsic_reward_threshold 9"
            )
        case "value model":
            flags = (
                f"examples/summarization/ppo_summ_rlhf.py --model_name {inputs}/policy --query_dataset {inputs}/posts"
                f" --reward_model_ckpt_path {inputs}/reward --value_model_path {inputs}/reward --output_min_length 4"
                f" --output_max_length 8 --ptx_file {inputs}/text.jsonl --ptx_coef 0.1 --eval_every 3 --eval_prompts 4"
            )
        case _:
            raise ValueError(f"unknown kind {kind!r}; expected one of {', '.join(KINDS)}")
    return [sys.executable, *flags.split(), *sizes.split()]


KINDS = ("scalar", "critic", "lora", "value model", "two processes")


def praise_first_word(body: dict[str, Any]) -> Answer:
    """What a critic would say who likes the first word of every text; the same whenever it is asked."""
    shown = SHOWN.search(body["messages"][-1]["content"])
    first = shown[1].split()[0] if shown else "OK"
    return completion(f"[Span 1]: {first}\n\nIdentified Negative Text Span:\nNone identified", usage=(300, 20))


@dataclass
class Outcome:
    """What came of one kind."""

    kind: str
    steps: int
    kills: int = 0
    runs: int = 0
    resumed: int = 0
    """Starts that found a checkpoint."""
    lost: int = 0
    """Steps that were logged before a kill and made again."""
    differences: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        verdict = "; ".join(self.differences) or "identical"
        return (
            f"{self.kind:15} {self.runs} runs of {self.steps} steps, {self.kills} kills, {self.resumed} resumed from a "
            f"checkpoint, {self.lost} steps made again: {verdict}"
        )


class Trial:
    """One kind of run: how it ends by itself, how fast it is, and what becomes of it when it is killed."""

    def __init__(self, kind: str, folder: Path, inputs: Path, critic_url: str, steps: int):
        self.command, self.folder, self.steps = [*command(kind, inputs, critic_url), f"--steps={steps}"], folder, steps
        self.outcome = Outcome(kind, steps)
        self.whole = folder / "whole"
        begun = time.monotonic()
        with self._started(self.whole) as process:
            self._wait_for_training(process, self.whole / "metrics.jsonl", b"")
            self.start_seconds = time.monotonic() - begun
            self._finish(process)
        self.step_seconds = (time.monotonic() - begun - self.start_seconds) / steps

    def kill_times(self, kills: int, generator: random.Random) -> Outcome:
        """Kill so often, over as many runs as it takes, and let the last run end."""
        while self.outcome.kills < kills:
            out = self.folder / f"run-{self.outcome.runs}"
            while not self._ends(out, kills, generator):
                pass
            self.outcome.runs += 1
            self.outcome.differences += differences(self.whole, out)
        return self.outcome

    def _ends(self, out: Path, kills: int, generator: random.Random) -> bool:
        """Start or resume a run and kill it, unless it has been killed often enough; whether it came to its end."""
        metrics = out / "metrics.jsonl"
        before = metrics.read_bytes() if metrics.exists() else b""
        self.outcome.resumed += any(out.glob("checkpoint-*"))
        with self._started(out) as process:
            if self.outcome.kills == kills:
                self._finish(process)
                return True
            if generator.random() < 0.2:
                delay = generator.uniform(0, self.start_seconds)
            else:
                self._wait_for_training(process, metrics, before)
                delay = self._wait_for_steps(process, metrics, generator.randrange(3)) * generator.uniform(0, 1.2)
            try:
                process.wait(delay)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                self.outcome.kills += 1
                process.wait()
                self.outcome.lost += _logged(metrics) - _saved(out)
                return False
            self._finish(process)
            return True

    @contextmanager
    def _started(self, out: Path) -> Iterator[subprocess.Popen[bytes]]:
        """The script in a process group of its own; its messages go to a file."""
        with (self.folder / "messages.txt").open("wb") as messages:
            words = [*self.command, f"--output_dir={out}", "--resume"]
            process = subprocess.Popen(
                words, cwd=ROOT, env=ENVIRONMENT, stdout=messages, stderr=messages, start_new_session=True
            )
            try:
                yield process
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()

    def _wait_for_training(self, process: subprocess.Popen[bytes], metrics: Path, before: bytes) -> None:
        """Until the run writes its files: it cuts them back to the checkpoint, or logs its first row."""
        while process.poll() is None and (metrics.read_bytes() if metrics.exists() else b"") == before:
            time.sleep(0.01)

    def _wait_for_steps(self, process: subprocess.Popen[bytes], metrics: Path, count: int) -> float:
        """Until so many more steps are logged; how long one of them took, in seconds."""
        begun, goal = time.monotonic(), _logged(metrics) + count
        while process.poll() is None and _logged(metrics) < goal:
            time.sleep(0.01)
        return (time.monotonic() - begun) / count if count else self.step_seconds

    def _finish(self, process: subprocess.Popen[bytes]) -> None:
        if process.wait():
            said = (self.folder / "messages.txt").read_text()[-3000:]
            raise SystemExit(f"error: a run ({self.outcome.kind}) failed by itself:\n{said}")


def differences(whole: Path, other: Path) -> list[str]:
    """Names of the files of the final model and of the logs in which two run folders differ."""
    names = {path.relative_to(folder) for folder in (whole, other) for path in model_files(folder)}
    found = [
        str(name)
        for name in sorted(names)
        if not (other / name).exists()
        or not (whole / name).exists()
        or (whole / name).read_bytes() != (other / name).read_bytes()
    ]
    return found + [name for name in LOGS if timeless(whole / name) != timeless(other / name)]


def model_files(folder: Path) -> list[Path]:
    """Without the two files that name the command, in which the folders differ."""
    kept = [*folder.glob("*"), *folder.glob("value_model/*")]
    return [
        path
        for path in kept
        if path.is_file() and path.suffix in (".safetensors", ".json", ".txt", ".jinja") and path.name != "run.json"
    ]


def timeless(log: Path) -> list[dict[str, Any]]:
    """The rows of a log without what depends on the clock; in any order, since two processes write critiques."""
    rows = read_jsonl(log) if log.exists() else []
    for row in rows:
        for name in [name for name in row if name.startswith(("time/", "critic/latency"))]:
            del row[name]
        if row.get("call"):
            del row["call"]["latency"]
    return sorted(rows, key=lambda row: (row["step"], json.dumps(row)))


def _logged(metrics: Path) -> int:
    return max((row["step"] for row in read_jsonl(metrics)), default=0) if metrics.exists() else 0


def _saved(out: Path) -> int:
    return max((int(path.name.split("-")[1]) for path in out.glob("checkpoint-*")), default=0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=20, help="of each kind of run")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--steps", type=int, default=24, help="of a run")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    arguments = parser.parse_args()
    outcomes = []
    with tempfile.TemporaryDirectory() as folder, FakeOpenAI(praise_first_word) as server:
        write_inputs(Path(folder))
        for kind in arguments.kinds:
            own = Path(folder) / kind.replace(" ", "_")
            own.mkdir()
            trial = Trial(kind, own, Path(folder), server.url, arguments.steps)
            outcomes.append(trial.kill_times(arguments.kills, random.Random(f"{arguments.seed} {kind}")))
            print(outcomes[-1], flush=True)
    if any(outcome.differences for outcome in outcomes):
        raise SystemExit("error: a resumed run differs from the uninterrupted one")


if __name__ == "__main__":
    main()
