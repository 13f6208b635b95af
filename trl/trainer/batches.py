"""Which samples each process sees: one global shuffled order, cut into shards, with nothing lost at the tail."""

from collections.abc import Iterator

import torch


class ShardedBatches:
    """Batch sampler (lists of row numbers) of one process out of ``world``; each pass reshuffles.

    The global order depends on the seed and the pass alone, not on the number of processes. A last, shorter
    global batch is dealt out evenly; if it has fewer rows than there are processes, some rows are dealt twice,
    so that every process still takes part in the step.
    """

    def __init__(self, size: int, batch_size: int, *, rank: int = 0, world: int = 1, seed: int = 0):
        if size == 0:
            raise ValueError("the data set is empty: there is nothing to train on")
        self.size, self.batch_size, self.rank, self.world, self.seed = size, batch_size, rank, world, seed
        self.passes = 0

    def __len__(self) -> int:
        return -(-self.size // (self.batch_size * self.world))

    def __iter__(self) -> Iterator[list[int]]:
        generator = torch.Generator().manual_seed(self.seed + self.passes)
        self.passes += 1
        order = torch.randperm(self.size, generator=generator).tolist()
        for start in range(0, self.size, self.batch_size * self.world):
            batch = order[start : start + self.batch_size * self.world]
            mine = batch[self.rank :: self.world]
            yield mine or [batch[self.rank % len(batch)]]
