"""Addresses of this machine."""

import ipaddress
from urllib.parse import urlsplit


def is_loopback(url: str) -> bool:
    """Whether a URL's host is this machine, which no proxy of the environment can reach for us."""
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
