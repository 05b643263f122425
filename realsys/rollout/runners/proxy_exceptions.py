"""Variables by which an agent's program asks its endpoint directly, not through a user's proxy (pure)."""

from __future__ import annotations

from collections.abc import Mapping

VARIABLES = ("NO_PROXY", "no_proxy")
_LOOPBACK = ("127.0.0.1", "localhost")
_ALL = "*"  # counts only where it stands alone


def proxy_exceptions(environment: Mapping[str, str], *hosts: str) -> dict[str, str]:
    """Returns both variables with the user's exceptions in ``environment``, this machine and ``hosts``.

    >>> proxy_exceptions({"no_proxy": "corp.net, 10.0.0.8"}, "10.0.0.5")["NO_PROXY"]
    'corp.net,10.0.0.8,127.0.0.1,localhost,10.0.0.5'
    """
    texts = ",".join(environment.get(name, "") for name in VARIABLES)
    own = [entry.strip() for entry in texts.split(",") if entry.strip()]
    names = dict.fromkeys((*own, *_LOOPBACK, *(host for host in hosts if host)))
    return dict.fromkeys(VARIABLES, _ALL if _ALL in names else ",".join(names))
