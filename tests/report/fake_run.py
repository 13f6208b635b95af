"""A run folder with data like a real one's, written through RunLog."""

import json
import random
from pathlib import Path
from typing import Any

from trl.report.runlog import RunLog

QUERIES = ["This film has", "I went to see it because", "The director of this", "Honestly, I"]
RESPONSES = [
    " been a delightful surprise from the first scene, and the acting is superb throughout",
    " no plot to speak of; the dialogue is terrible and I was bored after ten minutes",
    " its moments, although the second half drags a little before a lovely ending",
    " knows how to build tension.\n\nA waste of a talented cast, sadly, but worth a look",
]
POSITIVE = {"delightful", "superb", "lovely", "talented", "worth"}
NEGATIVE = {"terrible", "bored", "drags", "waste", "sadly,", "no"}


def sample(rng: random.Random, step: int) -> dict[str, Any]:
    response = rng.choice(RESPONSES)
    pieces = [" " + word for word in response.split(" ")[1:]]
    tokens, spans = [], []
    for piece in pieces:
        word = piece.strip()
        intrinsic = 0.5 if word in POSITIVE else -0.5 if word in NEGATIVE else 0.0
        if intrinsic:
            spans.append({"text": word, "polarity": "positive" if intrinsic > 0 else "negative", "label": None})
        tokens.append(
            {
                "text": piece,
                "intrinsic": intrinsic,
                "kl": rng.gauss(0.1 + step / 400, 0.3),
                "value": 1.0 + step / 40 + rng.gauss(0, 0.4),
                "advantage": intrinsic * 1.5 + rng.gauss(0, 0.5),
            }
        )
    reply = "Identified Positive Text Span:\n" + "\n".join(f"[Span {i}]: {s['text']}" for i, s in enumerate(spans, 1))
    return {
        "query": rng.choice(QUERIES),
        "response": response,
        "score": sum(token["intrinsic"] for token in tokens) + step / 30 + rng.gauss(0, 0.6),
        "tokens": tokens,
        "spans": spans,
        "reply": reply,
        "status": "ok" if spans else "none",
    }


def write_run(
    folder: Path,
    *,
    steps: int = 60,
    gain: float = 1.0,
    critic: bool = True,
    seed: int = 0,
    settings: bool = True,
    prices: bool = False,
) -> Path:
    """``prices``: the critic is behind an endpoint whose prices are known; ``settings``: with a run.json."""
    rng = random.Random(seed)
    if settings:
        write_settings(folder, seed, use_intrinsic_reward=critic, gain=gain)
    with RunLog(folder) as log:
        for step in range(1, steps + 1):
            log.log_metrics(step, step_metrics(rng, step, gain, critic, prices))
            log.log_samples(step, [sample(rng, step) for _ in range(4)])
    return folder


def write_settings(folder: Path, seed: int, **args: Any) -> None:
    """What a training script records of its command line."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {"model_name": "tiny", "learning_rate": 1e-4, "seed": seed}
    recorded = {
        "command": ["python", "examples/x.py"],
        "args": {"ppo_config": config, "output_dir": str(folder), **args},
    }
    (folder / "run.json").write_text(json.dumps(recorded))


def step_metrics(rng: random.Random, step: int, gain: float, critic: bool, prices: bool) -> dict[str, float]:
    learnt = 1 - 0.96**step
    metrics = {
        "objective/score": 0.3 + gain * 2 * learnt + rng.gauss(0, 0.18),
        "objective/kl": 7 * learnt + rng.gauss(0, 0.35),
        "objective/entropy": 48 - 9 * learnt + rng.gauss(0, 0.8),
        "objective/intrinsic": -0.6 + 0.9 * learnt + rng.gauss(0, 0.1) if critic else 0.0,
        "ppo/policy/clipfrac": abs(rng.gauss(0.12, 0.03)),
        "ppo/val/var_explained": 0.7 * learnt + rng.gauss(0, 0.05),
        "time/step": 4 + abs(rng.gauss(0, 0.4)),
        "tokens/queries": 48.0,
        "tokens/queries_len_mean": 3.0,
        "tokens/responses": 320.0,
    }
    if critic:
        metrics |= {"critic/hit_rate": min(1.0, 0.95 + rng.gauss(0, 0.02)), "critic/requests": 12.0}
        metrics |= {"critic/matched": 18.0, "critic/unmatched": float(rng.randrange(1, 5))}
    if critic and prices:
        metrics |= {"critic/http_requests": 12.0, "critic/cost_usd": 0.002 + rng.random() / 1000}
        metrics |= {"critic/tokens_in": 5200.0, "critic/tokens_out": 610.0}
    if step % 10 == 0:
        metrics["eval/share_positive"] = 0.45 + gain * 0.4 * learnt
    return metrics
