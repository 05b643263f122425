"""Names on a hub, the files that they mean, and what a hub's answers mean."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import golden
import pytest

from launcher.hub.hub_answers import is_unreachable, listing_of, refusal
from launcher.hub.hub_names import HubListing, HubName, files_of, parse_hub_name, pinned
from realsys.api.errors import ConfigError
from realsys.data.sources.record_files import record_paths

COMMIT = "0123456789abcdef0123456789abcdef01234567"
GSM8K = (
    "README.md",
    *("main/test-00000-of-00001.parquet", "main/train-00000-of-00001.parquet"),
    *("socratic/test-00000-of-00001.parquet", "socratic/train-00000-of-00001.parquet"),
)
SHARDS = tuple(f"data/train-{i:05}-of-00003-0123456789abcdef.parquet" for i in range(3))
ULTRAFEEDBACK = tuple(
    f"data/{split}-00000-of-00001.parquet" for split in ("test_prefs", "train_prefs", "train_sft")
)


def listing(*files: str) -> HubListing:
    return HubListing(COMMIT, dict.fromkeys(files, 1 << 20))


def files(text: str, *there: str, split: str = "train") -> str:
    """What the name ``hf:lab/set<text>`` means in a data set with these files."""
    name = parse_hub_name(f"hf:lab/set{text}", where="task.path")
    found = pinned(name, listing(*there), split, where="task.path")
    assert (found.repo, found.revision) == ("lab/set", COMMIT)
    return found.files


@pytest.mark.parametrize(
    ("text", "repo", "revision", "inside"),
    [
        ("hf:openai/gsm8k", "openai/gsm8k", "main", ""),
        ("hf:openai/gsm8k/", "openai/gsm8k", "main", ""),
        ("hf:openai/gsm8k@v1.0", "openai/gsm8k", "v1.0", ""),
        ("hf:openai/gsm8k/main/train-*.parquet", "openai/gsm8k", "main", "main/train-*.parquet"),
        (f"hf:a/b.c-d_e@{COMMIT}/x/", "a/b.c-d_e", COMMIT, "x"),
        ("hf:a/b@refs/convert/parquet/x", "a/b", "refs/convert/parquet", "x"),
        ("hf:a/b@refs/pr/12", "a/b", "refs/pr/12", ""),
        ("hf:a/b/c@d", "a/b", "main", "c@d"),
    ],
)
def test_the_parts_of_a_name(text: str, repo: str, revision: str, inside: str) -> None:
    name = parse_hub_name(text, where="task.path")
    assert name == HubName(repo, revision, inside)
    assert parse_hub_name(str(name), where="task.path") == name
    assert name.has_commit == (revision == COMMIT)


@pytest.mark.parametrize(
    "text",
    "hf: hf:gsm8k hf:/a/b hf:a/b@ hf:a/../b hf:../b hf:a/b/../c hf:a/b//c hf:a/b/./c hf:a/b/**/c "
    "hf:a%b/c hf:a/b@x@y hf:a/b/c\0".split(),
)
def test_what_is_no_name(text: str) -> None:
    with golden.raises(ConfigError) as caught:
        parse_hub_name(text, where="task.path")
    assert "hf:OWNER/NAME[@REVISION][/FILES]" in caught.value.fix


@pytest.mark.parametrize(
    ("text", "there", "meant"),
    [
        ("/main", GSM8K, "main/train-00000-of-00001.parquet"),
        ("/main/test-00000-of-00001.parquet", GSM8K, "main/test-00000-of-00001.parquet"),
        ("/*/test-*", GSM8K, "*/test-*"),
        ("", SHARDS, "data/train-?????-of-00003-*.parquet"),
        ("/data", (*SHARDS, "data/test.csv"), "data/train-?????-of-00003-*.parquet"),
        ("", ("README.md", "problems.jsonl"), "problems.jsonl"),  # the only file
        ("", ("dev.jsonl.gz", "train.jsonl.gz"), "train.jsonl.gz"),
        ("", ("constrained.csv", "training.csv"), "training.csv"),
        ("", ("_train.csv", ".train.csv", "x/train.csv"), "x/train.csv"),  # as in a local folder
        ("", ("a[1]/train-00000-of-00001.csv",), "a[1]/train-00000-of-00001.csv"),
    ],
)
def test_what_a_name_means(text: str, there: tuple[str, ...], meant: str) -> None:
    assert files(text, *there) == meant


@pytest.mark.parametrize(
    ("text", "there", "split", "named"),
    [
        ("", GSM8K, "train", GSM8K[2::2]),  # two folders have one
        ("/main", GSM8K, "", GSM8K[1:3]),  # held-out records: none is preferred
        ("", ULTRAFEEDBACK, "train", ULTRAFEEDBACK[1:]),
        ("", ("a.jsonl", "b.jsonl"), "train", ("a.jsonl", "b.jsonl")),
        ("", ("train.csv", "train.parquet"), "train", ("train.csv", "train.parquet")),
    ],
)
def test_several_possible_meanings_are_listed(
    text: str, there: tuple[str, ...], split: str, named: tuple[str, ...]
) -> None:
    with golden.raises(ConfigError) as caught:
        files(text, *there, split=split)
    assert [file for file in there if file in caught.value.what] == list(named)
    example = caught.value.fix.partition("e.g. ")[2].partition(",")[0]
    assert parse_hub_name(example, where="").files == named[0]


def test_a_long_list_is_cut() -> None:
    with golden.raises(ConfigError):
        files("", *(f"part{i:03}.csv" for i in range(50)))


@pytest.mark.parametrize(
    ("text", "there", "fix"),
    [
        ("/test", GSM8K, "there are main/test-00000-of-00001"),
        ("/*.csv", GSM8K, "there are main/test-00000-of-00001"),
        ("/README.md", GSM8K, "there are"),
        ("/*", ("README.md", "a.csv"), "a.csv"),
        ("", ("README.md", "set.py"), "refs/convert/parquet"),
    ],
)
def test_files_that_are_not_there_or_no_records(
    text: str, there: tuple[str, ...], fix: str
) -> None:
    with golden.raises(ConfigError) as caught:
        files(text, *there)
    assert fix in caught.value.fix


@pytest.mark.parametrize("file", ["../x.jsonl", "/etc/x.jsonl", "a/../../x", "a//b", "./a", "a\0b"])
def test_a_file_whose_name_leads_out_of_the_folder_refuses_the_data_set(file: str) -> None:
    with golden.raises(ConfigError):
        files("/train.jsonl", "train.jsonl", file)


@pytest.mark.parametrize("pattern", ["*/train-*", "main/*.parquet", "*/t??t-[0-9]*", "m*/*train*"])
def test_a_pattern_means_the_same_files_on_the_hub_and_in_the_folder(
    pattern: str, tmp_path: Path
) -> None:
    for file in GSM8K:
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).touch()
    chosen = files_of(HubName("a/b", COMMIT, pattern), listing(*GSM8K))
    assert chosen
    assert [tmp_path / file for file in chosen] == record_paths(tmp_path / pattern)


def answer(status: int, code: str = "", number: int = 0) -> dict[str, Any]:
    return {"failed": "some text", "status": status, "code": code, "errno": number}


@pytest.mark.parametrize(
    ("given", "what", "fix"),
    [
        (answer(401, "GatedRepo"), "lab/set is gated", "ask for access"),
        (answer(403, "GatedRepo"), "lab/set is gated", "HF_TOKEN"),
        (answer(404, "RevisionNotFound"), "lab/set has no revision 'v1'", "without one it is main"),
        (answer(404, "EntryNotFound"), "lists files of hf:lab/set@v1 that it does not", "again"),
        (answer(401, "RepoNotFound"), "no data set lab/set for this account (401)", "HF_TOKEN"),
        (answer(404, "RepoNotFound"), "no data set lab/set for this account (404)", "the name"),
        (answer(403), "the hub refuses lab/set to this account (403)", "HF_TOKEN"),
        (answer(0), "the hub can't be asked for hf:lab/set@v1: some text", "HF_HUB_OFFLINE"),
        (answer(503), "the hub can't be asked for hf:lab/set@v1: some text", "later"),
        (answer(429), "the hub can't be asked for hf:lab/set@v1: some text", "later"),
        (answer(0, "", errno.ENOSPC), "files of hf:lab/set@v1 can't be kept: some text", "space"),
        (answer(418), "the hub's answer for hf:lab/set@v1: some text", "see the page of lab/set"),
    ],
)
def test_refusals_in_words(given: dict[str, Any], what: str, fix: str) -> None:
    error = refusal(given, HubName("lab/set", "v1", ""), where="task.path")
    assert what in error.what
    assert fix in error.fix
    assert error.where == "task.path"


def test_a_hub_that_can_not_answer_differs_from_one_that_refuses() -> None:
    assert [s for s in (0, 401, 403, 404, 418, 429, 500, 503) if is_unreachable(answer(s))] == [
        *(0, 429, 500, 503)
    ]
    assert not is_unreachable({"commit": COMMIT, "sizes": {}})


def test_an_answer_without_a_commit_is_no_hubs() -> None:
    name = HubName("lab/set", "main", "")
    assert listing_of({"commit": COMMIT, "sizes": {"a": 5, "b": None}}, name, where="") == (
        HubListing(COMMIT, {"a": 5, "b": 0})
    )
    for wrong in ({}, {"commit": "../../x", "sizes": {}}, {"commit": COMMIT, "sizes": []}):
        with golden.raises(ConfigError):
            listing_of(wrong, name, where="")
