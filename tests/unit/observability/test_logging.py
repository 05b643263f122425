"""Log lines: their shape, the stamp, warnings, quiet libraries."""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Iterator

import pytest

from realsys.observability.worker_logs import QUIET, WorkerContext, configure_logging


@pytest.fixture(autouse=True)
def _logging_as_before() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    levels = {name: logging.getLogger(name).level for name in QUIET}
    yield
    logging.captureWarnings(False)
    root.handlers[:] = handlers
    root.setLevel(level)
    for name, old in levels.items():
        logging.getLogger(name).setLevel(old)


def test_line_has_time_level_worker_step_logger_and_event(
    capsys: pytest.CaptureFixture[str],
) -> None:
    context = configure_logging("model_worker/0")
    context.step = 3
    logging.getLogger("realsys.x").info("call finished name=%s", "actor_train")
    line = capsys.readouterr().err
    assert re.fullmatch(
        r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3} INFO model_worker/0 step=3 realsys\.x  "
        r"call finished name=actor_train\n",
        line,
    )


def test_time_is_the_records_own(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("w")
    record = logging.makeLogRecord({"name": "n", "msg": "m", "levelname": "INFO", "levelno": 20})
    record.created, record.msecs = 86_400 * 200 + 0.007, 7.0
    logging.getLogger().handle(record)
    assert re.match(r"1970-07-\d\dT\d\d:00:00\.007 ", capsys.readouterr().err)


def test_child_loggers_are_stamped_too(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("master_worker/0")
    logging.getLogger("a.b.c").warning("deep")
    assert "WARNING master_worker/0 step=0 a.b.c  deep" in capsys.readouterr().err


def test_second_call_renames_and_does_not_double(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("first")
    configure_logging("second")
    logging.getLogger("x").info("once")
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert " second step=0 " in lines[0]


def test_debug_is_off_unless_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("w")
    logging.getLogger("x").debug("hidden")
    configure_logging("w", level=logging.DEBUG)
    logging.getLogger("x").debug("shown")
    err = capsys.readouterr().err
    assert "hidden" not in err
    assert "shown" in err


def test_python_warnings_become_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        configure_logging("w")
        warnings.warn("old thing", DeprecationWarning, stacklevel=1)
        logging.captureWarnings(False)  # before catch_warnings puts its own function back
    (line,) = capsys.readouterr().err.splitlines()
    assert " WARNING w step=0 py.warnings  " in line
    assert line.endswith("DeprecationWarning: old thing")


@pytest.mark.parametrize("name", ["matplotlib.font_manager", "urllib3", "urllib3.connection"])
def test_libraries_speak_from_warning_on(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("w")
    logging.getLogger(name).info("chatter")
    logging.getLogger(name).warning("trouble")
    err = capsys.readouterr().err
    assert "chatter" not in err
    assert "trouble" in err


def test_tracebacks_are_kept(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("w")
    try:
        raise ValueError("because")
    except ValueError:
        logging.getLogger("x").exception("call failed")
    err = capsys.readouterr().err
    assert "ERROR w step=0 x  call failed\nTraceback" in err
    assert "ValueError: because" in err


def test_context_is_a_filter_that_lets_all_pass() -> None:
    record = logging.makeLogRecord({"name": "x", "msg": "m"})
    assert WorkerContext("w").filter(record)
    assert (record.worker, record.step) == ("w", 0)  # type: ignore[attr-defined]
