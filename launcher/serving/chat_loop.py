"""A conversation in the terminal, or of lines from a pipe."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Protocol

from realsys.api.errors import RealsysError

HELP = "/reset begins anew, /quit ends; so do Ctrl-D, and Ctrl-C where you write. Ctrl-C ends an answer."


class Answers(Protocol):
    """Gives the pieces of an answer to a conversation."""

    def __call__(self, messages: Sequence[dict[str, str]], /) -> Iterator[str]: ...


@dataclass(kw_only=True)
class ChatLoop:
    """Reads lines, answers each, and remembers both.

    Args:
        read: gives the next line; None: there is none.
        write: gets pieces of answers as they come.
        notify: gets messages about the conversation.
    """

    answers: Answers
    read: Callable[[], str | None]
    write: Callable[[str], None]
    notify: Callable[[str], None]
    system: str = ""
    messages: list[dict[str, str]] = field(default_factory=list)
    num_failed: int = 0

    def run(self) -> None:
        """Answers until there are no more lines, or ``/quit``."""
        self._reset()
        while (line := self.read()) is not None:
            text = line.strip()
            match text:
                case "":
                    continue
                case "/quit" | "/exit":
                    return
                case "/reset":
                    self._reset()
                    self.notify("a new conversation")
                case "/help":
                    self.notify(HELP)
                case _ if text.startswith("/") and " " not in text:
                    self.notify(f"no command {text}. {HELP}")
                case _:
                    self._answer(text)

    def _reset(self) -> None:
        self.messages = [{"role": "system", "content": self.system}] if self.system else []

    def _answer(self, text: str) -> None:
        """Answers one line. A question that failed is forgotten; of an answer that was cut off, its part is
        kept."""
        asked = [*self.messages, {"role": "user", "content": text}]
        pieces: list[str] = []
        try:
            with closing(self.answers(asked)) as stream:  # type: ignore[type-var]
                for piece in stream:
                    pieces.append(piece)
                    self.write(piece)
        except KeyboardInterrupt:
            self.notify(" (cut off)")
        except RealsysError as error:
            self.num_failed += 1
            self.write("\n" if pieces else "")
            self.notify(f"{error.what}. {error.fix}")
            return
        self.write("\n")
        self.messages = [*asked, {"role": "assistant", "content": "".join(pieces)}]
