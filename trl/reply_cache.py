"""Replies on disk, shared by processes and runs: one SQLite file that holds nothing but text and numbers.

SQLite itself rather than a cache library: those evict what is old, and unpickle what they find in the file.
"""

import contextlib
import hashlib
import json
import logging
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

FILE = "replies.sqlite"
_LOCK_SECONDS = 5.0
_TABLE = "CREATE TABLE IF NOT EXISTS replies (key TEXT PRIMARY KEY, reply TEXT NOT NULL) WITHOUT ROWID"


class ReplyCache:
    """Replies by key. A file that can't be used costs one warning, and the run goes on without it.

    Every call opens and closes the file, so that nothing is shared between threads or held by a killed process.

    Args:
        folder: where ``replies.sqlite`` is, or will be made.
    """

    def __init__(self, folder: str | Path) -> None:
        self._file = Path(folder) / FILE
        self._usable = self._warned = False
        with self._tolerant():
            self._file.parent.mkdir(parents=True, exist_ok=True)
            self._usable = True
            with self._open() as connection:
                connection.execute(_TABLE)

    def get(self, keys: Sequence[str]) -> dict[str, str]:
        """The replies there are, by key."""
        found: dict[str, str] = {}
        with self._tolerant():
            if self._usable and keys:
                with self._open() as connection:
                    for key in keys:
                        row = connection.execute("SELECT reply FROM replies WHERE key = ?", (key,)).fetchone()
                        if row is not None:
                            found[key] = str(row[0])
        return found

    def put(self, replies: Mapping[str, str]) -> None:
        """Keep replies, in one transaction; a key that is there already gets the new one."""
        # SQLite takes valid Unicode only; a lone surrogate can come out of a reply's JSON
        rows = [(key, reply.encode(errors="replace").decode()) for key, reply in replies.items()]
        with self._tolerant():
            if self._usable and rows:
                with self._open() as connection:
                    connection.executemany("INSERT OR REPLACE INTO replies VALUES (?, ?)", rows)

    @contextlib.contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        with contextlib.closing(sqlite3.connect(self._file, timeout=_LOCK_SECONDS)) as connection, connection:
            yield connection

    @contextlib.contextmanager
    def _tolerant(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            busy = isinstance(error, sqlite3.OperationalError) and error.sqlite_errorcode == sqlite3.SQLITE_BUSY
            if not self._warned:
                self._warned = True
                logger.warning(
                    "reply cache %s can't be used (%s); going on without it%s",
                    self._file,
                    error,
                    " while it is locked" if busy else ". Remove or repair the file for the next run",
                )
            self._usable = self._usable and busy


def reply_key(**parts: Any) -> str:
    """The SHA-256 of everything that a reply depends on."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
