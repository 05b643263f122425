"""Long texts are read a piece at a time, in turn with the steps of all other requests.

For ``ContinuousEngine``. One text is read at a time, those that came later wait for it; requests with
shorter texts don't. A text that was read is the next to get a slot, with all requests of the same text.
The pieces follow from a text's own length: where a kernel's last bits depend on them, they don't depend on
what else runs.

    waiting ──takes──▶ long texts ──read_piece … read_piece──▶ finished, waiting again ──▶ running
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from realsys.generation.decoding.decoder import rounded
from realsys.generation.decoding.slots import Slots
from realsys.generation.engine.row import Row

# The last piece of n takes up to 2 / n of the time, as a token is compared with all before it.
_PIECES = 48
_LEAST, _MOST = 256, 1024  # tokens of a piece
_GRANULE = 64


def piece_size(num_tokens: int, read_tokens: int) -> int:
    """Returns how many tokens of a text to read at a time.

    >>> piece_size(20_000, 1024), piece_size(3000, 1024), piece_size(200_000, 8192)
    (448, 256, 1024)
    """
    size = rounded(-(-num_tokens // _PIECES), _GRANULE)
    return min(read_tokens, max(_LEAST, min(size, _MOST)))


class LongTexts:
    """Rows whose texts are read in pieces.

    Args:
        read_tokens: texts with more new tokens are long; None: none is.
    Attributes:
        rows: in the order of their coming; the first is being read.
        finished: rows of the text that was read, which have no slots yet.
    """

    def __init__(self, slots: Slots, read_tokens: int | None) -> None:
        self._slots, self._read_tokens = slots, read_tokens
        self.rows: deque[Row] = deque()
        self.finished: list[Row] = []
        self._partial: Row | None = None
        self._version = 0  # of the weights that read the started or finished text; -1: of several
        self._was_last = False  # the newest step read a piece

    def takes(self, row: Row) -> bool:
        """True if the text of a waiting row is to be read in pieces first."""
        if self._read_tokens is None or row in self.finished or not self._slots.reads_in_pieces:
            return False
        # Most are told by their length, without a look at what is known of them.
        return row.length > self._read_tokens and self._slots.num_new(row.text) > self._read_tokens

    def is_due(self, *, others: bool) -> bool:
        """True if it is a piece's turn: after a step of the others, or if there are none."""
        return bool(self.rows) and not self.finished and not (self._was_last and others)

    def read_piece(self, version: int) -> list[Row]:
        """Reads a piece; returns the rows whose text it finished."""
        row = self.rows[0]
        assert self._read_tokens is not None
        if self._partial is not row:
            self._slots.begin(row.text)
            self._partial, self._version = row, version
        self._was_last = True
        if self._slots.read_piece(piece_size(row.length, self._read_tokens)):
            return []
        equal = [row, *self._equal(row)] if self._slots.shares_texts else [row]
        for read in equal:
            self.rows.remove(read)
        self._partial, self.finished = None, equal
        return list(equal)

    def _equal(self, row: Row) -> list[Row]:
        others = [r for r in self.rows if r is not row and r.length == row.length]
        return [r for r in others if r.text == row.text]

    def note_step(self) -> None:
        """Notes a step of the others."""
        self._was_last = False

    def version_of(self, row: Row, version: int) -> int:
        """Returns the version of the weights that an admitted row's text is read with."""
        return self._version if row in self.finished else version

    def note_read(self, rows: Sequence[Row]) -> None:
        """Notes that rows have their slots: what was read is theirs, and no other's."""
        if any(row in self.finished for row in rows):
            self.finished = []

    def note_version(self) -> None:
        """Notes that later pieces are read with other weights."""
        self._version = -1

    def remove(self, row: Row) -> bool:
        """Lets go of a row that waits for nothing any more; True if it was among ``rows``."""
        if row in self.finished:
            self.finished.remove(row)
        if row is self._partial or not (self._partial or self.finished):
            self._forget()
        if row not in self.rows:
            return False
        self.rows.remove(row)
        return True

    def clear(self) -> list[Row]:
        """Lets go of all; returns ``rows``: what was read of them is to be read anew."""
        rows = list(self.rows)
        self.rows.clear()
        self._forget()
        return rows

    def _forget(self) -> None:
        self._slots.drop()
        self._partial, self.finished = None, []
