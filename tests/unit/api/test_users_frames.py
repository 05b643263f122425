"""The user's own line in an exception comes first in what is told of it, however it was wrapped."""

from __future__ import annotations

import importlib.util
import sysconfig
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from realsys.api.errors import RolloutError
from realsys.api.users_code.users_frames import is_users_file, shown_error, users_error, users_place
from realsys.runtime.failures import failure_of, what_of
from realsys.transport.messages import error_to_info, info_to_error

CODE = """
import asyncio, json

def step(text):
    return json.loads(text)

def wrapped(text):
    try:
        return step(text)
    except ValueError as error:
        raise KeyError("no answer") from error

async def together(text):
    async with asyncio.TaskGroup() as group:
        group.create_task(later(text))

async def later(text):
    step(text)
"""


@pytest.fixture
def mine(tmp_path: Path) -> ModuleType:
    path = tmp_path / "my_env.py"
    path.write_text(CODE)
    spec = importlib.util.spec_from_file_location("my_env", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def raised(call: Callable[[], Any]) -> BaseException:
    try:
        call()
    except BaseException as error:
        error.__traceback__ = error.__traceback__.tb_next  # type: ignore[union-attr]  # this file's own
        return error
    raise AssertionError("it raised nothing")


def line_of(text: str) -> int:
    return CODE.splitlines().index(text) + 1


def test_the_innermost_frame_of_a_users_file_is_named_not_the_librarys(mine: ModuleType) -> None:
    error = raised(lambda: mine.step("{"))
    place = f"my_env.py:{line_of('    return json.loads(text)')} in step"
    assert users_place(error) == place
    assert shown_error(error).startswith(f"{place}: JSONDecodeError: ")


def test_of_a_group_of_errors_the_first_is_named(mine: ModuleType) -> None:
    import asyncio

    error = raised(lambda: asyncio.run(mine.together("{")))
    assert isinstance(error, ExceptionGroup)
    assert shown_error(error).startswith("my_env.py:")
    assert " in step: JSONDecodeError: " in shown_error(error)


def test_the_place_of_what_was_raised_last_wins_over_that_of_its_cause(mine: ModuleType) -> None:
    error = raised(lambda: mine.wrapped("{"))
    assert shown_error(error).startswith("my_env.py:")
    assert shown_error(error).endswith("in wrapped: KeyError: 'no answer'")


def test_an_error_of_ours_begins_with_the_users_line_that_led_to_it(mine: ModuleType) -> None:
    cause = raised(lambda: mine.step("{"))
    error = RolloutError("no episode", where="x", fix="y")
    error.__cause__ = cause
    assert users_error(error) is cause
    assert what_of(error) == f"{shown_error(cause)}: no episode"
    assert failure_of("rollout_worker/0", error).why == what_of(error)
    said = RolloutError(f"{shown_error(cause)} (raised by x)", where="x", fix="y")
    said.__cause__ = cause
    assert what_of(said) == said.what  # not twice


def test_a_workers_error_brings_the_users_line_along(mine: ModuleType) -> None:
    error = raised(lambda: mine.step("{"))
    there = info_to_error(error_to_info(error), "model_worker/0")
    assert there.what.startswith("my_env.py:")
    error = RolloutError("no episode", where="x", fix="y")
    error.__cause__ = raised(lambda: mine.step("{"))
    assert info_to_error(error_to_info(error), "model_worker/0").what.startswith("my_env.py:")


def test_a_file_that_python_can_not_read_is_named_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "bad.py"
    path.write_text("x = 1\ndef f(:\n")
    error = raised(lambda: compile(path.read_text(), str(path), "exec"))
    assert shown_error(error).startswith("bad.py:2: SyntaxError: ")
    of_a_text = users_place(raised(lambda: compile("def f(:", "<string>", "exec")))
    assert of_a_text.startswith("test_users_frames.py:")  # what wanted it compiled


def test_installed_packages_python_and_realsys_are_not_the_users() -> None:
    import realsys.api

    stdlib = sysconfig.get_path("stdlib")
    assert is_users_file("/home/me/agent.py")
    assert not is_users_file(f"{stdlib}/ssl.py")
    assert not is_users_file("/venv/lib/python3.11/site-packages/client/http.py")
    assert not is_users_file("/usr/lib/python3/dist-packages/client.py")
    assert not is_users_file(str(realsys.api.__file__))
    assert not is_users_file("<frozen importlib._bootstrap>")
    installed = "/venv/lib/python3.11/site-packages/my_env/"
    assert is_users_file(f"{installed}env.py", own=(installed,))
