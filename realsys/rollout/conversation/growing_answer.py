"""When an answer that grows is read again, and how little of it is decoded anew: linear time in all.

Pure, given the decoder.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

_SHARE = 256
_FAR_ENOUGH = 16  # tokens of what is behind, and goes on to be decoded with what comes
HALF_LETTER = "\ufffd"  # what the bytes of a letter that is not whole yet are decoded to


class GrowingAnswer:
    """One answer on its way to a client.

    Its first tokens are read one by one; then it is read whenever it has grown by a 256th, which a reader
    hardly sees. All readings together are of at most 257 times its tokens, not of their square.
    """

    def __init__(self) -> None:
        self._read = 0

    def is_due(self, num_tokens: int) -> bool:
        """Tells whether to read the answer now that it has so many tokens; if so, notes that it is."""
        if num_tokens - self._read < max(1, -(-self._read // _SHARE)):
            return False
        self._read = num_tokens
        return True


class GrowingText:
    """Decodes an answer that grows, from the last place where no letter was under way.

    Some tokens before that place are decoded again, for decoders that look back (some leave out a blank at
    the beginning of a text). Where a decoder changes what stood before, all is decoded.

    Args:
        whole: decodes all of an answer.
        before: the last tokens of what the answer goes on with; most answers begin anew.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        *,
        whole: Callable[[Sequence[int]], str] | None = None,
        before: Sequence[int] = (),
    ) -> None:
        self._decode, self._whole = decode, whole or decode
        self._last = list(before)
        self._known = decode(self._last) if before else ""  # what these are decoded to
        self._text, self._num_settled = "", 0

    def of(self, tokens: Sequence[int]) -> str:
        """Returns the text of all tokens so far, which begin with those of the call before."""
        new = list(tokens[self._num_settled :])
        seen = self._decode([*self._last, *new])
        if not seen.startswith(self._known):
            return self._whole(tokens)
        text = self._text + seen[len(self._known) :]
        if len(new) >= _FAR_ENOUGH and not text.endswith(HALF_LETTER):
            known = self._decode(new)
            if known and text.endswith(known):
                self._last, self._known = new, known
                self._text, self._num_settled = text, len(tokens)
        return text
