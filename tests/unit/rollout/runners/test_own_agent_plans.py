"""Plans of agents that play tasks of one kind: what is refused, and what workers get."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import golden
import pytest
from harbor_tasks import write_task

from experiments.parts.agent_files import agent_file_problems, located_agent_args
from experiments.task import FileTask
from experiments.tasks.harbor import HarborTask
from experiments.tasks.verifiers import VerifiersTask
from realsys.api import registry
from realsys.api.errors import ConfigError
from realsys.config.overrides import with_settings
from realsys.config.plugin_arguments import argument_problems
from realsys.rollout.runners.agent_arguments import CommandArguments, PythonArguments


def whats(task: Any) -> str:
    found = task.problems(batch_size=1, tokenizer_dir=None)
    return " | ".join(problem.what for problem in found)


@pytest.fixture
def records(tmp_path: Path) -> str:
    path = tmp_path / "train.jsonl"
    path.write_text(json.dumps({"prompt": "?", "number": 0, "verifiers": {"prompt": []}}) + "\n")
    return str(path)


def test_an_environments_records_are_a_task_without_a_rule_of_ones_own(records: str) -> None:
    task = VerifiersTask(path=records, agent_args={"environment": "e"})
    assert whats(task) == ""
    assert (task.agent, task.rule, task.num_held_out) == ("verifiers", "verifiers", 0)
    assert not list(task.reward_problems())


def test_held_out_records_are_played_also_where_a_rule_is_named(records: str) -> None:
    held_out: dict[str, Any] = {"path": records, "eval_path": records, "eval_size": 1}
    task = VerifiersTask(**held_out)
    assert whats(task) == ""
    assert (task.num_held_out, task.is_played) == (1, True)
    assert VerifiersTask(**held_out, reward="math_verify").is_played


@pytest.mark.parametrize("agent", ["harbor", "verifiers"])
def test_such_an_agent_plays_its_own_kind_only(records: str, agent: str) -> None:
    task = FileTask(path=records, reward="math_verify", agent=agent)
    golden.check(whats(task))


def test_the_harbor_agent_gets_the_arguments_of_the_rule(tmp_path: Path) -> None:
    path = str(write_task(tmp_path / "a"))
    task = HarborTask(
        path=path, eval_size=0, agent="harbor", reward_args={"harbor": {"agent_s": 7.0}}
    )
    assert whats(task) == ""
    args = task.episode_args
    assert args["rule"] == {"tasks": [path], "agent_s": 7.0}
    assert not list(argument_problems("agent", "harbor", args, where="task.agent_args"))
    alone = HarborTask(path=path, eval_size=0, reward_args={"harbor": {"agent_s": 7.0}})
    assert alone.episode_args == {}


def test_the_harbor_agent_is_rewarded_by_the_tests_alone(tmp_path: Path) -> None:
    task = HarborTask(
        path=str(write_task(tmp_path / "a")), eval_size=0, agent="harbor", reward="2*harbor"
    )
    golden.check(whats(task))


@pytest.mark.parametrize(
    ("args", "rule", "where"),
    [
        ({}, {}, ""),
        ({}, {"allow_missing": ["net"]}, "allow_missing"),
        ({}, {"images": ["a=a.sif"]}, "images"),
        ({"timeout_s": 60.0}, {}, "timeout_s"),
        ({"timeout_s": 61.0}, {"allow_missing": ["ipc"]}, ""),
        ({}, {"verifier_s": 1800.0}, "timeout_s"),
    ],
)
def test_the_box_of_an_installed_agent_is_checked_by_a_plan(
    args: dict[str, Any], rule: dict[str, Any], where: str, tmp_path: Path
) -> None:
    task = HarborTask(
        path=str(write_task(tmp_path / "a")),
        eval_size=0,
        agent="harbor_command",
        agent_args={"command": "x", **args},
        reward_args={"harbor": rule},
    )
    found = [p.where or "" for p in task.problems(batch_size=1, tokenizer_dir=None)]
    assert [where in one for one in found] == [True] * bool(where)


@pytest.mark.parametrize(
    ("name", "args", "what"),
    [
        ("verifiers", {}, "has no environment"),
        ("verifiers", {"environment": "e", "roles": ["a"]}, "one conversation"),
        ("verifiers", {"environment": "e", "processes": 0}, "processes is 0"),
        ("verifiers", {"environment": "e", "sampling_args": {}}, "takes no 'sampling_args'"),
        ("harbor", {"max_turns": 0}, "max_turns is 0"),
        ("harbor", {"commands": "shouts"}, "commands"),
        ("harbor", {"roles": ["a"]}, "takes no 'roles'"),
    ],
)
def test_wrong_arguments_are_found_by_a_plan(name: str, args: dict[str, Any], what: str) -> None:
    (problem,) = argument_problems("agent", name, args, where="task.agent_args")
    assert isinstance(problem, ConfigError)
    assert what in problem.what


@pytest.mark.parametrize(
    ("name", "args", "whats"),
    [
        (  # types hide no ranges, and neither hides what the class checks itself
            "python",
            {"function": "solve", "timeout_s": "long", "processes": 0, "max_calls": 0},
            {
                "timeout_s is 'long'",
                "processes is 0",
                "max_calls is 0",
                "function is 'solve'",
            },
        ),
        ("command", {"timeout_s": 0.0}, {"timeout_s is 0.0", "agent command has no command"}),
        # No second error for want of a wrong argument, or of one that is misspelt
        ("python", {"function": 3, "processes": 0}, {"function is 3", "processes is 0"}),
        (
            "command",
            {"comand": "x", "max_calls": 0, "roles": ["a b"]},
            {"agent 'command' takes no 'comand'", "max_calls is 0", "roles are ['a b']"},
        ),
        (
            "command",
            {"command": "a", "env": {"A": 3.5, "B": True, "C": None, "D": 7, "E": "f"}},
            {
                "the value of variable A is 3.5, which is no text",
                "the value of variable B is True, which is no text",
                "the value of variable C is None, which is no text",
            },
        ),
    ],
)
def test_all_wrong_arguments_are_told_at_once(
    name: str, args: dict[str, Any], whats: set[str]
) -> None:
    found = [p.what for p in argument_problems("agent", name, args, where="task.agent_args")]
    assert set(found) == whats
    assert len(found) == len(whats)


@pytest.mark.parametrize(
    ("value", "fix"), [(3.5, "A: '3.5'"), (True, "A: 'true'"), (None, "A: ''"), ([1], "A: '[1]'")]
)
def test_a_variable_that_is_no_text_is_named_with_what_to_write(value: Any, fix: str) -> None:
    args = {"function": "a:b", "env": {"A": value}}
    (problem,) = argument_problems("agent", "python", args, where="task.agent_args")
    assert problem.fix == f"write {fix}"
    assert "task.agent_args.env.A" in problem.where


def test_whole_numbers_are_taken_as_variables(records: str) -> None:
    words = ["task.agent_args.env={A: 3, B: 007, C: 'x'}", "task.agent_args.env.D=-1"]
    given = with_settings(FileTask(path=records), words=[w.removeprefix("task.") for w in words])
    made = PythonArguments(function="a:b", **given.agent_args)
    assert made.env == {"A": "3", "B": "007", "C": "x", "D": "-1"}
    assert CommandArguments(command="a", env={"A": 3}).env == {"A": "3"}


def test_both_are_made_by_their_names() -> None:
    assert registry.make_agent("verifiers", environment="e", environment_args={"a": 1}).arguments() == [
        "play", "e", '{"a": 1}',
    ]  # fmt: skip
    assert registry.make_agent("harbor", max_turns=3).max_turns == 3


def test_an_interpreter_is_found_where_the_command_was_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, records: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "real").write_text("")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/python").symlink_to("../real")

    def task(python: str) -> VerifiersTask:
        return VerifiersTask(path=records, agent_args={"environment": "e", "python": python})

    assert whats(task("bin/python")) == ""
    assert task("bin/python").episode_args["python"] == str(tmp_path / "bin/python")
    assert whats(task("bin/other")) == "no interpreter bin/other"
    assert whats(task("/nodes/python")) == ""  # that nodes may have
    assert task("python3").episode_args["python"] == "python3"


@pytest.mark.parametrize(
    ("code", "name", "problem"),
    [
        ("def solve(): ...", "solve", ""),
        ("async def solve(): ...", "solve", ""),
        ("from agents import solve", "solve", ""),
        ("from agents import *", "solve", ""),
        ("if True:\n    def solve(): ...", "solve", ""),
        ("solve = print", "solve", ""),
        ("def solve(): ...", "slove", "has no function 'slove'"),
        ("def solve(:", "solve", "can't be read"),
        ("def solve(client, task, *, model, limit=3): ...", "solve", ""),
        ("def solve(client, *others, **more): ...", "solve", ""),
        ("def solve(response, answer, /, n=1): ...", "solve", "is given: response, answer"),
        ("@wrapped\ndef solve(response): ...", "solve", ""),
    ],
)
def test_a_plan_knows_whether_a_file_has_the_function(tmp_path, code, name, problem):
    file = tmp_path / "my_agent.py"
    file.write_text(code)
    found = list(agent_file_problems("python", {"function": f"{file}:{name}"}))
    assert [problem in one.what for one in found] == [True] * bool(problem)


def test_a_chat_template_may_be_a_file(tmp_path):
    file = tmp_path / "chat.jinja"
    file.write_text("{{ messages }}")
    made = located_agent_args("chat", {"template": str(file)})
    assert made["template"] == "{{ messages }}"
    with golden.raises(ConfigError):
        PythonArguments(function="a:b", template="no.jinja")


@pytest.mark.parametrize("command", [True, 3, [1], None])
def test_a_command_that_is_no_text_is_left_to_the_check_of_arguments(command):
    assert list(agent_file_problems("command", {"command": command})) == []
    assert located_agent_args("command", {"command": command})["command"] == command


def test_an_interpreter_of_a_virtual_environment_stays_a_link(tmp_path, monkeypatch):
    """Resolved, it would be the interpreter without the environment's packages."""
    (tmp_path / "python").symlink_to(sys.executable)
    (tmp_path / "agent.py").write_text("")
    monkeypatch.chdir(tmp_path)
    here = Path.cwd()
    for command in ("./python agent.py x", [f"{here}/python", "agent.py", "x"]):
        made = located_agent_args("command", {"command": command})
        assert made["command"] == [f"{here}/python", f"{here}/agent.py", "x"]
