"""Read the data out of a pickle without running what it asks for.

A pickle names functions and classes to call. Here it gets none of them: each name that a file may use is listed
by the caller or below, and stands for something that only keeps data. Any other name is refused before anything
is called. Arrays are read as joblib writes them: their bytes lie uncompressed in the file, behind their description.
"""

import io
import math
import pickle
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import numpy as np

from trl.builtin.catalog import BuiltinError

Name = tuple[str, str]
"""(module, attribute), as a pickle names what it wants."""

_DTYPES = ("f4", "f8", "i4", "i8", "b1")


class PickleRefusedError(BuiltinError):
    """A pickle asks for something that is not plain data."""


class Record:
    """Stands for an object of a class that is not loaded: ``state`` is what the pickle says of its attributes."""

    def __init__(self, *_arguments: object) -> None:
        self.state: dict[str, Any] = {}

    def __setstate__(self, state: Any) -> None:
        if not isinstance(state, dict):
            raise PickleRefusedError(f"the state of an object is a {type(state).__name__}; expected its attributes")
        self.state = state


class StoredArray(Record):
    """Stands for joblib's description of an array; ``array`` is the array that follows it in the file."""

    file: io.BytesIO
    array: np.ndarray

    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state)
        shape, dtype = self.state.get("shape"), self.state.get("dtype")
        sizes = (
            shape if isinstance(shape, tuple) and all(isinstance(size, int) and size >= 0 for size in shape) else None
        )
        if sizes is None or not isinstance(dtype, _Dtype) or self.state.get("order") != "C":
            raise PickleRefusedError(
                f"cannot read an array described as {self.state}; expected plain numbers in C order"
            )
        padding = self.file.read(1)
        self.file.read(padding[0] if padding else 0)
        size = math.prod(sizes) * dtype.numpy.itemsize
        data = self.file.read(size)
        if len(data) != size:
            raise PickleRefusedError(f"an array of {size} bytes is cut off after {len(data)}")
        self.array = np.frombuffer(data, dtype.numpy).reshape(sizes)


class _Dtype(Record):
    """Stands for ``numpy.dtype``: made from a type code, then told its byte order."""

    def __init__(self, code: object = None, *_arguments: object) -> None:
        if code not in _DTYPES:
            raise PickleRefusedError(f"an array has the type {code!r}; expected one of {', '.join(_DTYPES)}")
        self.numpy = np.dtype(f"<{code}")

    def __setstate__(self, state: Any) -> None:
        if not isinstance(state, tuple) or len(state) < 2 or state[1] not in ("<", "|"):
            raise PickleRefusedError(f"an array's type is given as {state!r}; expected little-endian numbers")


def _scalar(dtype: object, data: object) -> float:
    if not isinstance(dtype, _Dtype) or not isinstance(data, bytes) or len(data) != dtype.numpy.itemsize:
        raise PickleRefusedError("cannot read a number; expected its type and its bytes")
    return np.frombuffer(data, dtype.numpy)[0].item()


def read_pickle(path: Path, records: Collection[Name] = ()) -> Any:
    """The content of a pickle: plain types, ``Record`` for an object of a class in ``records``, ``StoredArray``.

    Raises ``PickleRefusedError`` for any other name, and for what is not a whole pickle.
    """
    file = io.BytesIO(path.read_bytes())
    # Classes and functions of this call alone: a pickle can set attributes on what it gets.
    record = type("Record", (Record,), {})
    known: dict[Name, Callable[..., Any] | type] = {name: record for name in records} | {
        ("builtins", "int"): record,  # only as the type that a defaultdict would make
        ("numpy", "ndarray"): record,  # only as the type that an array has
        ("numpy", "float64"): record,
        ("collections", "defaultdict"): lambda *_arguments: {},
        ("collections", "OrderedDict"): lambda *_arguments: {},
        ("numpy", "dtype"): type("Dtype", (_Dtype,), {}),
        ("numpy._core.multiarray", "scalar"): lambda dtype, data: _scalar(dtype, data),
        ("joblib.numpy_pickle", "NumpyArrayWrapper"): type("StoredArray", (StoredArray,), {"file": file}),
    }
    try:
        return _Unpickler(file, known).load()
    except PickleRefusedError as error:
        raise PickleRefusedError(f"{path}: {error}") from error
    except (
        pickle.UnpicklingError,
        EOFError,
        ValueError,
        TypeError,
        AttributeError,
        LookupError,
        OverflowError,
    ) as error:
        raise PickleRefusedError(f"{path}: not a pickle of plain data ({type(error).__name__}: {error})") from error


class _Unpickler(pickle.Unpickler):
    # Over a file without peek() the C reader takes no byte too many, so an array can be read from the same file.

    def __init__(self, file: io.BytesIO, known: dict[Name, Callable[..., Any] | type]) -> None:
        super().__init__(file)
        self._known = known

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self._known:
            raise PickleRefusedError(f"asks for {module}.{name}, which is not data; nothing of it was run")
        return self._known[module, name]
