"""Where an answer ends by a client's stop text (pure)."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence


def cut_at_stop(
    tokens: Sequence[int], stops: Sequence[str], decode: Callable[[Sequence[int]], str]
) -> tuple[int, str]:
    """Returns how many of ``tokens`` belong to the answer, and the stop text in them; "" if none is.

    The token that completes a stop text is the answer's last: it was sampled before anything behind it.
    A token that ends within a letter shows U+FFFD until the letter is whole, so beginnings are compared
    with the whole text rather than searched.
    """
    text = decode(tokens)
    places = {stop: place for stop in stops if stop and (place := text.find(stop)) >= 0}
    if not places:
        return len(tokens), ""
    first = min(places, key=lambda stop: places[stop] + len(stop))
    end = places[first] + len(first)
    count = bisect_left(
        range(len(tokens)), True, key=lambda n: decode(tokens[:n])[:end] == text[:end]
    )
    return count, first


def before_stops(text: str, stops: Sequence[str]) -> str:
    """Returns as much of ``text`` as is before any stop text, or the beginning of one at its end."""
    for stop in stops:
        if (place := text.find(stop)) >= 0:
            text = text[:place]
            continue
        for length in range(min(len(stop) - 1, len(text)), 0, -1):
            if text.endswith(stop[:length]):
                text = text[:-length]
                break
    return text
