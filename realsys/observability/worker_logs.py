"""Log lines of a worker: one event per line, stamped with worker and step.

    2026-11-21T04:12:03.123 INFO model_worker/0 step=3 realsys.x  call finished name=actor_train

Called once by a worker's main; the supervisor sends standard error to the worker's log file. Times
are local.
"""

from __future__ import annotations

import logging
import sys
import time

QUIET = (
    "accelerate asyncio filelock fsspec httpcore httpx huggingface_hub matplotlib PIL submitit "
    "tensorboard torch transformers urllib3 wandb"
).split()


class WorkerContext(logging.Filter):
    """Adds worker and step to each record, so that call sites need not repeat them."""

    def __init__(self, worker: str) -> None:
        super().__init__()
        self.worker, self.step = worker, 0

    def filter(self, record: logging.LogRecord) -> bool:
        """Adds the fields; passes every record."""
        record.worker, record.step = self.worker, self.step
        if record.name == "py.warnings":  # its second line repeats the source code
            record.msg, record.args = "%s", (record.getMessage().splitlines()[0],)
        return True


class LineFormatter(logging.Formatter):
    """Formats the line above. Tracebacks follow on lines of their own."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(worker)s step=%(step)s %(name)s  %(message)s")

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:
        """Formats ISO 8601, local, to the millisecond."""
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(record.created))
        return f"{seconds}.{int(record.msecs):03d}"


def configure_logging(worker: str, *, level: int = logging.INFO) -> WorkerContext:
    """Sends all records of this process to standard error; update ``.step`` of the result with the step.

    Python warnings become records; third-party loggers log from WARNING on. Calling it again
    replaces the worker's name and keeps one handler.
    """
    root = logging.getLogger()
    for handler in list(root.handlers):
        if any(isinstance(f, WorkerContext) for f in handler.filters):
            root.removeHandler(handler)
    context = WorkerContext(worker)
    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(context)
    handler.setFormatter(LineFormatter())
    root.addHandler(handler)
    _set_level(root, level)
    logging.captureWarnings(True)
    for name in QUIET:
        _set_level(logging.getLogger(name), logging.WARNING)
    return context


def _set_level(of: logging.Logger, level: int) -> None:
    if of.level != level:  # setting it empties a table of each logger of the process
        of.setLevel(level)
