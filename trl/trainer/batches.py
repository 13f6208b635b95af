"""Which samples each process sees: one global shuffled order, cut into shards, with nothing lost at the tail."""

from collections.abc import Iterator

import torch


class ShardedBatches:
    """Batch sampler (lists of row numbers) of one process out of ``world``; each pass reshuffles.

    The global order depends on the seed and the pass alone, not on the number of processes. A last, shorter
    global batch is dealt out evenly; if it has fewer rows than there are processes, some rows are dealt twice,
    so that every process still takes part in the step.

    ``state_dict`` says how far it is; a sampler that loads this goes on from there.
    """

    def __init__(self, size: int, batch_size: int, *, rank: int = 0, world: int = 1, seed: int = 0):
        if size == 0:
            raise ValueError("the data set is empty: there is nothing to train on")
        self.size, self.batch_size, self.rank, self.world, self.seed = size, batch_size, rank, world, seed
        self.passes = 0
        """Begun so far."""
        self._given = 0  # batches of the last one
        self._taken_up = False

    def __len__(self) -> int:
        return -(-self.size // (self.batch_size * self.world))

    def __iter__(self) -> Iterator[list[int]]:
        goes_on = self._taken_up and 0 < self._given < len(self)
        self._taken_up = False
        if not goes_on:
            self.passes, self._given = self.passes + 1, 0
        generator = torch.Generator().manual_seed(self.seed + self.passes - 1)
        order = torch.randperm(self.size, generator=generator).tolist()
        for start in range(self._given * self.batch_size * self.world, self.size, self.batch_size * self.world):
            batch = order[start : start + self.batch_size * self.world]
            self._given += 1
            mine = batch[self.rank :: self.world]
            yield mine or [batch[self.rank % len(batch)]]

    def state_dict(self) -> dict[str, int]:
        """Passes begun, and how many batches of the last one were given."""
        return {"passes": self.passes, "given": self._given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Make the next pass the rest of the one in which ``state_dict`` was taken."""
        self.passes, self._given, self._taken_up = state["passes"], state["given"], True
