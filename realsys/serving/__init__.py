"""Generation over HTTP: the wire format, a client, and the server in front of each engine."""
