"""A call to the store that is made again while the store is away."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TypeVar

from realsys.api.errors import StoreDenied, StoreUnavailable

logger = logging.getLogger(__name__)
T = TypeVar("T")

RETRY_S = 0.5


def retry_while_unavailable(
    call: Callable[[], T], *, timeout_s: float, what: str, when_denied: bool = True
) -> T:
    """What ``call`` returns.

    Args:
        what: told in the log while it is waited for, e.g. ``publishing the checkpoint``.
        when_denied: also where the store answers and does not let us in: it did before.
    Raises:
        StoreUnavailable: the store was away for all of ``timeout_s``.
    """
    deadline_s = time.monotonic() + timeout_s
    while True:
        try:
            return call()
        except StoreUnavailable as error:
            is_vain = isinstance(error, StoreDenied) and not when_denied
            if is_vain or time.monotonic() > deadline_s:
                raise
            logger.warning("waiting for the store what=%s error=%s", what, error.what)
            time.sleep(RETRY_S)
