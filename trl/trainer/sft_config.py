"""Settings of supervised fine-tuning. Imports nothing heavy."""

from dataclasses import dataclass

from trl.trainer.supervised_config import SupervisedConfig


@dataclass
class SFTConfig(SupervisedConfig):
    """Hyperparameters of supervised fine-tuning. Texts are never packed: one row, one prompt and its answer."""

    num_frozen_layers: int | None = None
    """Leave the embeddings (and an LM head tied to them) and this many lower blocks as they are: faster."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_frozen_layers is not None and self.num_frozen_layers < 1:
            raise ValueError(f"num_frozen_layers must be at least 1, got {self.num_frozen_layers}; leave it out")
