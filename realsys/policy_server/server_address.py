"""Which addresses a key may travel to in clear text (pure)."""

from __future__ import annotations

import ipaddress

from realsys.api.errors import ConfigError


def is_loopback(host: str) -> bool:
    """True for addresses that only this machine reaches."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def check_address(host: str, *, https: bool, insecure: bool) -> None:
    """Refuses plain HTTP where others could read the key and the conversations.

    Raises:
        ConfigError: the address is no loopback one, without HTTPS.
    """
    if is_loopback(host) or https or insecure:
        return
    raise ConfigError(
        f"{host} is reached from other machines, and plain HTTP shows them the key and all conversations",
        where="--host",
        fix="add --https, or --insecure if the network is all yours; "
        "from another machine `ssh -L 8000:localhost:8000` needs neither",
    )
