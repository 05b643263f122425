"""Re-exports the two ends of a channel: a worker serves requests, others call it.

server.py and client.py implement the ends, authentication.py decides who may connect. One server
per worker; one client per peer and caller.
"""

from __future__ import annotations

from realsys.transport.client import RequestClient, client_context
from realsys.transport.server import Handler, RequestServer

__all__ = ["Handler", "RequestClient", "RequestServer", "client_context"]
