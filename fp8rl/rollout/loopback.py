"""Lets clients reach programs on this machine without a proxy, whatever proxies the environment has."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import MutableMapping
from urllib.parse import urlsplit

_NAMES = ("127.0.0.1", "localhost", "::1")
_LISTS = ("no_proxy", "NO_PROXY")
"""The two variables with hosts to reach without a proxy. A library reads one of them, or the other if it is missing."""


def reach_loopback(environment: MutableMapping[str, str] = os.environ) -> None:
    """If the environment has a proxy, add this machine's own names to the hosts that clients reach without it.

    The clients of users' programs (openai, httpx, requests, urllib) and of Ray read the environment themselves.
    """
    lists = {name: environment.get(name) or environment.get(other) or "" for name, other in zip(_LISTS, _LISTS[::-1])}
    if not any(name.lower().endswith("_proxy") and name not in lists and environment[name] for name in environment):
        return
    for name, hosts in lists.items():
        known = [host.strip() for host in hosts.split(",") if host.strip()]
        if "*" not in known:
            environment[name] = ",".join([*known, *(own for own in _NAMES if own not in known)])


def is_loopback(url: str) -> bool:
    """Return True if the host of a URL is this machine's loopback address."""
    host = urlsplit(url).hostname or ""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")
    return address.is_loopback or address.is_unspecified
