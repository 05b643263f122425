"""Two data-parallel ranks as threads of one process."""

import threading

WAIT_S = 600.0  # for a rank that hangs; for one that has ended nobody waits


class RankHasEnded(Exception):
    """The other rank has ended without this sum or maximum."""


class ThreadRanks:
    """Sums and maxima over threads that stand for data-parallel ranks."""

    size = 2

    def __init__(self):
        self._changed, self._rounds, self._num_ended = threading.Condition(), [], 0
        self._mine = threading.local()

    def sum(self, x):
        return sum(self._all(x))

    def max(self, number):
        return max(self._all(number))

    def end(self):
        """Tells the other rank that this one takes part in nothing more."""
        with self._changed:
            self._num_ended += 1
            self._changed.notify_all()

    def _all(self, mine):
        number = self._mine.number = getattr(self._mine, "number", -1) + 1
        with self._changed:
            if number == len(self._rounds):
                self._rounds.append([])
            parts = self._rounds[number]
            parts.append(mine)
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: len(parts) == 2 or self._num_ended, WAIT_S)
            if len(parts) < 2:
                raise RankHasEnded
            return list(parts)


def on_two_ranks(do, batch):
    """What ``do(half, ranks)`` gives, or raises, on each half of a batch of four ids."""
    ranks, found = ThreadRanks(), [None, None]

    def run(i, half):
        try:
            found[i] = do(half, ranks)
        except Exception as error:
            found[i] = error
        finally:
            ranks.end()

    halves = batch.split([2, 2])
    threads = [threading.Thread(target=run, args=x) for x in enumerate(halves)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found
