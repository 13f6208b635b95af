"""README.md of a trained model's folder: the exact command, settings and results, as a Hugging Face model card."""

import json
import re
import shlex
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData

from trl import __version__
from trl.jsonl import replace_file, strict
from trl.report.efficiency import final_value
from trl.report.runlog import METRICS_FILE, SETTINGS_FILE, Run, load_run

LIBRARIES = ("torch", "transformers", "accelerate", "peft")
_FROM_TRAINING = {
    "objective/score": "reward of the training batches",
    "objective/kl": "KL from the reference model, nats per response",
    "objective/intrinsic": "intrinsic reward from the critic's spans, per response",
    "tokens/responses_len_mean": "response tokens",
}
_SECRET_OR_EMPTY = {"perspective_api", "tracker_kwargs", "accelerator_kwargs", "project_kwargs"}
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")

TEMPLATE = """---
{{ card_data }}
---

# {{ name }}

{{ base }}, trained by PPO with {{ rewards }}, with relc ([dense rewards from a language model \
critic](https://aclanthology.org/2024.emnlp-main.515)).

```python
from transformers import pipeline

pipeline("text-generation", model="PATH/OF/THIS/FOLDER")("Your prompt")
```

## Results

{% if results -%}
| | |
|---|---|
{% for what, value in results -%}
| {{ what }} | {{ value }} |
{% endfor %}
Of this one run, as its `metrics.jsonl` has them; the last steps are the last tenth of {{ steps }}.
{%- else -%}
None were recorded beside this model.
{%- endif %}

## Command

{% if command -%}
{{ fence }}bash
{{ command }}
{{ fence }}
{%- else -%}
Not recorded: the model was saved by a program of its own.
{%- endif %}

## Settings

{{ fence }}json
{{ settings }}
{{ fence }}

Made with {{ libraries }}.
"""


def write_model_card(folder: Path, config: Mapping[str, Any]) -> None:
    """Write ``folder/README.md`` for the policy that is saved there, replacing what another library put there.

    The command and all settings come from the ``run.json`` of the run folder, which is ``folder`` or its parent (for a
    checkpoint, and while a model is written); the results from its ``metrics.jsonl``. Without them ``config``, the
    trainer's settings, has to do. No key is in any of these, and a password in a URL is left out.
    """
    run_folder = next((place for place in (folder, folder.parent) if (place / SETTINGS_FILE).exists()), None)
    recorded = {} if run_folder is None else _recorded(run_folder / SETTINGS_FILE)
    settings = _shown(recorded.get("args", config))
    run = None if run_folder is None or not (run_folder / METRICS_FILE).exists() else load_run(run_folder)
    ppo = settings.get("ppo_config", settings)
    text = json.dumps(strict(settings), indent=1, ensure_ascii=False)
    command = shlex.join(map(str, recorded.get("command", [])))
    longest = max((len(ticks) for ticks in re.findall("`+", text + command)), default=0)
    data = ModelCardData(
        base_model=_hub_id(ppo.get("model_name")),
        datasets=_hub_id(ppo.get("query_dataset")),
        library_name="peft" if (folder / "adapter_config.json").exists() else "transformers",
        pipeline_tag="text-generation",
        tags=["ppo", "relc", "reinforcement-learning"],
    )
    card = ModelCard.from_template(
        data,
        template_str=TEMPLATE,
        name="PPO policy" if run_folder is None else run_folder.resolve().name,
        base=f"`{ppo.get('model_name')}`" if ppo.get("model_name") else "A language model",
        rewards=_rewards(settings, ppo),
        results=_results(run) if run is not None else [],
        steps=run.last_step if run is not None else 0,
        command=_without_passwords(command),
        settings=_without_passwords(text),
        fence="`" * max(3, longest + 1),
        libraries=", ".join([f"relc {__version__}", *(f"{name} {version(name)}" for name in LIBRARIES)]),
    )
    replace_file(folder / "README.md", str(card))


def _recorded(path: Path) -> dict[str, Any]:
    """The content of run.json; empty where it is half written, since a card is no reason to fail."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        return {}
    return content if isinstance(content, dict) else {}


def _shown(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings that were set, sub-settings included, without what may hold a key."""
    return {
        name: _shown(value) if isinstance(value, Mapping) else value
        for name, value in settings.items()
        if name not in _SECRET_OR_EMPTY and value is not None
    }


def _rewards(settings: Mapping[str, Any], ppo: Mapping[str, Any]) -> str:
    named = ("reward_model_ckpt_path", "reward", "toxicity_scorer")
    environment = next((settings[name] for name in named if settings.get(name)), ppo.get("reward_model"))
    rewards = f"the reward `{environment}`" if environment else "one reward per response"
    if settings.get("use_intrinsic_reward"):
        critic = f"the critic `{settings['critic']}`" if settings.get("critic") else "a critic"
        rewards += f" and token rewards from {critic}"
    return rewards


def _results(run: Run) -> list[tuple[str, str]]:
    """(what, value), held-out results first."""
    results = []
    steps, values = run.series("eval/score")
    if steps:
        results.append((f"held-out reward, step {steps[-1]}", f"{values[-1]:.4g}"))
        if steps[0] == 0 and len(steps) > 1:
            results.append(("held-out reward, before training", f"{values[0]:.4g}"))
    for key, what in _FROM_TRAINING.items():
        value = final_value(run, key)
        if value is not None:
            results.append((f"{what}, last steps", f"{value:.4g}"))
    for key, what, shape in (
        ("critic/requests", "critic requests", ".0f"),
        ("critic/cost_usd", "critic cost, $", ".4g"),
    ):
        _, values = run.series(key)
        if values:
            results.append((what, format(sum(values), shape)))
    return results


def _hub_id(name: Any) -> str | None:
    """``name`` where it can be a repository of the hub: no path, and no built-in."""
    return name if isinstance(name, str) and _HUB_ID.fullmatch(name) and not Path(name).exists() else None


def _without_passwords(text: str) -> str:
    return re.sub(r"//[^/\s\"'@]+@", "//***@", text)
