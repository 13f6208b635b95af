"""Scripts run in this process make their own accelerator, whose settings are process-wide state of `accelerate`."""

from collections.abc import Iterator

import pytest
from accelerate.state import AcceleratorState


@pytest.fixture
def fresh_accelerator_state() -> Iterator[None]:
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
