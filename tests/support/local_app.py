"""An ASGI application over real HTTP, under uvicorn in a thread."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn


@contextmanager
def local_app(app: Any, send_bytes: int | None = None) -> Iterator[str]:
    """The URL of the application. `send_bytes`: what the kernel keeps for a client."""
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    # No configuration of logging: it closes every handler that is there, and that of absl (ROUGE) its stream, pytest's
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=port, log_level="error", log_config=None))
    if send_bytes is not None:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_bytes)
    thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(timeout=10)
        listener.close()
