"""The values that an answer's raw text is parsed to."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class ParsedCall:
    """One tool call. ``arguments`` is a JSON object as compact text, with keys in the policy's order."""

    name: str
    arguments: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ParsedAnswer:
    """One answer, taken apart. White space beside thoughts and calls belongs to neither field.

    Attributes:
        content: text outside of thoughts and calls; several stretches of it are joined by a newline.
        reasoning: thoughts, without their marks.
        calls: in the order in which they were written.
        faults: what looked like a call and could not be read, in words; its raw text is in ``content``.
    """

    content: str
    reasoning: str
    calls: tuple[ParsedCall, ...]
    faults: tuple[str, ...]
