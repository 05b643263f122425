"""What a dialect offers to the endpoint, and the table of paths (pure)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from realsys.api.errors import RealsysError
from realsys.rollout.conversation.chat_messages import ChatRequest, ChatResult, Unserved
from realsys.rollout.dialects import (
    anthropic_messages,
    chat_completions,
    responses_api,
    text_completions,
)


class StreamEncoder(Protocol):
    """Encodes one answer as server-sent events; one object for each request, called in this order.

    Reasoning that is sent before the text keeps the order of a whole answer. Reasoning that is known only
    at the end may be left to ``closing``, which then sends it after the text.
    """

    def opening(
        self, id: str, created: int, model: str, *, num_prompt_tokens: int = 0, num_cached: int = 0
    ) -> bytes:
        """Returns the events before any text; all as the result will have it."""
        ...

    def reasoning(self, index: int, text: str) -> bytes:
        """Returns the events of more reasoning of reply ``index``, final and in order."""
        ...

    def text(self, index: int, text: str) -> bytes:
        """Returns the events of more content of reply ``index``, final and in order."""
        ...

    def closing(self, result: ChatResult) -> bytes:
        """Returns the events of everything not sent yet, and of the end.

        Raises:
            InternalError: what was sent before is no beginning of the result's text.
        """
        ...

    def ping(self) -> bytes:
        """Returns bytes that keep the connection open and that clients skip, also before ``opening``."""
        ...

    def failed(self, error: RealsysError, status: int) -> bytes:
        """Returns the events that end the stream with an error, instead of ``closing``."""
        ...


class Dialect(Protocol):
    """One HTTP API; a module with these functions is one."""

    def read(
        self, body: bytes, headers: Mapping[str, str], *, unserved: Unserved = Unserved.REFUSE
    ) -> ChatRequest:
        """Returns what the client asks for. Raises DataError for what is malformed or can't be served.

        Args:
            unserved: what becomes of tools and parts of messages that a policy of text can't take.
        """
        ...

    def body(self, result: ChatResult, request: ChatRequest) -> dict[str, Any]:
        """Returns the whole answer, as JSON values."""
        ...

    def stream(self, request: ChatRequest) -> StreamEncoder:
        """Returns the encoder of one streamed answer."""
        ...

    def error(self, error: RealsysError, status: int) -> dict[str, Any]:
        """Returns the answer of a failed request, in the API's own form."""
        ...


DIALECTS: dict[str, Dialect] = {
    "/v1/chat/completions": chat_completions,
    "/v1/completions": text_completions,
    "/v1/responses": responses_api,
    "/v1/messages": anthropic_messages,
}
