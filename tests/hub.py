"""A hub of models on the loopback interface, as far as ``huggingface_hub`` needs one.

Repositories are dictionaries of files. ``break_after`` ends the first answer for a file after so many bytes.
"""

import hashlib
import json
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit


@dataclass
class Repository:
    files: Mapping[str, bytes]
    is_gated: bool = False
    break_after: dict[str, int] = field(default_factory=dict)
    tags: tuple[str, ...] = ()

    @property
    def commit(self) -> str:
        digest = hashlib.sha1()
        for name, data in sorted(self.files.items()):
            digest.update(name.encode() + data)
        return digest.hexdigest()


@dataclass
class Hub:
    repositories: dict[str, Repository]
    url: str = ""
    requests: list[str] = field(default_factory=list)  # method and path of each
    sent: dict[str, int] = field(default_factory=dict)  # bytes of each file
    hold_after: dict[str, int] = field(default_factory=dict)  # files that stop for as long as they stand here


@contextmanager
def hub_of(repositories: dict[str, Repository]) -> Iterator[Hub]:
    hub = Hub(repositories)
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(hub))
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _handler(hub: Hub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: Any) -> None:
            pass

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            hub.requests.append(f"{self.command} {self.path}")
            path = unquote(urlsplit(self.path).path)
            if path.startswith("/api/models/"):
                name, _, revision = path.removeprefix("/api/models/").partition("/revision/")
                if (repository := self._repository(name, revision or "main")) is not None:
                    self._send_json(self._info(name, repository))
                return
            name, _, rest = path.strip("/").partition("/resolve/")
            revision, _, file = rest.partition("/")
            repository = self._repository(name, revision)
            if repository is None:
                return
            if repository.is_gated and self.headers.get("authorization") != "Bearer right":
                self._refuse(403, "GatedRepo")
            elif file not in repository.files:
                self._refuse(404, "EntryNotFound")
            else:
                self._send_file(repository, file)

        def _repository(self, name: str, revision: str) -> Repository | None:
            repository = hub.repositories.get(name)
            if repository is None:
                self._refuse(401, "RepoNotFound")
            elif revision not in ("main", repository.commit, *repository.tags):
                self._refuse(404, "RevisionNotFound")
                return None
            return repository

        def _info(self, name: str, repository: Repository) -> dict[str, Any]:
            files = [{"rfilename": file, "size": len(data)} for file, data in repository.files.items()]
            return {"id": name, "modelId": name, "sha": repository.commit, "siblings": files}

        def _send_json(self, value: Any) -> None:
            body = json.dumps(value).encode()
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def _send_file(self, repository: Repository, file: str) -> None:
            data = repository.files[file]
            start = 0
            if (asked := self.headers.get("range", "")).startswith("bytes="):
                start = int(asked.removeprefix("bytes=").partition("-")[0])
            self.send_response(206 if start else 200)
            if start:
                self.send_header("content-range", f"bytes {start}-{len(data) - 1}/{len(data)}")
            self.send_header("etag", f'"{hashlib.sha256(data).hexdigest()}"')
            self.send_header("x-repo-commit", repository.commit)
            self.send_header("accept-ranges", "bytes")
            self.send_header("content-length", str(len(data) - start))
            self.end_headers()
            if self.command == "HEAD":
                return
            end = start + repository.break_after.pop(file, len(data))
            held = start + hub.hold_after.get(file, 0)
            self._write(file, data[start:held])
            while file in hub.hold_after:
                time.sleep(0.01)
            self._write(file, data[max(start, held) : end])
            if end < len(data):
                self.close_connection = True

        def _write(self, file: str, data: bytes) -> None:
            with suppress(OSError):  # the client may have gone
                self.wfile.write(data)
                hub.sent[file] = hub.sent.get(file, 0) + len(data)

        def _refuse(self, status: int, code: str) -> None:
            self.send_response(status)
            self.send_header("x-error-code", code)
            self.send_header("x-error-message", code)
            self.send_header("content-length", "0")
            self.end_headers()

    return Handler
