"""End states of another trial accepted by ``--after TRIAL:…``, with sbatch's words for them (pure data)."""

from __future__ import annotations

CONDITIONS = {"ok": "afterok", "any": "afterany", "notok": "afternotok"}
