"""A server of tools with the ``mcp`` package, as its documentation shows it: stdio, or HTTP on a free port.

python mcp_tools.py            speaks on stdin and stdout
python mcp_tools.py http       prints its URL, then serves
"""

from __future__ import annotations

import socket
import sys
import time

from mcp.server.mcpserver import MCPServer

server = MCPServer("tools")


@server.tool()
def add(a: int, b: int) -> int:
    """Adds two whole numbers."""
    return a + b


@server.tool()
def fail(text: str) -> str:
    """Always fails."""
    raise ValueError(text)


@server.tool()
def wait(seconds: float) -> str:
    """Takes that long."""
    time.sleep(seconds)
    return "awake"


if __name__ == "__main__":
    if sys.argv[1:] == ["http"]:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        sys.stdout.write(f"http://127.0.0.1:{port}/mcp\n")
        sys.stdout.flush()
        server.run("streamable-http", host="127.0.0.1", port=port)
    else:
        server.run()
