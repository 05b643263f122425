"""The command of a model's server, and a server of one's own on the loopback interface.

A key travels in the environment, which other users can't read, and in no command line.
"""

from __future__ import annotations

import json
import os
import secrets
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from launcher.serving.saved_models import SavedModel
from realsys.api.errors import ConfigError, WaitTimeout, WorkerLost
from realsys.config.extras import missing_packages
from realsys.rollout.conversation.renderer_choice import TEMPLATE, needed_packages
from realsys.runtime.child_processes.parent_death import tied

PROGRAM = "realsys.policy_server.serve_model"
KEY_VARIABLE = "REALSYS_API_KEY"
START_S = 1800.0  # a large model takes so long to be read
_END_S = 20.0
_NEEDED = ("torch", "transformers", "aiohttp")
# As of a worker (realsys/worker/environment.py): threads that spin when idle take cores from the others.
_QUIET = {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "GOMP_SPINCOUNT": "2000"}


def server_command(model: SavedModel, options: Mapping[str, Any]) -> list[str]:
    """Builds the argv of the server (pure).

    Args:
        options: of the program, by their names; those that are None or False are left out.

    >>> options = {"port": 80, "https": True, "dtype": None}
    >>> server_command(SavedModel(path=Path("/m"), name="m"), options)[3:]
    ['realsys.policy_server.serve_model', '/m', '--name', 'm', '--port', '80', '--https']
    """
    words = [sys.executable, "-P", "-m", PROGRAM, str(model.path)]
    options = {"name": model.name, **options}
    for name, value in options.items():
        if value is True:
            words.append(f"--{name}")
        elif value is not None and value is not False:
            words += [f"--{name}", str(value)]
    return words


def server_environment(key: str, *, renderer: str | None = None) -> dict[str, str]:
    """Returns the environment of the server; without a key it makes one.

    Raises:
        ConfigError: packages are missing.
    """
    needed = (*_NEEDED, *needed_packages(renderer or TEMPLATE))
    for problem in missing_packages(needed, where="realsys serve"):
        raise problem
    given = {KEY_VARIABLE: key} if key else {}
    return {**_QUIET, **os.environ, **given}


def read_key(file: Path | None) -> str:
    """Returns the key in a file, or in the environment; empty: there is none.

    Raises:
        ConfigError: the file can't be read, or holds no key.
    """
    if file is None:
        return os.environ.get(KEY_VARIABLE, "").strip()
    try:
        key = file.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{file} can't be read: {error}", where="--api-key-file", fix="name a file with a key"
        ) from error
    if not key or not key.isprintable() or " " in key:
        raise ConfigError(
            f"{file} holds no key", where="--api-key-file", fix="write one word into it"
        )
    return key


@contextmanager
def own_server(model: SavedModel, options: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Runs a server on the loopback interface while the block runs; gives its URL and key.

    Raises:
        WorkerLost: it ended; its own words are on stderr. WaitTimeout: it took too long.
    """
    key = "sk-" + secrets.token_urlsafe(24)
    argv = server_command(model, {**options, "port": 0, "json": True})
    environment = server_environment(key, renderer=options.get("renderer"))
    # In a session of its own: Ctrl-C ends an answer, not the server.
    server = subprocess.Popen(
        tied(argv), env=environment, stdout=subprocess.PIPE, start_new_session=True
    )
    try:
        yield _announced_url(server, argv), key
    finally:
        _end(server)


def _announced_url(server: subprocess.Popen[bytes], argv: Sequence[str]) -> str:
    """Waits for the line with which a server says that it listens."""
    assert server.stdout is not None
    deadline = time.monotonic() + START_S
    ready, _, _ = select.select([server.stdout], [], [], max(0.0, deadline - time.monotonic()))
    if not ready:
        raise WaitTimeout(
            f"the model's server did not listen after {START_S:g} s",
            where=" ".join(argv[:4]),
            fix="see whether the file system is slow; a smaller model starts sooner",
        )
    line = server.stdout.readline()
    if not line:
        raise WorkerLost(
            f"the model's server ended with status {server.wait()}",
            where=" ".join(argv[:4]),
            fix="see its own error above",
        )
    return str(json.loads(line)["url"])


def _end(server: subprocess.Popen[bytes]) -> None:
    """Ends the server: asks, waits, kills."""
    if server.poll() is None:
        server.send_signal(signal.SIGTERM)
    try:
        server.wait(_END_S)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()
    if server.stdout is not None:
        server.stdout.close()
