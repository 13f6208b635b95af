"""A lock that a killed build of a C++ extension left behind is named, since everything waits for it."""

import logging
from pathlib import Path

import pytest
from torch.utils.file_baton import FileBaton

from trl.trainer.accelerator import _warn_of_build_locks


def test_a_lock_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    build = tmp_path / "py311_cpu" / "deepspeed_shm_comm"
    build.mkdir(parents=True)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    with caplog.at_level(logging.WARNING):
        _warn_of_build_locks()
        assert not caplog.records
        lock = build / "lock"
        assert FileBaton(str(lock)).try_acquire()  # as torch.utils.cpp_extension takes it
        _warn_of_build_locks()
    assert str(lock) in caplog.text
