"""Math data sets: the same prompt everywhere, held-out records, limits that name the record."""

import gzip
import json
import logging
import pickle
import re
from collections import Counter

import golden
import pytest
import torch

from realsys.api.errors import DataError
from realsys.data.preferences.preference_pairs import PreferencePairs
from realsys.data.sources.arithmetic_problems import arithmetic_word_problems
from realsys.data.sources.chat_tokens import PromptTokenizer
from realsys.data.sources.dataset_arguments import Columns
from realsys.data.sources.math_questions import MathPrompts, MathSFT
from realsys.data.sources.mixed_questions import MixedQuestions
from realsys.data.sources.record_files import open_records
from realsys.data.sources.record_shape import question_of
from realsys.models.from_scratch.tiny_llama import train_tokenizer

TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"


def tokenize_prompt(tokenizer, prompt):
    return PromptTokenizer(tokenizer).tokens(prompt)


def read_records(path):
    """Prompts and answers of a whole file."""
    records = open_records(path)
    shaped = [
        question_of(record, Columns(), records.where(i), needs_answer=True)
        for i, record in enumerate(records)
    ]
    return [{"prompt": q.prompt, "answer": q.answer} for q in shaped]


@pytest.fixture(scope="module")
def tokenizer():
    problems = arithmetic_word_problems(num_problems=500, seed=0, split="train")
    return train_tokenizer([p["prompt"] + p["answer"] for p in problems], vocab_size=400)


@pytest.fixture
def file(tmp_path):
    """Ten records in GSM8K's spelling: question i, answer 10 · i."""
    path = tmp_path / "questions.jsonl"
    rows = [{"question": f"How much is {i}0?", "answer": f"{i} tens\n#### {i}0"} for i in range(10)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def text(tokenizer, tokens):
    return tokenizer.decode(tokens.tolist())


def test_prompts_carry_the_final_answer(tokenizer):
    data = MathPrompts(tokenizer=tokenizer, seed=3, split="train", train_size=20)
    records = arithmetic_word_problems(num_problems=20, seed=3, split="train")
    assert (len(data), data.keys) == (20, ("packed_prompts",))
    batch = data.batch([7, 2], ["x", "y"])
    assert batch.ids == ("x", "y")
    pieces = torch.split(batch.data["packed_prompts"], batch.piece_lengths("packed_prompts"))
    assert [text(tokenizer, p) for p in pieces] == [records[i]["prompt"] for i in (7, 2)]
    answers = [records[i]["answer"].split("#### ")[1] for i in (7, 2)]
    assert batch.meta.metadata["answer"] == tuple(answers)


def test_fine_tuning_continues_the_prompt_of_ppo(tokenizer):
    arguments = {"tokenizer": tokenizer, "seed": 3, "split": "train", "train_size": 20}
    data, prompts = MathSFT(**arguments), MathPrompts(**arguments)
    assert data.keys == ("packed_input_ids", "prompt_mask")
    batch = data.batch([4], ["x"])
    tokens, mask = batch.data["packed_input_ids"], batch.data["prompt_mask"]
    assert tokens[mask].tolist() == prompts.prompt_tokens(4)
    assert text(tokenizer, tokens[~mask]) == data.records[4]["answer"] + tokenizer.eos_token
    assert mask.tolist() == sorted(mask.tolist(), reverse=True)


def test_a_tokenizer_that_puts_a_bos_token_gets_one_in_front_and_no_other(tokenizer):
    class Putting:
        """A tokenizer with the post-processor of Llama's (BOS) or another's (BOS and EOS)."""

        chat_template, bos_token_id, eos_token_id = None, 1, 2

        def __init__(self, tail):
            self.tail = tail

        def __call__(self, text, add_special_tokens=True):
            encoded = tokenizer(text, add_special_tokens=False)
            if add_special_tokens:
                encoded["input_ids"] = [1, *encoded["input_ids"], *self.tail]
            return encoded

    plain = tokenize_prompt(tokenizer, "Why?\n")
    assert plain[0] != 1
    assert tokenize_prompt(Putting([]), "Why?\n") == [1, *plain]
    assert tokenize_prompt(Putting([2]), "Why?\n") == [1, *plain]


def test_a_question_without_trailing_space_gets_a_newline(tokenizer):
    assert tokenize_prompt(tokenizer, "Why?") == tokenize_prompt(tokenizer, "Why?\n")


def test_a_chat_template_is_used_by_both(tokenizer, file):
    tokenizer.chat_template = TEMPLATE
    try:
        prompts = MathPrompts(tokenizer=tokenizer, seed=1, split="train", path=file, eval_size=0)
        sft = MathSFT(tokenizer=tokenizer, seed=1, split="train", path=file, eval_size=0)
        tokens = prompts.prompt_tokens(1)
        assert tokenizer.decode(tokens) == "[user]How much is 10?[assistant]"
        whole = sft.batch([1], ["x"]).data["packed_input_ids"]
        assert text(tokenizer, whole) == "[user]How much is 10?[assistant]1 tens\n#### 10<eos>"
    finally:
        tokenizer.chat_template = None


def prompts_of(data):
    return [data.question(i).prompt for i in range(len(data))]


def test_the_last_records_are_held_out(tokenizer, file):
    arguments = {"tokenizer": tokenizer, "seed": 1, "path": file, "eval_size": 3}
    train, test = (prompts_of(MathPrompts(split=s, **arguments)) for s in ("train", "test"))
    assert [p.split()[-1] for p in test] == ["70?", "80?", "90?"]
    assert len(train) == 7
    assert not set(train) & set(test)


def test_held_out_records_of_their_own_leave_the_training_file_whole(tokenizer, file, tmp_path):
    other = tmp_path / "held_out.jsonl"
    other.write_text('{"prompt": "a", "answer": "1"}\n{"prompt": "b", "answer": "2"}\n')
    arguments = {"tokenizer": tokenizer, "seed": 1, "path": file, "eval_path": str(other)}
    assert len(MathPrompts(split="train", eval_size=1, **arguments)) == 10
    assert prompts_of(MathPrompts(split="test", eval_size=1, **arguments)) == ["a"]


def test_no_held_out_records(tokenizer, file):
    arguments = {"tokenizer": tokenizer, "seed": 1, "path": file, "eval_size": 0}
    assert len(MathPrompts(split="train", **arguments)) == 10
    assert len(MathPrompts(split="test", **arguments)) == 0


def test_too_long_names_the_record_and_both_numbers(tokenizer, file):
    arguments = {"tokenizer": tokenizer, "seed": 1, "split": "train", "path": file, "eval_size": 0}
    lengths = [len(tokenize_prompt(tokenizer, r["prompt"])) for r in read_records(file)]
    limit = max(lengths) - 1
    first = next(i for i, n in enumerate(lengths) if n > limit)
    with golden.raises(DataError) as refused:  # before any is asked for
        MathPrompts(max_prompt_len=limit, **arguments)
    assert re.findall(r"\d+", refused.value.what) == [f"{first + 1}", f"{limit + 1}", f"{limit}"]
    MathPrompts(max_prompt_len=limit + 1, **arguments)
    answers = MathSFT(max_answer_len=1, **arguments)
    with golden.raises(DataError) as error:
        answers.batch([2], ["x"])
    assert "max_answer_len" in error.value.fix
    assert file in error.value.where


@pytest.mark.parametrize("split", ["train", "test"])
@pytest.mark.parametrize("made", [MathPrompts, MathSFT, PreferencePairs])
def test_records_with_long_prompts_are_left_out_and_counted(
    tokenizer, tmp_path, made, split, caplog
):
    path = tmp_path / "q.jsonl"
    rows = [
        {
            "prompt": "12 " * (40 if i % 3 == 1 else 2),
            "answer": f"{i}",
            "chosen": "1",
            "rejected": "2",
        }
        for i in range(12)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = {"tokenizer": tokenizer, "seed": 1, "split": split, "path": str(path)}
    arguments |= {"eval_size": 4, "max_prompt_len": 20}
    with golden.raises(DataError):
        made(**arguments)
    with caplog.at_level(logging.WARNING):
        data = made(long_prompts="drop", **arguments)
    kept = [i for i in (range(8) if split == "train" else range(8, 12)) if i % 3 != 1]
    assert [data.record(i)["answer"] for i in range(len(data))] == [str(i) for i in kept]
    data.batch(range(len(data)), [str(i) for i in kept])
    (told,) = (r.getMessage() for r in caplog.records if "dropped=" in r.getMessage())
    assert f"kept={len(kept)} dropped={(8 if split == 'train' else 4) - len(kept)}" in told
    whole = made(long_prompts="drop", **{**arguments, "max_prompt_len": 200})
    assert len(whole) == (8 if split == "train" else 4)
    with golden.raises(DataError):
        made(long_prompts="drop", **{**arguments, "max_prompt_len": 2})


def test_a_source_of_a_mixture_leaves_its_own_out(tokenizer, file):
    source = {"path": file, "eval_size": 0, "max_prompt_len": 3, "long_prompts": "drop"}
    both = {"whole": {"path": file, "eval_size": 0}, "none": source}
    given = {"tokenizer": tokenizer, "seed": 1, "split": "train", "of": "math_prompts"}
    with pytest.raises(DataError) as refused:
        MixedQuestions(sources=both, **given)
    assert "task.sources.none.max_prompt_len" in refused.value.fix


def test_an_unknown_split_is_refused(tokenizer):
    with golden.raises(DataError):
        MathPrompts(tokenizer=tokenizer, seed=1, split="tests")


def jsonl(*rows):
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


@pytest.mark.parametrize("mark", ["\u2028", "\u2029", "\u0085", "\x1c", "\x0b"])
def test_a_separator_of_unicode_ends_no_record(tmp_path, mark):
    path = tmp_path / "q.jsonl"
    prompt = f"one{mark}two" if mark > " " else "one two"
    path.write_text(jsonl({"prompt": prompt, "answer": "3"}, {"prompt": "b", "answer": "4"}))
    assert [r["prompt"] for r in read_records(path)] == [prompt, "b"]


def test_byte_order_mark_windows_lines_and_gzip_are_read(tmp_path):
    text = jsonl({"prompt": "ä", "answer": "3"}, {"prompt": "b", "answer": "4"})
    expected = [{"prompt": "ä", "answer": "3"}, {"prompt": "b", "answer": "4"}]
    path = tmp_path / "q.jsonl"
    for data in (
        text.encode("utf-8-sig"),
        text.replace("\n", "\r\n").encode(),
        gzip.compress(text.encode()),
        gzip.compress(text.encode("utf-8-sig")),
    ):
        path.write_bytes(data)
        assert read_records(path) == expected
    path.write_bytes(gzip.compress(text.encode())[:-12])
    with golden.raises(DataError):
        read_records(path)
    path.write_bytes(b"\x1f\x8b not gzip")
    with golden.raises(DataError):
        read_records(path)


@pytest.mark.parametrize(
    ("record", "advice"),
    [
        ({"prompt": None, "answer": "3"}, ""),
        ({"prompt": "", "answer": "3"}, ""),
        ({"prompt": "a", "answer": None}, ""),
        ({"promt": "a", "answer": "3"}, "did you mean 'promt'?"),
    ],
)
def test_what_a_record_lacks_is_told_as_it_is(tmp_path, record, advice):
    path = tmp_path / "q.jsonl"
    path.write_text(jsonl(record))
    with golden.raises(DataError) as error:
        read_records(path)
    assert ("did you mean" in error.value.fix) == bool(advice)


def test_tokens_of_prompts_and_answers_are_not_kept(tokenizer):
    """They would be gigabytes for a million records."""
    for kind in (MathPrompts, MathSFT):
        data = kind(tokenizer=tokenizer, seed=3, split="train", train_size=50)
        fresh = len(pickle.dumps(vars(data) | {"tokenizer": None}))
        data.batch([0], ["first"])
        before = len(pickle.dumps(vars(data) | {"tokenizer": None}))
        assert before < fresh + 100  # what ends an answer
        data.batch(range(50), [str(i) for i in range(50)])
        assert len(pickle.dumps(vars(data) | {"tokenizer": None})) == before


def test_a_record_of_lists_without_end_is_refused_by_its_line(tmp_path):
    path = tmp_path / "d.jsonl"
    deep = "[" * 100_000 + "]" * 100_000
    path.write_text(f'{{"prompt": "a", "answer": "1"}}\n{{"prompt": {deep}}}\n')
    with golden.raises(DataError) as caught:
        read_records(str(path))
    assert caught.value.where.endswith(":2")


def test_a_record_of_a_mixture_is_told_by_its_source_and_its_place_there(tokenizer, tmp_path):
    for name in ("first", "second"):
        rows = [{"prompt": f"{name} {i}", "answer": str(i)} for i in range(2)]
        (tmp_path / f"{name}.jsonl").write_text(jsonl(*rows))
    sources = {
        name: {"path": str(tmp_path / f"{name}.jsonl"), "eval_size": 0}
        for name in ("first", "second")
    }
    mixed = MixedQuestions(
        sources=sources, tokenizer=tokenizer, seed=1, split="train", of="math_prompts"
    )
    order = [3, 0, 2, 1]  # of both sources, in turns
    batch = mixed.batch(order, [f"0-{i}" for i in order])
    assert batch.ids == ("0-3", "0-0", "0-2", "0-1")
    for taken, i in zip(batch.unpack(), order, strict=True):
        alone = mixed.batch([i], [f"0-{i}"])
        assert taken.meta == alone.meta
        assert all(torch.equal(x, alone.data[key]) for key, x in taken.data.items())
    told = {mixed.record(i)["prompt"]: mixed.records.where(i) for i in range(len(mixed))}
    assert [mixed.question_text(i) for i in range(len(mixed))] == list(told)
    assert told == {
        f"{name} {i}": f"{name}: {tmp_path / name}.jsonl:{i + 1}"
        for name in ("first", "second")
        for i in range(2)
    }


@pytest.mark.parametrize("goes_on", [True, False])
def test_records_that_come_twice_are_others_each_epoch(tokenizer, tmp_path, goes_on):
    """Two of a source with as many items as another that has three; else its first ones, in each epoch."""
    for name, size in (("few", 2), ("many", 3)):
        rows = [{"prompt": f"{name} {i}", "answer": str(i)} for i in range(size)]
        (tmp_path / f"{name}.jsonl").write_text(jsonl(*rows))
    mixed = MixedQuestions(
        sources={n: {"path": f"{tmp_path}/{n}.jsonl", "eval_size": 0} for n in ("few", "many")},
        weights={"few": 1.0, "many": 1.0},
        tokenizer=tokenizer,
        seed=1,
        split="train",
        of="math_prompts",
        goes_on=goes_on,
    )
    assert mixed.items == {"few": 3, "many": 3}
    asked = Counter()
    for epoch in range(4):
        ids = [f"{epoch}-{i}" for i in range(6)]
        batch = mixed.batch(range(6), ids)
        texts = [tokenizer.decode(one.data["packed_prompts"]).strip() for one in batch.unpack()]
        assert texts == [mixed.record_of(i, id_)["prompt"] for i, id_ in enumerate(ids)]
        assert texts == [mixed.question_text_of(i, id_).strip() for i, id_ in enumerate(ids)]
        assert len(set(texts)) == 5, "each at least once an epoch"
        asked.update(texts)
    few = {name: count for name, count in asked.items() if name.startswith("few")}
    assert few == ({"few 0": 6, "few 1": 6} if goes_on else {"few 0": 8, "few 1": 4})
    assert {count for name, count in asked.items() if name.startswith("many")} == {4}
    with_other_id = mixed.batch([0], ["eval-0"])
    assert torch.equal(
        with_other_id.data["packed_prompts"], mixed.batch([0], ["0-0"]).data["packed_prompts"]
    )
