"""``--live``: serve the page on this machine while the runs are being written."""

import hashlib
import logging
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock

from trl.jsonl import DataFileError
from trl.report.html import render
from trl.report.runlog import METRICS_FILE, SAMPLES_FILE, SETTINGS_FILE, load_runs
from trl.report.table import EvaluationTable

logger = logging.getLogger(__name__)

HOST = "127.0.0.1"
REFRESH_SECONDS = 5.0


class LivePage:
    """The page of some run folders, made anew when one of their files has changed; some may not exist yet."""

    def __init__(self, folders: Sequence[Path], table: Path | None = None, refresh: float = REFRESH_SECONDS) -> None:
        self._folders, self._table, self._refresh = folders, table, refresh
        self._lock = Lock()
        self._version = ""
        self._page = b""

    def current(self) -> tuple[str, bytes]:
        """A version that changes with the files, and the page. While a file cannot be read, the last page stands."""
        with self._lock:
            version = self._state()
            if version != self._version:
                try:
                    self._page, self._version = self._render(), version
                except (DataFileError, OSError) as error:
                    logger.warning("the page stays as it is: %s", error)
                    self._page = self._page or render([], refresh=self._refresh).encode()
            return self._version, self._page

    def _render(self) -> bytes:
        table = EvaluationTable.from_file(self._table) if self._table and self._table.exists() else None
        runs = load_runs(self._folders, started_only=True)
        return render(runs, table, refresh=self._refresh).encode("utf-8", "xmlcharrefreplace")

    def _state(self) -> str:
        names = (METRICS_FILE, SAMPLES_FILE, SETTINGS_FILE)
        paths = [folder / name for folder in self._folders for name in names] + ([self._table] if self._table else [])
        found = []
        for path in paths:
            try:
                stat = path.stat()
            except FileNotFoundError:
                continue
            found.append((str(path), stat.st_size, stat.st_mtime_ns))
        return f'"{hashlib.sha256(repr(found).encode()).hexdigest()[:20]}"'


def make_server(page: LivePage, port: int) -> ThreadingHTTPServer:
    """A server of ``page`` on the loopback address; port 0 takes a free one. OSError where the port is taken."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.headers.get("Host") not in (f"{HOST}:{server.server_port}", f"localhost:{server.server_port}"):
                self.send_error(403, "this server answers to its own address only")  # not to a page of another site
                return
            if self.path != "/":
                self.send_error(404)
                return
            version, content = page.current()
            known = self.headers.get("If-None-Match") == version
            self.send_response(304 if known else 200)
            self.send_header("ETag", version)
            if not known:
                self.send_header("Content-Type", "text/html; charset=utf-8")
                self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if not known:
                self.wfile.write(content)

        def log_message(self, format: str, *args: object) -> None:
            logger.debug(format, *args)

    server = ThreadingHTTPServer((HOST, port), Handler)
    return server
