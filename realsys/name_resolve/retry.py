"""Retries a call to the store while the store is unavailable."""

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
    """Returns the result of ``call``, repeating it while it raises StoreUnavailable.

    Args:
        what: logged while waiting, e.g. ``publishing the checkpoint``.
        when_denied: also retry if the store refuses the login, for a caller that was logged in before.
    Raises:
        StoreUnavailable: the store was unavailable for all of ``timeout_s``.
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
