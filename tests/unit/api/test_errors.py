"""Errors: each says what, where and what to do, and survives a process border whole."""

import importlib
import pickle
import pkgutil
import re
from pathlib import Path

import golden
import pytest

import realsys.name_resolve
import realsys.transport
from realsys.api import errors
from realsys.api.errors import (
    ConfigError,
    ConfigErrors,
    DataError,
    InternalError,
    RealsysError,
    UnknownName,
    did_you_mean,
)

for package in (realsys.name_resolve, realsys.transport):  # they have error classes of their own
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{package.__name__}.{module.name}")


def tree(kind=RealsysError):
    return [kind, *(found for sub in kind.__subclasses__() for found in tree(sub))]


CLASSES = sorted(
    {kind for kind in tree() if not issubclass(kind, ConfigErrors)}, key=lambda k: k.__name__
)
by_name = pytest.mark.parametrize("kind", CLASSES, ids=lambda k: k.__name__)


@by_name
def test_every_error_says_what_where_and_what_to_do(kind):
    error = kind("port 7 is taken", where="node1", fix="choose another")
    assert str(error) == "port 7 is taken\n  where: node1\n  fix:   choose another"
    assert (error.what, error.where, error.fix) == ("port 7 is taken", "node1", "choose another")


@by_name
def test_every_error_survives_pickling(kind):
    error = kind("ü 1", where="here", fix="there")
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        back = pickle.loads(pickle.dumps(error, protocol))
        assert type(back) is kind
        assert (str(back), back.what, back.where, back.fix) == (str(error), "ü 1", "here", "there")


def test_a_text_that_utf8_has_not_can_be_sent_and_written():
    error = RealsysError("no file a\ud800", where="ü\udfff", fix="rename it")
    assert error.what == "no file a\\ud800"
    assert str(error).encode() == "no file a\\ud800\n  where: ü\\udfff\n  fix:   rename it".encode()


@by_name
def test_every_error_has_a_sentence_that_says_when(kind):
    assert kind.__doc__
    assert kind.__doc__ != getattr(kind.__bases__[0], "__doc__", None)


def test_a_note_survives_pickling():
    """A remote traceback travels as a note (transport/messages.py)."""
    error = DataError("w", where="x", fix="y")
    error.add_note("traceback on model_worker/0: …")
    assert pickle.loads(pickle.dumps(error)).__notes__ == error.__notes__


def test_the_tree_in_the_header_is_the_tree():
    listed = errors.__doc__
    for kind in tree():
        if kind.__module__ == errors.__name__:
            assert kind.__name__ in listed


def test_several_problems_are_numbered_and_survive_pickling():
    problems = (
        ConfigError("a is 1", where="f.a", fix="use 2"),
        UnknownName("no b", where="f.b", fix="use c"),
    )
    error = ConfigErrors(problems)
    golden.check(error)
    back = pickle.loads(pickle.dumps(error))
    assert str(back) == str(error)
    assert [type(p) for p in back.problems] == [ConfigError, UnknownName]
    golden.check(back)
    assert back.where == "f.a; f.b"


def test_several_problems_are_caught_as_one_kind():
    with pytest.raises(ConfigError):
        raise ConfigErrors([ConfigError("a", where="b", fix="c")])


def test_our_own_mistake_asks_for_a_report():
    golden.check(InternalError("broken", where="here"))


def test_exit_codes_tell_who_must_act():
    codes = {kind.__name__: kind.exit_code for kind in CLASSES}
    assert codes["RealsysError"] == 1
    assert codes["NoSuchTrial"] == 3
    assert codes["ConfigError"] == codes["UnknownName"] == codes["DataError"] == 4
    assert codes["ClusterError"] == 5
    assert codes["StoreError"] == codes["KeyNotFound"] == 6
    assert codes["WaitTimeout"] == 7


@pytest.mark.parametrize(
    ("name", "known", "said"),
    [
        ("actr", ["actor", "critic"], "did you mean 'actor'?"),
        ("beta", ["beta1", "beta2", "eps"], "did you mean 'beta2' or 'beta1'?"),
        ("zzz", ["b", "a", "b"], "use one of a, b"),
        ("zzz", [], "none is registered"),
    ],
)
def test_the_nearest_names_or_all_or_none(name, known, said):
    found = did_you_mean(name, known)
    if "beta" in name:  # equally near: in any order
        assert set(found.split("'")[1::2]) == {"beta1", "beta2"}
    else:
        assert found == said


def test_a_command_that_a_fix_names_can_be_typed():
    """`realsys logs` takes a trial first: `realsys logs generation_server` finds none."""
    root = Path(errors.__file__).parents[2]
    sources = [p for room in ("launcher", "realsys") for p in (root / room).rglob("*.py")]
    named = [
        (str(path.relative_to(root)), found[1])
        for path in sources
        for found in re.finditer(r'realsys logs ([^\s"]+)', path.read_text())
    ]
    assert len(named) >= 8
    trial = re.compile(
        r"TRIAL$|\{(view|records|story|trial)\.trial\};?$|\{name\}$|\{'/'\.join\(|\{trial\}"
    )
    assert [one for one in named if not trial.match(one[1])] == []
