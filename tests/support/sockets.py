"""A client of the endpoint on a bare socket, which can send half of a request, and never read."""

import json
import socket
from typing import Any


def connect(url: str, receive_bytes: int | None = None) -> socket.socket:
    """`receive_bytes`: what the kernel keeps of an answer that nobody reads."""
    host, port = url.removeprefix("http://").split(":")
    made = socket.socket()
    if receive_bytes is not None:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    made.settimeout(30)
    made.connect((host, int(port)))
    return made


def head(url: str, *lines: str) -> bytes:
    """Of a completion; without its last four bytes it is not over."""
    host = url.removeprefix("http://")
    return "\r\n".join(["POST /v1/completions HTTP/1.1", f"Host: {host}", *lines, "", ""]).encode()


def ask(connection: socket.socket, url: str, **body: Any) -> None:
    """Sends it, and reads nothing."""
    text = json.dumps(body).encode()
    connection.sendall(head(url, f"Content-Length: {len(text)}") + text)


def status(connection: socket.socket) -> int:
    """Of the answer that comes."""
    return int(connection.recv(4096).split()[1])
