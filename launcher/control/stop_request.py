"""Stops an attempt gracefully: a request that the master honours after its current step."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from contextlib import closing

from launcher.sites.places import user_name
from launcher.trials.await_end import views_until_over
from launcher.trials.status import StatusReader
from launcher.trials.trial_view import TrialView
from realsys.api.errors import RealsysError
from realsys.name_resolve.key_table import TrialKeys
from realsys.name_resolve.trial_store import open_trial_store
from realsys.trial.records import StopRequest, dumps

POLL_S = 0.1


def request_stop(
    reader: StatusReader, view: TrialView, grace_s: float, record_action: Callable[[str], None]
) -> bool:
    """Writes the stop request. False if the store can't be written."""
    if reader.plan is None:
        return False
    request = StopRequest(
        grace_seconds=grace_s,
        by=f"{user_name()}@{socket.gethostname()}",
        at=time.time(),
        attempt=view.attempt,
    )
    try:
        attempt = reader.files.attempt(view.attempt)
        with closing(open_trial_store(reader.plan, attempt)) as store:
            store.add(TrialKeys.of(reader.plan).stop, dumps(request), replace=True)
    except RealsysError as error:
        record_action(f"the stop request failed: {error.what}")
        return False
    record_action(
        f"requested a stop of attempt {view.attempt} after its current step (up to {grace_s:g} s)"
    )
    return True


def wait_for_end(reader: StatusReader, timeout_s: float) -> bool:
    """Waits until the attempt has ended; False if it has not within ``timeout_s``."""
    for view in views_until_over(reader, brief=True, timeout_s=timeout_s, pause_s=POLL_S):
        if view.is_over:
            return True
    return False
