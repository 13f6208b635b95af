"""A disk that is full, as the kernel says it: a limit on the size of files, past which writing fails."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager


def limit_file_size(size: int) -> None:
    """For this process and what it starts. Python ignores the signal that comes with it: writes raise OSError."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


@contextmanager
def full_disk(size: int) -> Iterator[None]:
    """No file may grow past ``size`` bytes within the block."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    limit_file_size(size)
    try:
        yield
    finally:
        limit_file_size(before)
