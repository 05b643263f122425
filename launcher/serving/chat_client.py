"""Asks a chat-completions server and gives its text as it comes. Standard library only."""

from __future__ import annotations

import hashlib
import http.client
import json
import ssl
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import SplitResult, urlsplit

from realsys.api.errors import ClusterError, ConfigError, DataError, RemoteError

SILENCE_S = 300.0  # of a server, which sends a sign of life every ten seconds
_PIN = "sha256="
_END = "[DONE]"


class ChatClient:
    """One server.

    Args:
        url: with or without ``/v1``; of HTTPS with ``#sha256=…`` it pins a certificate of its own making.
        sampling: fields of every request: temperature, max_tokens, …
    """

    def __init__(self, url: str, key: str, *, sampling: Mapping[str, Any]) -> None:
        self._url = urlsplit(url)
        if self._url.scheme not in ("http", "https") or not self._url.hostname:
            raise ConfigError(
                f"{url!r} is no address of a server",
                where="--url",
                fix="write http://HOST:PORT, as realsys serve prints it",
            )
        self._key, self._sampling = key, dict(sampling)

    def answer(self, messages: Sequence[Mapping[str, str]]) -> Iterator[str]:
        """Yields the pieces of an answer. Closing the iterator early ends it at the server, too.

        Raises:
            ClusterError: the server can't be reached. DataError: it refuses the conversation.
            RemoteError: it fails.
        """
        body = {"messages": list(messages), "stream": True, "model": "", **self._sampling}
        connection = _connection(self._url)
        try:
            path = self._url.path.rstrip("/").removesuffix("/v1") + "/v1/chat/completions"
            headers = {
                "Authorization": f"Bearer {self._key}",
                "Content-Type": "application/json",
            }
            connection.request("POST", path, json.dumps(body), headers)
            response = connection.getresponse()
            if response.status != 200:
                raise _refusal(response.status, response.read(1 << 16))
            yield from _pieces(response)
        except (OSError, http.client.HTTPException) as error:
            raise ClusterError(
                f"the server can't be reached: {error or type(error).__name__}",
                where=self._url.netloc,
                fix="check that it runs and that the address is right",
            ) from error
        finally:
            connection.close()


def _connection(url: SplitResult) -> http.client.HTTPConnection:
    host = url.hostname or ""
    if url.scheme == "http":
        return http.client.HTTPConnection(host, url.port, timeout=SILENCE_S)
    if not url.fragment.startswith(_PIN):
        return http.client.HTTPSConnection(host, url.port, timeout=SILENCE_S)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # the pin says who it is
    connection = http.client.HTTPSConnection(host, url.port, timeout=SILENCE_S, context=context)
    connection.connect()
    certificate = connection.sock.getpeercert(binary_form=True) or b""
    if hashlib.sha256(certificate).hexdigest() != url.fragment.removeprefix(_PIN):
        connection.close()
        raise ClusterError(
            "the server has another certificate than its address says",
            where=url.netloc,
            fix="copy the address that it prints now; if it was not started anew, somebody is between",
        )
    return connection


def _pieces(response: http.client.HTTPResponse) -> Iterator[str]:
    """Reads server-sent events."""
    for line in response:
        field, _, value = line.decode("utf-8", "replace").strip().partition(":")
        if field != "data":
            continue
        if value.strip() == _END:
            return
        event = json.loads(value)
        if "error" in event:
            raise _refusal(500, value.encode())
        for choice in event.get("choices", ()):
            if text := choice.get("delta", {}).get("content"):
                yield text


def _refusal(status: int, body: bytes) -> DataError | RemoteError:
    """Makes an error of an answer that is none (pure)."""
    try:
        refused = json.loads(body)["error"]
        what, code = str(refused["message"]), refused.get("code")
    except (ValueError, LookupError, TypeError, AttributeError):
        what, code = body.decode("utf-8", "replace")[:300], None
    if code == "context_length_exceeded":
        return DataError(what, where="this conversation", fix="/reset begins a new one")
    if status == 401:
        return DataError(what, where="the key", fix="give the server's: --key-file FILE")
    if status == 400:
        return DataError(what, where="the request", fix="change what is asked")
    return RemoteError(
        f"status {status}: {what}", where="the server", fix="see the server's output"
    )
