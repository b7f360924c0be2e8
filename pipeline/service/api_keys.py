"""API keys: read where the application is built, kept as digests, compared in constant time."""

import hashlib
import hmac
import os
from collections.abc import Sequence
from pathlib import Path

from pipeline.config.job import ConfigError
from pipeline.service.config import AuthSection
from pipeline.service.errors import unauthorized
from pipeline.service.local_callers import PEERS

MIN_KEY_CHARS = 8
HA_PROXY = "RAY_SERVE_ENABLE_HA_PROXY"
"""Ray's variable for a proxy that hands on whatever reaches it, from loopback and does not say where it is from."""


def read_keys(auth: AuthSection) -> tuple[bytes, ...]:
    """SHA-256 of each key; none when none is configured. ConfigError for a file that cannot be read, and where keys are
    a must."""
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
    if not any(keys) and not auth.open_on_loopback:
        raise ConfigError(
            "auth.open_on_loopback",
            f"false, and there are no API keys where the application is built; set {auth.api_keys_env} there (under "
            "`serve deploy` that is where `ray start` runs, not your shell), or auth.api_keys_file",
        )
    if not any(keys) and os.environ.get(HA_PROXY) == "1":
        raise ConfigError(
            "auth",
            f"no API keys, and behind Ray's HAProxy ({HA_PROXY}) all callers look local; set {auth.api_keys_env}",
        )
    return tuple(digest(key) for key in keys if key)


def digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


def check_key(digests: Sequence[bytes], authorization: str | None) -> bytes:
    """The digest of the key that was given, in a header that was read as Latin-1; ApiError 401 for another."""
    scheme, _, key = (authorization or "").partition(" ")
    if scheme.lower() != "bearer" or not key.strip(" \t"):
        raise unauthorized("give an API key: 'Authorization: Bearer KEY'")
    key = key.strip(" \t")  # nothing else: a byte of a letter in UTF-8 may be a space in Latin-1
    # a header is bytes: some clients send a key in UTF-8, some in Latin-1
    given = {hashlib.sha256(key.encode("latin-1", "replace")).digest(), digest(key)}
    # every key is looked at, so that the time does not say which one was close
    found = [known for known in digests for one in given if hmac.compare_digest(one, known)]
    if not found:
        raise unauthorized("the API key is not known here")
    return found[0]


def is_loopback(host: str) -> bool:
    """Whether a server that binds to `host` is reached from this machine alone, and takes its callers for local."""
    return host == "localhost" or host in PEERS
