"""Messages in order, with what one message alone doesn't know (pure)."""

from __future__ import annotations

from dataclasses import replace

from realsys.rollout.conversation.chat_messages import ChatMessage


class TurnMerger:
    """Collects messages. Tool messages get the name of the tool whose call they answer.

    Args:
        merge: whether assistant messages in a row are parts of one turn, and become one message.
    """

    def __init__(self, *, merge: bool) -> None:
        self._merge = merge
        self._messages: list[ChatMessage] = []
        self._tool_names: dict[
            str, str
        ] = {}  # id of a call → the tool; the newest call of an id wins

    def add(self, message: ChatMessage) -> None:
        """Appends a message, or joins it to the assistant message before it."""
        for call in message.tool_calls:
            self._tool_names[call.id] = call.name
        if message.role == "tool" and not message.name:
            message = replace(message, name=self._tool_names.get(message.tool_call_id, ""))
        last = self._messages[-1] if self._messages else None
        if self._merge and last is not None and last.role == message.role == "assistant":
            self._messages[-1] = replace(
                last,
                content=last.content + message.content,
                reasoning=last.reasoning + message.reasoning,
                tool_calls=last.tool_calls + message.tool_calls,
            )
        else:
            self._messages.append(message)

    def messages(self) -> tuple[ChatMessage, ...]:
        """Returns all messages so far."""
        return tuple(self._messages)
