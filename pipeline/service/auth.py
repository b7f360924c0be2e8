"""Who may use the server: clients with an API key; with `auth.open_on_loopback`, programs on this machine need none.

Keys are read where the application is built, kept as SHA-256, and compared in constant time; `skipdecode serve` makes
one where none are configured. Without keys, a peer on loopback is not enough: a web page can make a browser send
requests to 127.0.0.1 (seen in `Origin` and `Sec-Fetch-Site`) under any host name (seen in `Host`), and a proxy on this
machine speaks for others (seen in `Forwarded` and its kin). Not detected: a forwarded port, and a proxy that adds no
header, as nginx does by default.
"""

import hashlib
import hmac
import os
import re
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from pipeline.config.job import ConfigError
from pipeline.service.api_error import ApiError
from pipeline.service.config import AuthSection

MIN_KEY_CHARS: Final = 8
HA_PROXY: Final = "RAY_SERVE_ENABLE_HA_PROXY"
"""Ray's variable for a proxy that forwards everything from loopback, without headers that say for whom."""
LOOPBACK: Final = frozenset({"127.0.0.1", "::1", "::ffff:127.0.0.1"})
"""Not all of 127.0.0.0/8: a sidecar proxy forwards requests from 127.0.0.6."""
LOCAL_HOST: Final = re.compile(r"(localhost|127\.0\.0\.1|\[::1\])(:\d{1,5})?")
OWN_SITES: Final = frozenset({"same-origin", "none"})
"""`Sec-Fetch-Site` of requests by the page at `/` and of addresses typed by the user."""
PROXY_HEADER: Final = re.compile(
    r"forwarded|via|x-real-ip|(.*-)?client-?ip|x-forwarded(-.*)?|x-original-.*|x-envoy-.*|x-scheme|cf-.*|tailscale-.*"
)


def read_keys(auth: AuthSection) -> tuple[bytes, ...]:
    """The digest of each configured key; ConfigError if the file is unreadable or keys are required and missing."""
    keys = configured_keys(auth)
    if not keys and not auth.open_on_loopback:
        raise ConfigError(
            "auth",
            f"no API keys where the application is built; set {auth.api_keys_env} there (under `serve deploy` that is "
            "where `ray start` runs, not your shell) or auth.api_keys_file, or let programs on the same machine in "
            "without a key (auth.open_on_loopback: true)",
        )
    if not keys and os.environ.get(HA_PROXY) == "1":
        raise ConfigError(
            "auth",
            f"no API keys, and behind Ray's HAProxy ({HA_PROXY}) all callers look local; set {auth.api_keys_env}",
        )
    return tuple(map(digest, keys))


def configured_keys(auth: AuthSection) -> list[str]:
    """The keys of the environment and the file; ConfigError if the file is unreadable or a key is too short."""
    keys = [key.strip() for key in os.environ.get(auth.api_keys_env, "").split(",")]
    if auth.api_keys_file is not None:
        try:
            keys += Path(auth.api_keys_file).expanduser().read_text(encoding="utf-8").split()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError("auth.api_keys_file", f"{auth.api_keys_file}: {error}") from error
        if not any(keys):
            raise ConfigError("auth.api_keys_file", f"{auth.api_keys_file} holds no key")
    if any(0 < len(key) < MIN_KEY_CHARS for key in keys):
        raise ConfigError("auth", f"an API key has fewer than {MIN_KEY_CHARS} characters")
    return [key for key in keys if key]


def make_key() -> str:
    """A random key of 32 characters."""
    return secrets.token_urlsafe(24)


def digest(key: str) -> bytes:
    """SHA-256 of the key in UTF-8."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


def check_key(digests: Sequence[bytes], authorization: str | None) -> bytes:
    """The digest of the key in an `Authorization` header that was decoded as Latin-1; ApiError 401 if it is unknown."""
    scheme, _, key = (authorization or "").partition(" ")
    if scheme.lower() != "bearer" or not key.strip(" \t"):
        raise ApiError(401, "give an API key: 'Authorization: Bearer KEY'", code="invalid_api_key")
    key = key.strip(" \t")  # and nothing else: a byte of a letter in UTF-8 may be a space in Latin-1
    # a header is bytes: some clients send a key in UTF-8, some in Latin-1
    given = {hashlib.sha256(key.encode("latin-1", "replace")).digest(), digest(key)}
    # every key is compared, so that the time does not tell which one was close
    found = [known for known in digests for one in given if hmac.compare_digest(one, known)]
    if not found:
        raise ApiError(401, "unknown API key", code="invalid_api_key")
    return found[0]


def is_loopback(host: str) -> bool:
    """Whether a server that binds to `host` is reachable from this machine only."""
    return host == "localhost" or host in LOOPBACK


def check_local(peer: str | None, headers: Sequence[tuple[str, str]]) -> None:
    """ApiError 403 unless `peer` and all `headers` are those of a program on this machine."""
    if peer not in LOOPBACK:
        raise _forbidden("it answers loopback (127.0.0.1 and ::1) only", "loopback_only")
    values: dict[str, list[str]] = {"host": [], "origin": [], "sec-fetch-site": []}
    for name, value in headers:
        if PROXY_HEADER.fullmatch(name.lower()):
            raise _forbidden(f"a proxy has forwarded this request ({name})")
        if name.lower() in values:
            values[name.lower()].append(value.strip().lower())
    hosts = values["host"]
    if len(hosts) != 1 or not LOCAL_HOST.fullmatch(hosts[0]):
        raise _forbidden("the Host of this request is not localhost, 127.0.0.1 or [::1]")
    if any(origin not in (f"http://{hosts[0]}", f"https://{hosts[0]}") for origin in values["origin"]):
        raise _forbidden("this request comes from a web page of another origin")
    if not OWN_SITES.issuperset(values["sec-fetch-site"]):
        raise _forbidden("this request comes from a web page of another site")


def _forbidden(reason: str, code: str = "foreign_request") -> ApiError:
    message = f"this server has no API keys, and {reason}; set SKIPDECODE_API_KEYS where it starts, and send a key"
    return ApiError(403, message, code=code)
