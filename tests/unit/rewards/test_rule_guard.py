"""Rules of a user in the guard: what an answer does is seen by no other, and reaches nothing undeclared."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import golden
import pytest

from realsys.api import registry
from realsys.api.basics import plugin_table
from realsys.api.basics.reward import Completion, Score
from realsys.api.errors import ClusterError, ConfigError, RewardError, RewardServiceAway
from realsys.rewards import guarded_rules
from realsys.rewards.guard import rule_filter, rule_walls
from realsys.rewards.guard.guarded import Reply
from realsys.rewards.guarded_rules import _received, results_of
from realsys.rewards.raised_scores import AnswerFailure
from realsys.rewards.rule import RewardRule
from realsys.rewards.rule_terms import rule_term
from realsys.rewards.trial_scoring import problems_of_rule

RULES = str(Path(__file__).with_name("guarded_rules.py"))
needs_landlock = pytest.mark.skipif("landlock" in rule_walls.lacking(), reason="no Landlock here")
needs_seccomp = pytest.mark.skipif("seccomp" in rule_walls.lacking(), reason="no seccomp here")


@pytest.fixture(scope="module", autouse=True)
def rules() -> Iterator[None]:
    """The file's rules, and their guards, for this module."""
    patch = pytest.MonkeyPatch()
    patch.setenv("TRIAL_KEY", "secret")
    patch.setattr(plugin_table, "registered", {kind: {} for kind in registry.BUILTIN})
    patch.setattr(registry, "_imported", [])
    sys.modules.pop("realsys_import_guarded_rules", None)
    registry.load_plugins([RULES])
    yield
    guarded_rules.close_guards()
    patch.undo()


def results(name: str, *texts: str, args: Any = None, **more: Any) -> list[Score | RewardError]:
    answers = [Completion(response=text, **more) for text in texts]
    return RewardRule(name, {name: args or {}}).score_all(answers)


def values(name: str, *texts: str, **more: Any) -> list[float]:
    found = results(name, *texts, **more)
    errors = [result for result in found if isinstance(result, RewardError)]
    assert errors == []
    return [result.value for result in found if isinstance(result, Score)]


def failure(name: str, text: str) -> str:
    (result,) = results(name, text)
    return result.what if isinstance(result, RewardError) else str(result)


POISONS = ("float", "module", "file", "thread", "environment")


@pytest.mark.parametrize("poison", POISONS)
def test_nothing_of_an_answer_is_seen_by_the_next(poison: str) -> None:
    texts = [poison, "clean"] * 4
    assert values("poisons", *texts) == [1.0, 5.0] * 4


@pytest.mark.thorough
def test_scores_come_in_order_and_are_the_same_wherever_they_are_made() -> None:
    texts = ["a" * (i % 17) for i in range(60)]
    assert values("length", *texts) == [float(len(text)) for text in texts]
    (first, other, again) = values("noise", "x", "y", "x")
    assert first == again != other


def test_the_process_has_no_key_and_nothing_open_of_its_starter() -> None:
    (found,) = results("sees", "")
    assert isinstance(found, Score)
    assert (found.parts["has_key"], found.parts["sockets"], found.parts["files"]) == (0, 0, 0)
    assert found.parts["pipes"] == 1, "the one for its reply"
    host = Path("/proc", str(int(found.parts["host"])))
    assert b"TRIAL_KEY" not in (host / "environ").read_bytes()
    assert b"secret" not in (host / "cmdline").read_bytes()
    opened = [os.readlink(fd) for fd in (host / "fd").iterdir()]
    assert sum(name.startswith("pipe:") for name in opened) <= 3
    assert not any(name.startswith("socket:") for name in opened)
    assert found.parts["variables"] < 24


@pytest.mark.parametrize(
    "text",
    [
        "garbage",
        "",
        "\x02\x00\x00\x00" + "\x01\x00\x00\x00\x00\x00\x00\x00" + "R" + "{}",
        "\x0c\x00\x00\x00" + "\xff\x00\x00\x00\x00\x00\x00\x00" + 'R{"result":1}'[:13],
        "\xff\xff\xff\xff" * 8,
    ],
    ids=["garbage", "nothing", "no result", "of another call", "huge"],
)
def test_what_is_no_reply_to_its_call_is_no_score(text: str) -> None:
    (first, forged, last) = results("forges", "", text, "")
    assert not any(isinstance(found, Score) and found.value for found in (first, forged, last))
    assert values("length", "abc") == [3.0]


GIVEN = {"value": 1, "correct": 1, "parts": {"a": 0.5}}
FAILED = {"error": "AnswerFailure", "what": "w" * 600, "where": "x", "fix": "y"}


@pytest.mark.parametrize(
    "reply",
    [
        None,
        "ab",
        {"0": GIVEN, "1": GIVEN},
        [],
        [GIVEN],
        [GIVEN] * 3,
        [None, 3],
        [{}, {"value": "1"}],
    ],
    ids=repr,
)
def test_a_reply_without_a_score_for_each_answer_is_none(reply: Any) -> None:
    for found in results_of(Reply(reply), rule_term("code_tests", 1.0, {}), 2):
        assert isinstance(found, RewardError)
    assert len(results_of(Reply(reply), rule_term("code_tests", 1.0, {}), 2)) == 2


def test_a_rule_in_a_guard_sees_the_answer_that_was_sent() -> None:
    sent = {"response": "r", "token_ids": [1, 2], "record": {"a": 1}, "prompt": "p"}
    record = {"prompt": "p", "a": 1}
    assert _received(sent) == Completion(response="r", token_ids=(1, 2), record=record)
    assert _received({"answer": "5"}) == Completion(response="", answer="5")


def test_a_reply_is_scores_and_errors_of_known_kinds() -> None:
    away = {**FAILED, "error": "RewardServiceAway"}
    replies = [GIVEN, FAILED, away, {**FAILED, "error": "SystemExit"}, {**GIVEN, "parts": 3}]
    for name, of_away in (("math_verify", RewardError), ("code_tests", RewardServiceAway)):
        score, *errors = results_of(Reply(replies), rule_term(name, 1.0, {}), 5)
        assert score == Score(value=1.0, correct=True, parts={"a": 0.5})
        kinds = [AnswerFailure, of_away, RewardError, AnswerFailure]
        assert [type(error) for error in errors] == kinds
        assert (errors[0].what, errors[0].where, errors[0].fix) == ("w" * 500, "x", "y")
        assert [error.exceeded_limit for error in (errors[0], errors[3])] == [False, True]


def undeclared(name: str, text: str) -> list[str]:
    answer = Completion(response=text)
    return [p.fix for p in problems_of_rule(name, {}, answer, where="x", may_raise=True)]


@pytest.mark.thorough
@needs_seccomp
def test_network_is_for_those_that_declare_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert values("connects", f"connect {port}") == [1.0]
        assert values("asks_network", str(port)) == [1.0]
        assert "network" in failure("uses", f"connect {port}")
        assert "network" in failure("asks", str(port))
        (line,) = undeclared("asks", str(port))
    assert line.endswith('register_reward("asks", asks, network=True)')
    assert values("uses", "bare socket") == [1.0]


@pytest.mark.thorough
@needs_seccomp
def test_programs_are_for_those_that_declare_them() -> None:
    assert values("runs", "run") == [1.0]
    assert "programs" in failure("uses", "run")
    (line,) = undeclared("uses", "run")
    assert line.endswith('"uses", uses, programs=True, cpu_s=0.3, memory_mib=64)')
    if rule_filter.supported_here() and os.uname().machine == "x86_64":
        assert values("uses", "bare fork", "bare execve") == [1.0, 1.0]
    assert "Operation not permitted" in failure("uses", f"kill {os.getppid()}")


@pytest.mark.thorough
@needs_landlock
def test_files_are_read_if_declared_and_written_in_the_own_folder_only(tmp_path: Path) -> None:
    (tmp_path / "words").write_text("a")
    assert values("reads", "read /etc/hostname") == [1.0]
    assert "Permission denied" in failure("uses", f"read {tmp_path}/words")
    (line,) = undeclared("uses", f"read {tmp_path}/words")
    assert f'reads=["{tmp_path}/words"]' in line
    assert "Permission denied" in failure("uses", f"read /proc/{os.getpid()}/environ")
    for name in ("uses", "reads", "runs", "connects"):
        assert "Permission denied" in failure(name, f"write {tmp_path}/{name}")
    assert "Permission denied" in failure("uses", f"write {Path(__file__).with_name('mark')}")
    assert [path.name for path in tmp_path.iterdir()] == ["words"]
    assert values("uses", "write here") == [1.0]


def test_a_variable_is_given_if_declared() -> None:
    assert values("named", "variable TRIAL_KEY") == [1.0]
    assert "KeyError" in failure("uses", "variable TRIAL_KEY")
    (line,) = undeclared("uses", "variable TRIAL_KEY")
    assert 'env=["TRIAL_KEY"]' in line


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("uses", "spin", "computed for more than 0.3 s"),
        ("uses", "tower", "computed for more than 0.3 s"),
        ("uses_quickly", "sleep", "took more than 1 s"),
        ("uses", "hoard", "memory"),
    ],
)
def test_an_answer_has_limits_and_the_others_their_scores(name: str, text: str, told: str) -> None:
    found = results(name, "", text, "")
    assert [r.value for r in (found[0], found[2]) if isinstance(r, Score)] == [1.0, 1.0]
    assert getattr(found[1], "value", 0.0) == 0.0
    if isinstance(found[1], RewardError):
        assert told.split()[-1] in found[1].what or "MemoryError" in found[1].what


def test_a_program_that_is_left_behind_ends_with_its_answer() -> None:
    seconds = f"3600.{os.getpid()}"  # to be told from those of others
    assert values("runs", f"leave {seconds}", "") == [1.0, 1.0]
    while runs(f"sleep\0{seconds}\0".encode()):  # the test's own time limit ends this
        time.sleep(0.02)


def runs(command: bytes) -> bool:
    """Whether some process of this machine has this command line."""
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            if file.read_bytes() == command:
                return True
    return False


WORKED = """
from realsys.api.registry import register_reward
from realsys.rewards.math_verify import _library, math_verify_reward

def worked(response, answer):
    score = 0.5 + math_verify_reward(response=response, answer=answer)
    assert _library._host is None
    return score

register_reward("worked", worked)
"""


@pytest.mark.thorough
def test_a_rule_that_calls_a_built_in_one_needs_no_guard_in_the_guard(tmp_path: Path) -> None:
    (tmp_path / "worked_rule.py").write_text(WORKED)
    registry.load_plugins([str(tmp_path / "worked_rule.py")])
    texts = ["#### 4", r"\boxed{\frac{1}{2}}", r"\boxed{x+1}", "#### 5"]
    assert values("worked", texts[0], texts[3], answer="4") == [1.5, 0.5]
    assert values("worked", texts[1], answer="0.5") == [1.5]
    assert values("worked", texts[2], answer="1+x") == [1.5]


@pytest.mark.thorough
def test_a_batched_rule_has_one_fork_a_call() -> None:
    assert values("ranks", "c", "a", "b") == [2.0, 0.0, 1.0]
    assert values("ranks", "b", "a") == [1.0, 0.0], "nothing is left of the first call"


def test_a_rule_is_prepared_once_with_its_arguments() -> None:
    more = {"record": {"number": 3}, "token_ids": (1, 2)}
    found = results("prepared", "a", "b", args={"base": 2.0}, **more)
    assert found == [Score(value=13.0, correct=True, parts={"record": 3.0})] * 2
    (term,) = RewardRule("prepared", {"prepared": {"base": 2.0}}).terms
    assert term.guard is not None
    assert term.guard.permissions.cpu_s == 7.0


def test_asynchronous_rules_share_one_process() -> None:
    texts = ["0", *map(str, range(1, 100)), "0"]
    found = values("service", *texts)
    assert found[0] == found[-1] != os.getpid()
    assert set(found[1:-1]) == {1.0}


def test_what_ends_a_run_does_so_from_the_process_of_an_asynchronous_rule() -> None:
    with golden.raises(ClusterError):
        results("broken", "")


def test_a_rule_that_no_other_process_can_find_is_refused() -> None:
    registry.register_reward("local", lambda response: 1.0)
    with pytest.raises(ConfigError) as caught:
        RewardRule("local")
    assert "--import" in caught.value.fix
    registry.register_reward("here", lambda response: float(os.getpid()), trusted=True)
    assert values("here", "") == [float(os.getpid())]


def test_what_a_node_lacks_is_named_and_the_rest_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rule_walls.landlock_rules, "abi_version", lambda: 0)
    monkeypatch.setattr(rule_filter, "supported_here", lambda: False)
    assert set(rule_walls.lacking()) == {"landlock", "seccomp"}
    walls = rule_walls.RuleWalls(registry.RulePermissions(), own_file=RULES, used_bytes=1 << 30)
    assert walls.ruleset("/tmp") == -1
