"""Freed memory goes back to the system, not only to the allocator."""

import psutil
import torch

from trl.cpu_memory import release_freed_memory


def resident_megabytes() -> float:
    return float(psutil.Process().memory_info().rss / 2**20)


def test_holes_in_the_heap_are_given_back():
    small = [torch.ones(20_000) for _ in range(2500)]  # 200 MB in pieces that come from the heap
    held = small[::50]
    before = resident_megabytes()
    del small
    if release_freed_memory():
        assert resident_megabytes() < before - 120
    assert all(float(piece[0]) == 1.0 for piece in held)
