"""relc: PPO fine-tuning of language models with dense, token-level rewards from an LLM critic.

The import name is ``trl``; the distribution is ``relc``. Names are loaded on first use, so that
``import trl`` and ``--help`` of the scripts don't wait for torch.
"""

import importlib
import importlib.metadata
import warnings
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

DISTRIBUTION = "relc"
"""Scripts read this to tell our ``trl`` from Hugging Face's package of the same import name."""

if TYPE_CHECKING:
    from trl.core import LengthSampler, set_seed
    from trl.models import AutoModelForCausalLMWithValueHead, create_reference_model
    from trl.trainer import PPOConfig, PPOTrainer

_HOME = {
    "AutoModelForCausalLMWithValueHead": "trl.models",
    "create_reference_model": "trl.models",
    "PPOConfig": "trl.trainer",
    "PPOTrainer": "trl.trainer",
    "LengthSampler": "trl.core",
    "set_seed": "trl.core",
}
__all__ = [*_HOME, "DISTRIBUTION"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'trl' (distribution relc) has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def _warn_if_shadowed() -> None:
    """One of two installed packages with the import name ``trl`` always hides the other."""
    try:
        version = importlib.metadata.version("trl")
    except importlib.metadata.PackageNotFoundError:
        return
    warnings.warn(
        f"Hugging Face's 'trl' {version} is installed beside 'relc'; both have the import name 'trl' and "
        f"this process sees relc's ({__path__[0]}). Use a separate environment, or `pip uninstall trl` and "
        "reinstall relc with `pip install -e .`",
        stacklevel=3,
    )


_warn_if_shadowed()
