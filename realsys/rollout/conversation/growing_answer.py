"""When an answer that grows is read again from its beginning: not at each token, else that were quadratic.

Pure.
"""

from __future__ import annotations

_SHARE = 256


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
