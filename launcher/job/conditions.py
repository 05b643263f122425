"""What ``--after TRIAL:…`` may end in, and sbatch's word for it (pure data)."""

from __future__ import annotations

CONDITIONS = {"ok": "afterok", "any": "afterany", "notok": "afternotok"}
