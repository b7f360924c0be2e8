"""API keys: read where the application is built, kept as digests, compared in constant time."""

import hashlib
import hmac
import ipaddress
import os
from collections.abc import Sequence
from pathlib import Path

from pipeline.config import ConfigError
from pipeline.service.config import AuthSection
from pipeline.service.errors import ApiError, unauthorized

MIN_KEY_CHARS = 8


def read_keys(auth: AuthSection) -> tuple[bytes, ...]:
    """SHA-256 of each key; none when none is configured. ConfigError for a file that cannot be read."""
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
    return tuple(digest(key) for key in keys if key)


def digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


def check_caller(digests: Sequence[bytes], host: str | None, authorization: str | None) -> None:
    """ApiError 401 without one of the keys; without keys, 403 for whoever does not come over loopback."""
    if not digests:
        if not is_loopback(host):
            raise ApiError(
                403,
                "this server has no API keys, so it answers on loopback only; set SKIPDECODE_API_KEYS where it starts",
                code="loopback_only",
            )
        return
    scheme, _, key = (authorization or "").partition(" ")
    if scheme.lower() != "bearer" or not key:
        raise unauthorized("give an API key: 'Authorization: Bearer KEY'")
    given = digest(key.strip())
    # every key is looked at, so that the time does not say which one was close
    if not sum(hmac.compare_digest(given, known) for known in digests):
        raise unauthorized("the API key is not known here")


def is_loopback(host: str | None) -> bool:
    if host in (None, "localhost"):
        return host is not None
    try:
        return ipaddress.ip_address(str(host).removeprefix("::ffff:")).is_loopback
    except ValueError:
        return False
