import os
import pickle
import subprocess
from collections import OrderedDict, defaultdict
from pathlib import Path
from typing import Any

import joblib
import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression

from trl.builtin.safe_pickle import PickleRefusedError, Record, StoredArray, read_pickle


class Call:
    """Pickles as a call of any function."""

    def __init__(self, function: Any, *arguments: Any, state: Any = None) -> None:
        self._reduced = (function, arguments) if state is None else (function, arguments, state)

    def __reduce__(self) -> Any:
        return self._reduced


def written(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_plain_data_comes_back(tmp_path: Path, protocol: int) -> None:
    data = {"words": OrderedDict([("a", 1), ("b", -(2**40))]), "n": None, "x": [1.5, True, "ü", (b"c",)]}
    path = written(tmp_path / "a.pickle", pickle.dumps(data, protocol))
    if protocol >= 3:  # older ones spell bytes as a call of codecs.encode
        assert read_pickle(path) == data
    else:
        with pytest.raises(PickleRefusedError, match=r"_codecs\.encode"):
            read_pickle(path)


def test_a_defaultdict_is_a_dict(tmp_path: Path) -> None:
    counts = defaultdict(int, {"a": 3})
    found = read_pickle(written(tmp_path / "a.pickle", pickle.dumps(counts)))
    assert found == {"a": 3} and type(found) is dict


def malicious(marker: Path) -> list[Any]:
    command = f"touch {marker}"
    return [
        Call(os.system, command),
        Call(eval, f"open({str(marker)!r}, 'w')"),
        Call(exec, f"open({str(marker)!r}, 'w')"),
        Call(subprocess.Popen, ["touch", str(marker)]),
        Call(getattr, {}, "keys"),
        Call(open, str(marker), "w"),
        Call(pickle.loads, pickle.dumps(Call(os.system, command))),
        Call(defaultdict, Call(os.system, command)),  # hidden behind an allowed name
        {"harmless": 1, "deep": [OrderedDict(x=Call(os.system, command))]},
        Call(np.frombuffer, b"1234"),
        Call(type, "T", (), {}),
    ]


@pytest.mark.parametrize("index", range(11))
@pytest.mark.parametrize("protocol", [0, 2, 5])
def test_anything_else_is_refused_and_not_run(tmp_path: Path, index: int, protocol: int) -> None:
    marker = tmp_path / "ran"
    content = pickle.dumps(malicious(marker)[index], protocol)
    with pytest.raises(PickleRefusedError, match=r"a\.pickle: asks for .*nothing of it was run"):
        read_pickle(written(tmp_path / "a.pickle", content), records=[("sklearn.svm._classes", "LinearSVC")])
    assert not marker.exists()


def test_the_malicious_ones_would_run(tmp_path: Path) -> None:
    """Or the test above proves nothing."""
    pickle.loads(pickle.dumps(malicious(tmp_path / "ran")[0]))
    assert (tmp_path / "ran").exists()


def test_names_of_allowed_modules_are_not_allowed(tmp_path: Path) -> None:
    for name in (b"builtins\neval", b"builtins\nint.__class__", b"numpy\nload", b"collections\nabc"):
        with pytest.raises(PickleRefusedError, match="asks for"):
            read_pickle(written(tmp_path / "a.pickle", b"c" + name + b"\n."))


@pytest.mark.parametrize(
    "content", [b"", b"\x80", b"garbage", b"\x80\x05\x95\xff", b"}", b"0.", b"(lp0\nI1\na", b"P1\n."]
)
def test_what_is_not_a_pickle_is_refused(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(PickleRefusedError, match=r"a\.pickle"):
        read_pickle(written(tmp_path / "a.pickle", content))


def test_attributes_set_by_a_file_stay_in_its_reading(tmp_path: Path) -> None:
    """A pickle may set attributes on a function it names; the next file must not meet them."""
    name = b"\x80\x02ccollections\nOrderedDict\n"
    poisoned = read_pickle(written(tmp_path / "a.pickle", name + b"N}X\x01\x00\x00\x00xK\x07s\x86b."))
    assert poisoned.x == 7
    assert not hasattr(read_pickle(written(tmp_path / "b.pickle", name + b".")), "x")
    thing = b"\x80\x02csomewhere\nThing\nN}X\x05\x00\x00\x00stateK\x07s\x86b."
    with pytest.raises(PickleRefusedError):
        read_pickle(written(tmp_path / "c.pickle", thing), records=[("somewhere", "Thing")])


def test_arrays_as_joblib_writes_them(tmp_path: Path) -> None:
    data = {
        "a": np.arange(12, dtype=np.float64).reshape(3, 4),
        "b": np.array([True, False]),
        "c": np.zeros((0, 5), dtype=np.float32),
        "one": np.float64(1.25),
        "behind": "them",
    }
    joblib.dump(data, tmp_path / "a.joblib")
    found = read_pickle(tmp_path / "a.joblib")
    for key in "abc":
        assert isinstance(found[key], StoredArray)
        np.testing.assert_array_equal(found[key].array, data[key])
        assert found[key].array.dtype == data[key].dtype
    assert found["one"] == 1.25 and type(found["one"]) is float and found["behind"] == "them"


@pytest.mark.parametrize(
    "array",
    [np.array([{}, []], dtype=object), np.asfortranarray(np.eye(3)), np.array(["text"]), np.eye(2, dtype=">f8")],
)
def test_other_arrays_are_refused(tmp_path: Path, array: np.ndarray) -> None:
    joblib.dump(array, tmp_path / "a.joblib")
    with pytest.raises(PickleRefusedError):
        read_pickle(tmp_path / "a.joblib")


def test_an_array_that_is_cut_off_is_refused(tmp_path: Path) -> None:
    joblib.dump(np.arange(1000.0), tmp_path / "a.joblib")
    whole = (tmp_path / "a.joblib").read_bytes()
    with pytest.raises(PickleRefusedError, match="8000 bytes is cut off after"):
        read_pickle(written(tmp_path / "b.joblib", whole[: len(whole) // 2]))


def test_an_object_of_a_listed_class_is_a_record(tmp_path: Path) -> None:
    model = LogisticRegression(C=2.5).fit(np.eye(4), [0, 1, 0, 1])
    joblib.dump(model, tmp_path / "a.joblib")
    with pytest.raises(PickleRefusedError, match="LogisticRegression"):
        read_pickle(tmp_path / "a.joblib")
    found = read_pickle(tmp_path / "a.joblib", records=[("sklearn.linear_model._logistic", "LogisticRegression")])
    assert isinstance(found, Record) and found.state["C"] == 2.5
    np.testing.assert_array_equal(found.state["coef_"].array, model.coef_)
