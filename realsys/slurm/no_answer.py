"""Recognises messages of Slurm's programs that mean an unreachable controller, not a refusal (pure)."""

from __future__ import annotations

import re

NO_CONTROLLER = re.compile(
    r"unable to contact slurm controller|socket timed out|connection refused|zero bytes were transmitted"
    r"|backup controller in standby|unexpected message received|connect failure|connection timed out",
    re.I,
)
