"""Who calls an endpoint that has no API keys: a program on this machine, and no web page in its browser.

A peer on loopback is not enough: a page anywhere can make a browser send requests to 127.0.0.1 (its `Origin`, its
`Sec-Fetch-Site`), under any name that it lets point there (its `Host`), and a proxy on this machine speaks for others
(its `Forwarded`). Left out: keys (`keys`), and what no header tells, such as a forwarded port.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from pipeline.service.errors import ApiError

PEERS: Final = frozenset({"127.0.0.1", "::1", "::ffff:127.0.0.1"})
"""Not all of 127.0.0.0/8: a sidecar hands requests on from 127.0.0.6."""
LOCAL_HOST: Final = re.compile(r"(localhost|127\.0\.0\.1|\[::1\])(:\d{1,5})?")
OWN_FETCHES: Final = frozenset({"same-origin", "none"})
"""`Sec-Fetch-Site` of the page at `/`, and of an address that somebody typed."""
OF_A_PROXY: Final = re.compile(
    r"forwarded|via|x-real-ip|(.*-)?client-?ip|x-forwarded(-.*)?|x-original-.*|x-envoy-.*|x-scheme|cf-.*|tailscale-.*"
)


def check_local(peer: str | None, headers: Sequence[tuple[str, str]]) -> None:
    """ApiError 403 for a request that a program on this machine would not send by itself. `headers`: all of them."""
    if peer not in PEERS:
        raise _refused("it answers loopback (127.0.0.1 and ::1) only", "loopback_only")
    for reason in _foreign(headers):
        raise _refused(reason, "foreign_request")


def _foreign(headers: Sequence[tuple[str, str]]) -> Iterator[str]:
    """What about the headers is not of this machine, in words."""
    values: Mapping[str, list[str]] = {name: [] for name in ("host", "origin", "sec-fetch-site")}
    for name, value in headers:
        lower = name.lower()
        if lower in values:
            values[lower].append(value.strip().lower())
        elif OF_A_PROXY.fullmatch(lower):
            yield f"a proxy has forwarded this request ({name})"
    hosts = values["host"]
    if len(hosts) != 1 or not LOCAL_HOST.fullmatch(hosts[0]):
        yield "the Host of this request is not localhost, 127.0.0.1 or [::1]"
    if any(origin not in (f"http://{host}", f"https://{host}") for origin in values["origin"] for host in hosts):
        yield "this request comes from a web page of another origin"
    if any(site not in OWN_FETCHES for site in values["sec-fetch-site"]):
        yield "this request comes from a web page of another site"


def _refused(reason: str, code: str) -> ApiError:
    message = f"this server has no API keys, and {reason}; set SKIPDECODE_API_KEYS where it starts, and send a key"
    return ApiError(403, message, code=code)
