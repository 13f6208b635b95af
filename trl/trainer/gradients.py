"""Backward passes and updates of networks that step together: in one process, under DDP, and in DeepSpeed's engines."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import Tensor, nn
from torch.optim import Optimizer


class Gradients:
    """Accumulates the gradients of one optimizer step, then applies or drops them, in all networks alike.

    Args:
        networks: prepared models with their optimizers.
        accelerator: prepared them.
    """

    def __init__(self, networks: Sequence[tuple[nn.Module, Optimizer]], accelerator: Accelerator):
        self._networks, self._accelerator = networks, accelerator
        is_deepspeed = accelerator.distributed_type == DistributedType.DEEPSPEED
        # accelerate's own backward() makes an optimizer step too, and knows the first engine only
        self._engines: list[Any] = [model for model, _ in networks] if is_deepspeed else []

    @property
    def can_be_dropped(self) -> bool:
        """Whether `drop` takes back what was accumulated; DeepSpeed's engines keep it to themselves."""
        return not self._engines

    @contextmanager
    def accumulating(self, last: bool) -> Iterator[None]:
        """Around forward and backward of one mini-batch; processes exchange gradients at the ``last`` one of a step."""
        with ExitStack() as stack:
            for engine in self._engines:
                engine.set_gradient_accumulation_boundary(last)
            if not last and not self._engines:
                for model, _ in self._networks:
                    stack.enter_context(self._accelerator.no_sync(model))
            yield

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of ``loss``, this process's share of a sum over all processes."""
        loss = loss * self._accelerator.num_processes  # DDP and DeepSpeed average over processes
        if self._engines:
            loss.backward()
        else:
            self._accelerator.backward(loss)

    def clip(self, max_norm: float) -> list[float]:
        """Limit the norm of each network's gradients; returns the norms before.

        DeepSpeed, which knows them in its step alone, clips there, by what `trl.trainer.zero.configure` was told: the
        result is empty.
        """
        if self._engines:
            return []
        norms = [self._accelerator.clip_grad_norm_(model.parameters(), max_norm) for model, _ in self._networks]
        return [float(norm) for norm in norms if norm is not None]

    def apply(self) -> list[float]:
        """One step of every optimizer; nothing is left accumulated. Returns the norms that DeepSpeed measured."""
        for engine in self._engines:
            engine.step()
        if self._engines:
            return [float(engine.get_global_grad_norm()) for engine in self._engines]
        for _, optimizer in self._networks:
            optimizer.step()
        self.drop()
        return []

    def drop(self) -> None:
        """Leave nothing accumulated. DeepSpeed's engines have nothing between one step and the next backward pass."""
        if not self._engines:
            for _, optimizer in self._networks:
                optimizer.zero_grad(set_to_none=True)
