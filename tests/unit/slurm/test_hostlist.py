"""Slurm's hostlists as Slurm 22.05 itself reads and writes them (`scontrol show hostnames`, `hostlist`).

The tables are compared with the real scontrol by tests/slurm/test_slurm_grammars.py.
"""

from __future__ import annotations

from contextlib import suppress

import golden
import pytest
from hostlist_table import EXPANDED, WRITTEN
from hypothesis import given
from hypothesis import strategies as st

from realsys.api.errors import ConfigError, UnknownName
from realsys.slurm import hostlist
from realsys.slurm.hostlist import MAX_HOSTS, check_nodelist, compress, expand


@pytest.mark.parametrize(("text", "names"), EXPANDED, ids=[repr(text) for text, _ in EXPANDED])
def test_names_come_in_slurms_order(text, names):
    assert expand(text) == tuple(names.split())


@pytest.mark.parametrize(("names", "text"), WRITTEN, ids=[text for _, text in WRITTEN])
def test_a_list_is_written_as_slurm_writes_it(names, text):
    assert compress(names.split()) == text


def test_a_name_given_twice_counts_once():
    assert expand("n1,n[1-2],n2") == ("n1", "n2")
    assert compress(["n1", "n1", "n2"]) == "n[1-2]"


@pytest.mark.parametrize(
    "text",
    [
        "n[1-2",
        "n1]",
        "n[1-2,[3-4]]",
        "n[2-1]",
        "n[1-3:2]",
        "n[a-b]",
        "n[-1]",
        "n[]",
        "n[1,]",
        "n[1 -2]",
        "n[1-99999999999]",
        "n[1-60000][1-60000]",
        "n" + "[1-60000]" * 100,
        f"n[{','.join(['1-65536'] * 200)}]",
        f"n[1-65536][{','.join(['1'] * 2000)}]",
        "n[" + "9" * 5000 + "]",
        "./nodes.txt",
        "switch{s1}",
    ],
)
def test_what_is_no_hostlist_says_why(text):
    with golden.raises(ConfigError) as caught:
        expand(text)
    assert caught.value.fix


@pytest.mark.parametrize(
    ("most", "more"),
    [("n[1-16]", "n[0-16]"), ("n[1-4]x[1-4]", "n[1-5]x[1-4]"), ("n[1-16]", "n[1-16],x"),
     ("n[1-9,1-7]x[1]", "n[1-9,1-8]x[1]")],
)  # fmt: skip
def test_no_more_hosts_than_slurm_allows(most, more, monkeypatch):
    monkeypatch.setattr(hostlist, "MAX_HOSTS", 16)
    assert len(expand(most)) in (16, 9)  # a name given twice counts as two
    with pytest.raises(ConfigError):
        expand(more)


def test_text_behind_a_bracket_is_of_each_name():
    assert expand("gpu[01-02].site.edu") == ("gpu01.site.edu", "gpu02.site.edu")


NAMES = st.lists(st.from_regex(r"[a-z]{1,3}[0-9]{0,3}", fullmatch=True), max_size=30)


@given(NAMES)
def test_what_is_written_is_read_back(names):
    assert expand(compress(names)) == tuple(dict.fromkeys(names))


@given(st.text(alphabet="n0189[]-,: {}/x\n", max_size=20))
def test_any_text_is_names_or_a_config_error(text):
    with suppress(ConfigError):  # which can't be made without a fix
        assert len(expand(text)) <= MAX_HOSTS


def test_an_unknown_node_is_told_with_the_nearest():
    known = ("gpu01", "gpu02", "cpu01")
    (problem,) = check_nodelist("gpu01,gpo02", known=known, where="--exclude")
    assert isinstance(problem, UnknownName)
    golden.check(problem)
    assert "'gpu02'" in problem.fix
    (far,) = check_nodelist("zzzzzz", known=known, where="--exclude")
    golden.check(far)


def test_bad_grammar_and_emptiness_are_told_and_names_are_not_checked_where_none_are_known():
    (problem,) = check_nodelist("n[2-1]", known=None, where="--nodelist")
    assert problem.where == "--nodelist"
    (empty,) = check_nodelist(" , ", known=None, where="--nodelist")
    golden.check(empty)
    assert not list(check_nodelist("anything", known=None, where="--nodelist"))
