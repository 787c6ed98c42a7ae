"""Access to programs of this machine without a proxy, whatever the environment says of proxies."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import MutableMapping
from urllib.parse import urlsplit

_NAMES = ("127.0.0.1", "localhost", "::1")
_LISTS = ("no_proxy", "NO_PROXY")
"""A library reads one of the two variables; some libraries read the other one if theirs is missing."""


def reach_loopback(environment: MutableMapping[str, str] = os.environ) -> None:
    """Add this machine's own names to the hosts that clients reach without a proxy, if there is one.

    Clients of users' programs (openai, httpx, requests, urllib), and Ray's, read the environment themselves.
    """
    lists = {name: environment.get(name) or environment.get(other) or "" for name, other in zip(_LISTS, _LISTS[::-1])}
    if not any(name.lower().endswith("_proxy") and name not in lists and environment[name] for name in environment):
        return
    for name, hosts in lists.items():
        known = [host.strip() for host in hosts.split(",") if host.strip()]
        if "*" not in known:
            environment[name] = ",".join([*known, *(own for own in _NAMES if own not in known)])


def is_loopback(url: str) -> bool:
    """Return True if a URL names this machine by its loopback address."""
    host = urlsplit(url).hostname or ""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")
    return address.is_loopback or address.is_unspecified
