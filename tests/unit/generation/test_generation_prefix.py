"""The table of beginnings, and which rows are read together."""

from hypothesis import given
from hypothesis import strategies as st

from realsys.generation.decoding.cache_shapes import rectangles
from realsys.generation.decoding.prefix import PrefixCache

texts = st.lists(st.integers(0, 3), max_size=6).map(tuple)


@given(st.lists(texts, max_size=12), texts)
def test_the_longest_beginning_is_found(kept, text):
    cache = PrefixCache(1000)
    for i, tokens in enumerate(kept):
        cache.put(tokens, i, 1)
    beginnings = [t for t in kept if t and text[: len(t)] == t]
    if not beginnings:
        assert cache.longest(text) is None
        return
    length, index = cache.longest(text)
    assert length == max(map(len, beginnings))
    assert index == max(i for i, t in enumerate(kept) if t == text[:length])  # the newest


def test_beyond_the_bound_the_longest_unused_goes_first():
    cache = PrefixCache(30)
    for text in ("ab", "cd", "ef"):
        cache.put([ord(c) for c in text], text, 10)
    assert cache.longest([ord(c) for c in "abx"]) == (2, "ab")
    cache.put([1], "new", 10)
    assert cache.longest([ord(c) for c in "cd"]) is None
    assert cache.longest([ord(c) for c in "ab"]) == (2, "ab")
    assert (len(cache), cache.num_bytes) == (3, 30)
    cache.put([2], "too large", 31)
    assert cache.longest([2]) is None
    cache.put([1], "other", 5)
    assert (cache.longest([1]), cache.num_bytes) == ((1, "other"), 25)
    cache.clear()
    assert (len(cache), cache.num_bytes, cache.longest([1])) == (0, 0, None)


@given(st.lists(st.integers(1, 400), max_size=40))
def test_rows_read_together_are_alike_and_not_too_many(lengths):
    groups = rectangles(lengths, [0] * len(lengths), max_tokens=600, max_entries=600)
    assert sorted(i for group in groups for i in group) == list(range(len(lengths)))
    for group in groups:
        shortest, longest = (f(lengths[i] for i in group) for f in (min, max))
        assert len(group) * longest <= 600 or len(group) == 1
        assert longest <= max(1.25 * shortest, 8)


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(0, 400)), max_size=40))
def test_rows_read_together_fit_with_their_known_beginnings(rows):
    """Ten new tokens behind 30 000 known ones were read with 400 others of the kind: 12 million cells."""
    lengths, begins = [n for n, _ in rows], [k for _, k in rows]
    groups = rectangles(lengths, begins, max_tokens=600, max_entries=900)
    assert sorted(i for group in groups for i in group) == list(range(len(rows)))
    for group in groups:
        cells = len(group) * max(lengths[i] for i in group) + len(group) * max(
            begins[i] for i in group
        )
        assert len(group) == 1 or cells <= 900
