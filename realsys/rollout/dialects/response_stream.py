"""Events of a streamed response of Responses (pure)."""

from __future__ import annotations

from typing import Any

from realsys.api.errors import RealsysError
from realsys.rollout.conversation.chat_messages import (
    ChatReply,
    ChatRequest,
    ChatResult,
    FinishReason,
)
from realsys.rollout.dialects.error_bodies import code_of, field_of, message_of
from realsys.rollout.dialects.response_object import (
    call_item,
    finished_response,
    message_item,
    reasoning_item,
    response_object,
    status_of,
)
from realsys.rollout.dialects.server_sent_events import COMMENT, named_event, unsent

CONVERSATION = "input"  # the field that holds it
_PREFIXES = {"message": "msg", "reasoning": "rs"}
_TEXT_EVENTS = {"message": "response.output_text", "reasoning": "response.reasoning_text"}


class ResponseStream:
    """Encodes the events of one response: output items, one after another."""

    def __init__(self, request: ChatRequest) -> None:
        self._request = request
        self._response: dict[str, Any] = {}
        self._num_events = 0
        self._sent: dict[str, list[str]] = {"reasoning": [], "message": []}
        self._output: list[dict[str, Any]] = []  # items that are done
        self._kind = ""  # of the open item
        self._texts: list[str] = []  # of the open item

    def opening(
        self, id: str, created: int, model: str, *, num_prompt_tokens: int = 0, num_cached: int = 0
    ) -> bytes:
        """Returns the response without output."""
        del num_prompt_tokens, num_cached  # told at the end
        self._response = response_object(id, created, model, self._request)
        names = ("response.created", "response.in_progress")
        return b"".join(self._event(name, response=self._response) for name in names)

    def reasoning(self, index: int, text: str) -> bytes:
        """Returns more of an item of reasoning, if there is more."""
        del index
        return self._more("reasoning", text)

    def text(self, index: int, text: str) -> bytes:
        """Returns more of the message, if there is more."""
        del index
        return self._more("message", text)

    def closing(self, result: ChatResult) -> bytes:
        """Returns the rest of the items, and the response as it is then."""
        reply = result.replies[0]
        whole = {"reasoning": reply.message.reasoning, "message": reply.message.content}
        # The open item goes on before the other one begins.
        kinds = ("message", "reasoning") if any(self._sent["message"]) else ("reasoning", "message")
        events = []
        for kind in kinds:
            events.append(self._more(kind, unsent(whole[kind], self._sent[kind])))
            if kind == "message" and not whole[kind] and not reply.message.tool_calls:
                events.append(self._start(kind))  # a reply is never without a message and calls
            events.append(self._done(reply))
        events += [self._call(i, reply) for i in range(len(reply.message.tool_calls))]
        name = "incomplete" if reply.finish is FinishReason.LENGTH else "completed"
        response = finished_response(result, self._request, self._output)
        return b"".join((*events, self._event(f"response.{name}", response=response)))

    def ping(self) -> bytes:
        """Returns a comment."""
        return COMMENT

    def failed(self, error: RealsysError, status: int) -> bytes:
        """Returns an error event and, if the response was opened, its failure: clients look for either."""
        message, code = message_of(error, conversation=CONVERSATION), code_of(error, status)
        event = self._event(
            "error", code=code, message=message, param=field_of(error, conversation=CONVERSATION)
        )
        if not self._response:
            return event
        failure = {"code": code or "invalid_prompt", "message": message}
        response = {**self._response, "status": "failed", "error": failure, "output": self._output}
        return event + self._event("response.failed", response=response)

    def _more(self, kind: str, text: str) -> bytes:
        if not text:
            return b""
        start = b"" if self._kind == kind else self._done(None) + self._start(kind)
        self._sent[kind].append(text)
        self._texts.append(text)
        extra: dict[str, Any] = {"logprobs": []} if kind == "message" else {}
        return start + self._part_event(f"{_TEXT_EVENTS[kind]}.delta", delta=text, **extra)

    def _start(self, kind: str) -> bytes:
        self._kind, self._texts = kind, []
        item: dict[str, Any] = {
            "id": self._item_id(),
            "type": kind,
            "status": "in_progress",
            "content": [],
        }
        if kind == "message":
            item["role"] = "assistant"
            part: dict[str, Any] = {
                "type": "output_text",
                "text": "",
                "annotations": [],
                "logprobs": [],
            }
        else:
            item["summary"] = []
            part = {"type": "reasoning_text", "text": ""}
        added = self._event("response.output_item.added", output_index=len(self._output), item=item)
        return added + self._part_event("response.content_part.added", part=part)

    def _done(self, reply: ChatReply | None) -> bytes:
        """Ends the open item, if there is one. ``reply``: None, if it is not known yet."""
        if not self._kind:
            return b""
        kind, text, position = self._kind, "".join(self._texts), len(self._output)
        item = reasoning_item(self._response["id"], position, text)
        if kind == "message":
            item = self._message_item(text, reply)
        part = item["content"][0]
        extra = {"logprobs": part["logprobs"]} if kind == "message" else {}
        events = [
            self._part_event(f"{_TEXT_EVENTS[kind]}.done", text=text, **extra),
            self._part_event("response.content_part.done", part=part),
            self._event("response.output_item.done", output_index=position, item=item),
        ]
        self._kind = ""
        self._output.append(item)
        return b"".join(events)

    def _message_item(self, text: str, reply: ChatReply | None) -> dict[str, Any]:
        position = len(self._output)
        if reply is not None:
            item = message_item(self._response["id"], position, reply, self._request)
        else:
            item = {
                "id": self._item_id(),
                "type": "message",
                "role": "assistant",
                "status": "completed",
            }
            item["content"] = [{"type": "output_text", "annotations": [], "logprobs": []}]
        item["content"][0]["text"] = text
        return item

    def _call(self, index: int, reply: ChatReply) -> bytes:
        call, position = reply.message.tool_calls[index], len(self._output)
        item = call_item(self._response["id"], position, call, status_of(reply))
        self._output.append(item)
        place = {"item_id": item["id"], "output_index": position}
        events = "response.function_call_arguments"
        empty = {**item, "arguments": "", "status": "in_progress"}
        return b"".join(
            (
                self._event("response.output_item.added", output_index=position, item=empty),
                self._event(f"{events}.delta", **place, delta=call.arguments),
                self._event(f"{events}.done", **place, arguments=call.arguments, name=call.name),
                self._event("response.output_item.done", output_index=position, item=item),
            )
        )

    def _item_id(self) -> str:
        return f"{_PREFIXES[self._kind]}_{self._response['id']}_{len(self._output)}"

    def _part_event(self, name: str, /, **fields: Any) -> bytes:
        """Encodes an event of the open item's only part."""
        place = {"item_id": self._item_id(), "output_index": len(self._output), "content_index": 0}
        return self._event(name, **place, **fields)

    def _event(self, name: str, /, **fields: Any) -> bytes:
        number, self._num_events = self._num_events, self._num_events + 1
        return named_event({"type": name, "sequence_number": number, **fields})
