"""Settings of supervised fine-tuning. Imports nothing heavy."""

from dataclasses import dataclass

from trl.trainer.supervised_config import SupervisedConfig


@dataclass
class SFTConfig(SupervisedConfig):
    """Hyperparameters of supervised fine-tuning. Texts are never packed: one row, one prompt and its answer."""
