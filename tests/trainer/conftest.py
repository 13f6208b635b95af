"""Every test makes its own accelerator, whose settings are process-wide state of `accelerate`."""

from collections.abc import Iterator

import pytest
from accelerate.state import AcceleratorState


@pytest.fixture(autouse=True)
def fresh_accelerator_state() -> Iterator[None]:
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
