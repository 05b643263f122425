"""Slurm's hostlists as Slurm 22.05 itself reads and writes them (`scontrol show hostnames`, `hostlist`).

The tables are compared with the real scontrol by tests/slurm/test_slurm_grammars.py.
"""

from __future__ import annotations

from contextlib import suppress

import pytest
from hostlist_table import EXPANDED, WRITTEN
from hypothesis import given
from hypothesis import strategies as st

from realsys.api.errors import ConfigError, UnknownName
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
    ("text", "why"),
    [
        ("n[1-2", "its brackets do not match"),
        ("n1]", "its brackets do not match"),
        ("n[1-2,[3-4]]", "its brackets do not match"),
        ("n[2-1]", "the range 2-1 runs backwards"),
        ("n[1-3:2]", "'1-3:2' is no range of numbers"),
        ("n[a-b]", "'a-b' is no range of numbers"),
        ("n[-1]", "'-1' is no range of numbers"),
        ("n[]", "'' is no range of numbers"),
        ("n[1,]", "'' is no range of numbers"),
        ("n[1 -2]", "'1 -2' is no range of numbers"),
        ("n[1-99999999999]", "the range 1-99999999999 has more than 65536 hosts"),
        ("n[1-60000][1-60000]", "it names more than 65536 hosts"),
        ("n" + "[1-60000]" * 100, "it names more than 65536 hosts"),
        (f"n[{','.join(['1-65536'] * 200)}]", "it names more than 65536 hosts"),
        (f"n[1-65536][{','.join(['1'] * 2000)}]", "it names more than 65536 hosts"),
        ("n[" + "9" * 5000 + "]", "is no range of numbers"),
        ("./nodes.txt", "Slurm takes a value with '/' for the name of a file"),
        ("switch{s1}", "only Slurm's controller can expand"),
    ],
)
def test_what_is_no_hostlist_says_why(text, why):
    with pytest.raises(ConfigError) as caught:
        expand(text)
    assert why in caught.value.what
    assert caught.value.fix


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
    assert problem.what == "no node 'gpo02' at this site"
    assert "'gpu02'" in problem.fix
    (far,) = check_nodelist("zzzzzz", known=known, where="--exclude")
    assert far.fix == "use some of cpu01,gpu[01-02]"


def test_bad_grammar_and_emptiness_are_told_and_names_are_not_checked_where_none_are_known():
    (problem,) = check_nodelist("n[2-1]", known=None, where="--nodelist")
    assert problem.where == "--nodelist"
    (empty,) = check_nodelist(" , ", known=None, where="--nodelist")
    assert empty.what == "' , ' names no node"
    assert not list(check_nodelist("anything", known=None, where="--nodelist"))
