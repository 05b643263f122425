"""A streamed answer is decoded from its last whole letter: the text of all of it, in linear time."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from realsys.rollout.conversation.growing_answer import GrowingAnswer, GrowingText

TEXT = "the quick brown fox, 12345 (x + y) = z; größer und 鷹 🙂🙂 naïve\n"


def byte_pairs() -> Tokenizer:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel()
    made.decoder = decoders.ByteLevel()
    letters = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        [TEXT] * 9,
        trainers.BpeTrainer(vocab_size=330, initial_alphabet=letters, show_progress=False),
    )
    return made


def sentence_pieces() -> Tokenizer:
    """Leaves out a blank at a text's beginning, and writes what it does not know as bytes."""
    pieces = ["<unk>", *(f"<0x{i:02X}>" for i in range(256)), "▁", "▁the", *"aeiothx▁."]
    vocabulary = {piece: i for i, piece in enumerate(dict.fromkeys(pieces))}
    made = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    made.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return made


class CountingDecoder:
    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer, self.num_tokens = tokenizer, 0

    def __call__(self, tokens: Sequence[int]) -> str:
        self.num_tokens += len(tokens)
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=False))


@pytest.mark.parametrize("make", [byte_pairs, sentence_pieces])
@pytest.mark.parametrize("seed", range(6))
def test_the_text_is_that_of_all_tokens(make: Callable[[], Tokenizer], seed: int) -> None:
    tokenizer = make()
    draw = random.Random(seed)
    size = tokenizer.get_vocab_size()
    tokens = [draw.randrange(size) for _ in range(200)]  # half letters, blanks, bytes of no letter
    growing, whole = GrowingText(CountingDecoder(tokenizer)), CountingDecoder(tokenizer)
    count = 0
    while count < len(tokens):
        count += draw.choice([1, 1, 1, 2, 30])
        assert growing.of(tokens[:count]) == whole(tokens[:count])


def test_the_text_of_letters_of_several_tokens_is_theirs() -> None:
    tokenizer = byte_pairs()
    ids = tokenizer.encode(TEXT * 5).ids
    growing = GrowingText(CountingDecoder(tokenizer))
    for count in range(1, len(ids) + 1):
        assert growing.of(ids[:count]) == tokenizer.decode(ids[:count])


def test_what_goes_on_with_a_text_keeps_its_first_blank() -> None:
    tokenizer = sentence_pieces()
    the = tokenizer.token_to_id("▁the")
    decode = CountingDecoder(tokenizer)
    growing = GrowingText(decode, before=[the])
    for count in range(1, 60):
        assert growing.of([the] * count) == " the" * count
    assert GrowingText(decode).of([the, the]) == "the the"


def test_a_decoder_that_changes_what_stood_before_is_asked_for_all() -> None:
    def decode(tokens: Sequence[int]) -> str:
        return "".join(map(chr, tokens)).replace(" .", ".")

    tokens = [*map(ord, "it ends here ." * 20)]
    growing = GrowingText(decode)
    for count in range(1, len(tokens) + 1):
        assert growing.of(tokens[:count]) == decode(tokens[:count])


@pytest.mark.parametrize("num_tokens", [1000, 2000, 4000])
def test_all_readings_together_decode_a_few_tokens_for_each(num_tokens: int) -> None:
    tokenizer = byte_pairs()
    ids = (tokenizer.encode(TEXT).ids * num_tokens)[:num_tokens]
    some, answer = CountingDecoder(tokenizer), GrowingAnswer()
    growing = GrowingText(some)
    for count in range(1, num_tokens + 1):
        if answer.is_due(count):
            growing.of(ids[:count])
    assert some.num_tokens < 20 * num_tokens
    every = CountingDecoder(tokenizer)
    growing = GrowingText(every)
    for count in range(1, num_tokens + 1):
        growing.of(ids[:count])
    assert every.num_tokens < 40 * num_tokens
