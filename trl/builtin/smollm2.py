"""``builtin:smollm2``: a quantised GGUF file → an ordinary transformers folder (fp32 safetensors)."""

from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from trl.builtin.catalog import Progress

CONTEXT = 8192


def load_gguf(path: Path) -> PreTrainedModel:
    """The model as transformers dequantises it: fp32 weights, but a config that forbids saving."""
    return AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)


def build(target: Path, source: Path, progress: Progress) -> dict[str, float]:
    """Write model and tokenizer to ``target``; returns the sizes for the manifest.

    The weights are copied into a model made from the same config without its ``quantization_config``:
    transformers refuses to save a model that says it is GGUF.
    """
    progress("reading the GGUF file (about half a minute)", 0.0)
    quantised = load_gguf(source)
    progress("copying the weights", 0.7)
    settings = quantised.config.to_dict()
    del settings["quantization_config"], settings["_model_name_or_path"]
    config = AutoConfig.for_model(**settings)
    config.architectures = [type(quantised).__name__]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(quantised.state_dict(), assign=True)
    model.tie_weights()
    model.generation_config = quantised.generation_config
    progress("saving", 0.8)
    model.save_pretrained(target)

    # Given here, not set afterwards: only what the constructor was given is saved. Left padding, because a
    # decoder continues from the last position.
    tokenizer = AutoTokenizer.from_pretrained(
        source.parent, gguf_file=source.name, padding_side="left", model_max_length=CONTEXT
    )
    tokenizer.save_pretrained(target)
    return {"parameters": sum(p.numel() for p in model.parameters()), "vocabulary": len(tokenizer)}
