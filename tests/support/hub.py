"""A hub on loopback that serves a folder as the dataset `org/corpus`, as far as `HfFileSystem` asks: the client is
Hugging Face's own, and what it meets is HTTP."""

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import unquote, urlsplit

import huggingface_hub
import pytest
from huggingface_hub import constants

REPO = "org/corpus"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    root: Path
    commits: dict[str, dict[str, bytes]]

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        if found := re.fullmatch(rf"/api/datasets/{REPO}(?:/revision/(.*))?", path):
            commit = self._commit(found[1] or "main")
            self._json({"id": REPO, "sha": commit, "private": False, "tags": [], "siblings": []})
        elif found := re.fullmatch(rf"/api/datasets/{REPO}/tree/([^/]+)/?(.*)", path):
            self._tree(self.commits[self._commit(found[1])], found[2], "recursive=true" in self.path.lower())
        elif found := re.fullmatch(rf"/datasets/{REPO}/resolve/([^/]+)/(.*)", path):
            self._file(self.commits[self._commit(found[1])][found[2]])
        else:
            self._json({"error": "Repository not found"}, 404, {"X-Error-Code": "RepoNotFound"})

    def _commit(self, revision: str) -> str:
        """Of the branch main: the folder as it is now."""
        if revision != "main":
            return revision
        files = sorted(path for path in self.root.rglob("*") if path.is_file())
        content = {str(path.relative_to(self.root)): path.read_bytes() for path in files}
        commit = hashlib.sha1(repr(content).encode()).hexdigest()
        self.commits[commit] = content
        return commit

    def _tree(self, files: dict[str, bytes], folder: str, is_recursive: bool) -> None:
        start = f"{folder}/" if folder else ""
        inside = {name: content for name, content in files.items() if name.startswith(start)}
        shown = [self._entry(name, content) for name, content in inside.items()
                 if is_recursive or "/" not in name.removeprefix(start)]  # fmt: skip
        above = {str(parent) for name in inside for parent in PurePosixPath(name).parents}
        for name in sorted(name for name in above if name.startswith(start) and name not in (".", folder)):
            if is_recursive or "/" not in name.removeprefix(start):
                shown.append({"type": "directory", "oid": "0" * 40, "size": 0, "path": name})
        self._json(shown, 200 if inside else 404)

    def _entry(self, name: str, content: bytes) -> dict[str, Any]:
        return {"type": "file", "oid": hashlib.sha1(content).hexdigest(), "size": len(content), "path": name}

    def _file(self, content: bytes) -> None:
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("range", ""))
        start, end = (int(wanted[1]), int(wanted[2] or len(content) - 1)) if wanted else (0, len(content) - 1)
        self._send(content[start : end + 1], 206 if wanted else 200, {})

    def _json(self, value: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
        self._send(json.dumps(value).encode(), status, {"Content-Type": "application/json"} | (headers or {}))

    def _send(self, content: bytes, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(content))} | headers).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def serve_hub(root: Path) -> Iterator[str]:
    """The endpoint's URL."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Own", (Handler,), {"root": root, "commits": {}}))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextmanager
def client_of(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process's hub client talks to that endpoint; what it remembers of others is forgotten."""
    template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, endpoint)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    huggingface_hub.close_session()
    huggingface_hub.HfFileSystem.clear_instance_cache()
    yield
    huggingface_hub.close_session()
    huggingface_hub.HfFileSystem.clear_instance_cache()
