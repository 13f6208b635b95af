"""Golden values of Hugging Face TRL's reward functions on random inputs.

Writes inputs and values to ``tests/golden/peer_rewards.json``; ``tests/rewards/test_golden_peer.py`` replays them
with ours. The peer's package is called ``trl`` like ours, so it needs its own environment, and never the repository
root on its path:

    python -m venv hftrl && hftrl/bin/pip install 'torch>=2.4,<2.14' trl==1.16.0 'math-verify>=0.9'
    hftrl/bin/python benchmarks/peer/reward_values.py

Covered: texts of one message, solutions as LaTeX and as plain text, token ids. Not covered: inputs that overrun a
deadline, since the deadlines differ; conversations of several messages (the peer judges the first, ours the last).
"""

import json
import random
from importlib.metadata import version
from pathlib import Path
from typing import Any

from trl.rewards import (
    accuracy_reward,
    get_cosine_scaled_reward,
    get_repetition_penalty_reward,
    get_soft_overlong_punishment,
    reasoning_accuracy_reward,
    think_format_reward,
)

OUTPUT = Path(__file__).resolve().parents[2] / "tests" / "golden" / "peer_rewards.json"
SEED = 0

GOLDS = [
    "{a}", "{a}/{b}", r"\frac{{{a}}}{{{b}}}", r"$\frac{{{a}}}{{{b}}}$", r"\boxed{{{a}}}", "{a}.5", r"\sqrt{{{a}}}",
    "-{a}", r"{a}\%", r"$x = {a}$", r"$({a}, {b}]$", r"$\{{{a}, {b}\}}$", "${a} < x < {b}$", "$x^2 + {a}x$",
    r"${a}\pi$", "{a} cm", r"\frac{a}{b}", r"$\begin{{pmatrix}} {a} \\ {b} \end{{pmatrix}}$", "$10^{{{a}}}$", "six",
    "", "no idea", r"\boxed{{}}", r"\text{{Paris}}", "１２", r"${a}^\circ$", "{a},000",
]  # fmt: skip
ANSWERS = [
    r"\boxed{{{a}}}", r"\boxed{{{a}/{b}}}", r"\boxed{{\frac{{{a}}}{{{b}}}}}", r"$\frac{{{a}}}{{{b}}}$", "{a}",
    "{a}/{b}", r"\boxed{{{a}.5}}", r"\boxed{{{a}.50}}", r"\boxed{{\sqrt{{{a}}}}}", r"\boxed{{-{a}}}",
    r"\boxed{{{a}\%}}", r"\boxed{{x = {a}}}", r"\boxed{{({a}, {b}]}}", r"\boxed{{\{{{b}, {a}\}}}}",
    r"\boxed{{{a} < x < {b}}}", r"\boxed{{x(x + {a})}}", r"\boxed{{{a}\pi}}", r"\boxed{{{a}\text{{ cm}}}}",
    r"\boxed{{\frac{{2 \cdot {a}}}{{2 \cdot {b}}}}}", r"\boxed{{\begin{{pmatrix}} {a} \\ {b} \end{{pmatrix}}}}",
    r"\boxed{{10^{{{a}}}}}", r"\boxed{{}}", "", "no idea", r"\boxed{{{b}}} no, \boxed{{{a}}}",
    r"\boxed{{{a}}} and ${b}$", r"\boxed{{\text{{Paris}}}}", r"\boxed{{{a}", r"\[ {a} \]", r"the answer is ${a}$",
    r"\boxed{{{a}^\circ}}", r"\boxed{{{a}{{,}}000}}", "π ≈ \\boxed{{{a}}} ✓", r"\frac{{{a}}}{{{b}}}",
]  # fmt: skip
PIECES = ["<think>", "</think>", "\n", " ", "reasoning", "answer", "<think", "think>", "<answer>", "é"]
DELIMITERS = [None, ["</think>"], ["<answer>"], ["</think>", "<answer>"], ["<answer>", "</think>"]]


def main() -> None:
    draw = random.Random(SEED)
    golden = {
        "peer": {name: version(name) for name in ("trl", "math-verify", "latex2sympy2_extended", "sympy")},
        "seed": SEED,
        "accuracy": accuracy(draw, 240),
        "reasoning": [reasoning(draw) for _ in range(100)],
        "cosine": [cosine(draw) for _ in range(80)],
        "think_format": think_format(draw, 200),
        "repetition": [repetition(draw) for _ in range(100)],
        "overlong": [overlong(draw) for _ in range(60)],
    }
    lines = [f"{json.dumps(section)}: {json.dumps(content, ensure_ascii=False)}" for section, content in golden.items()]
    OUTPUT.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def pair(draw: random.Random) -> tuple[str, str]:
    """A solution and an answer made of the same two numbers, in forms that fit each other half of the time."""
    gold = draw.randrange(len(GOLDS))
    a, b = draw.sample(range(2, 20), 2)
    candidates = ANSWERS
    if draw.random() < 0.5:
        head = GOLDS[gold].replace("$", "").replace(r"\boxed", "")[:7]
        candidates = [answer for answer in ANSWERS if head in answer] or ANSWERS
    return GOLDS[gold].format(a=a, b=b), draw.choice(candidates).format(a=a, b=b)


def judged(function: Any, texts: list[str], solution: list[str], **settings: Any) -> dict[str, Any]:
    columns: dict[str, list[str]] = {}
    completions = [[{"role": "assistant", "content": text}] for text in texts]
    rewards = function(completions=completions, solution=solution, log_extra=columns.__setitem__, **settings)
    return {"completions": texts, **columns, "rewards": rewards}


def accuracy(draw: random.Random, count: int) -> dict[str, Any]:
    solution, texts = zip(*(pair(draw) for _ in range(count)), strict=True)
    return judged(accuracy_reward, list(texts), list(solution))


def reasoning(draw: random.Random) -> dict[str, Any]:
    gold, answer = pair(draw)
    pieces = [*draw.choices(["</think>", "<answer>", "so ", r"\boxed{3} "], k=draw.randint(0, 5)), answer]
    if draw.random() < 0.3:
        draw.shuffle(pieces)
    delimiters = draw.choice(DELIMITERS)
    return {
        "reasoning_delimiters": delimiters,
        **judged(reasoning_accuracy_reward, ["".join(pieces)], [gold], reasoning_delimiters=delimiters),
    }


def cosine(draw: random.Random) -> dict[str, Any]:
    settings = {"max_len": draw.randint(1, 100)}
    if draw.random() < 0.5:
        settings |= {"min_value_wrong": -draw.random(), "max_value_correct": 2 * draw.random()}
    gold, answer = pair(draw)
    length = draw.randint(0, 150)
    rewards = get_cosine_scaled_reward(**settings)([[{"content": answer}]], [gold], [[1] * length])
    return {"settings": settings, "completions": [answer], "solution": [gold], "length": length, "rewards": rewards}


def think_format(draw: random.Random, count: int) -> dict[str, Any]:
    texts = [
        ("<think>" if draw.random() < 0.7 else "") + "".join(draw.choices(PIECES, k=draw.randint(0, 6)))
        for _ in range(count)
    ]
    return {"completions": texts, "rewards": think_format_reward([[{"content": text}] for text in texts])}


def repetition(draw: random.Random) -> dict[str, Any]:
    settings = {"ngram_size": draw.randint(1, 5), "max_penalty": draw.choice([-1.0, -0.5, -2.0, 0.0])}
    ids = [draw.choices(range(draw.randint(1, 6)), k=draw.randint(0, 25)) for _ in range(3)]
    return {"settings": settings, "ids": ids, "rewards": get_repetition_penalty_reward(**settings)(ids)}


def overlong(draw: random.Random) -> dict[str, Any]:
    longest = draw.randint(0, 60)
    settings = {"max_completion_len": longest, "soft_punish_cache": draw.choice([0, longest, draw.randint(0, longest)])}
    lengths = draw.choices(range(80), k=6)
    rewards = get_soft_overlong_punishment(**settings)([[1] * length for length in lengths])
    return {"settings": settings, "lengths": lengths, "rewards": rewards}


if __name__ == "__main__":
    main()
