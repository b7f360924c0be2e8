"""A hub on loopback that takes commits to one data set, as far as `HfApi` asks: Hugging Face's own client over HTTP,
small files in the commit itself, Parquet by git LFS."""

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

REPO, TOKEN = "org/answers", "hf_writer"


class Hub:
    """What the hub has, and how it behaves."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {".gitattributes": b"*.parquet filter=lfs"}
        self.commits: list[str] = []
        self.objects: dict[str, bytes] = {}
        self.may_write = True
        self.takes_objects = True
        self.url = ""

    @property
    def sha(self) -> str:
        return hashlib.sha1(repr((sorted(self.files.items()), self.commits)).encode()).hexdigest()

    def commit(self, lines: list[dict[str, Any]]) -> None:
        (header,) = (line["value"] for line in lines if line["key"] == "header")
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                self.files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                self.files[value["path"]] = self.objects[value["oid"]]
        self.commits.append(header["summary"])


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def do_GET(self) -> None:
        if not self._is_known():
            return
        path = unquote(urlsplit(self.path).path)
        if re.fullmatch(rf"/api/datasets/{REPO}(/revision/.+)?", path):
            siblings = [{"rfilename": name} for name in sorted(self.hub.files)]
            self._json({"id": REPO, "sha": self.hub.sha, "private": True, "tags": [], "siblings": siblings})
        else:
            self._json({"error": "Repository not found"}, 404, {"X-Error-Code": "RepoNotFound"})

    def do_POST(self) -> None:
        body = self._content()
        if not self._is_known():
            return
        path, hub = urlsplit(self.path).path, self.hub
        if path == "/api/validate-yaml":
            self._json({"errors": [], "warnings": []})
        elif path == f"/api/datasets/{REPO}/preupload/main":
            files = [
                {"path": file["path"], "uploadMode": "lfs" if file["path"].endswith(".parquet") else "regular",
                 "shouldIgnore": False, "oid": None}
                for file in json.loads(body)["files"]
            ]  # fmt: skip
            self._json({"files": files}) if hub.may_write else self._json({"error": "Forbidden"}, 403)
        elif path == f"/datasets/{REPO}.git/info/lfs/objects/batch":
            objects = [
                one | {"actions": {"upload": {"href": f"{hub.url}/objects/{one['oid']}"}}}
                for one in json.loads(body)["objects"]
            ]
            self._json({"transfer": "basic", "objects": objects})
        elif path == f"/api/datasets/{REPO}/commit/main":
            lines = [json.loads(line) for line in body.splitlines()]
            if lines[0]["value"].get("parentCommit") not in (None, hub.sha):
                self._json({"error": "A commit has happened since."}, 412)
                return
            hub.commit(lines)
            url = f"{hub.url}/datasets/{REPO}/commit/{hub.sha}"
            self._json({"success": True, "commitOid": hub.sha, "commitUrl": url, "hookOutput": ""})
        else:
            self._json({"error": "Repository not found"}, 404, {"X-Error-Code": "RepoNotFound"})

    def do_PUT(self) -> None:
        content = self._content()
        if not self.hub.takes_objects:
            self._json({"error": "No room"}, 400)
            return
        assert hashlib.sha256(content).hexdigest() == self.path.rpartition("/")[2]
        self.hub.objects[self.path.rpartition("/")[2]] = content
        self._json({})

    def _content(self) -> bytes:
        if "Content-Length" in self.headers:
            return self.rfile.read(int(self.headers["Content-Length"]))
        parts = []
        while size := int(self.rfile.readline(), 16):  # in chunks
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def _is_known(self) -> bool:
        if self.headers.get("authorization") == f"Bearer {TOKEN}":
            return True
        reason = (
            "Invalid credentials in Authorization header"  # other words would mean that it may not see the data set
        )
        self._json({"error": reason}, 401, {"X-Error-Message": reason})
        return False

    def _json(self, value: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
        content = json.dumps(value).encode()
        self.send_response(status)
        own = {"Content-Length": str(len(content)), "Content-Type": "application/json", **(headers or {})}
        for name, text in own.items():
            self.send_header(name, text)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def serve_writable_hub() -> Iterator[Hub]:
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Own", (Handler,), {"hub": hub}))
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
