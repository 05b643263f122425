"""Rules of the whole suite: nothing is skipped silently, and nothing reaches beyond this machine."""

from __future__ import annotations

import os

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("GOMP_SPINCOUNT", "2000")  # before torch is imported; see the supervisor


def pytest_sessionfinish(session: pytest.Session) -> None:
    """In CI a skipped test is a failed one: this machine can run every tier that is here."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    skipped = reporter.stats.get("skipped", []) if reporter is not None else []
    if os.environ.get("CI") and skipped:
        names = ", ".join(report.nodeid for report in skipped[:10])
        reporter.write_line(f"skipped in CI, which counts as failed: {names}", red=True)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
