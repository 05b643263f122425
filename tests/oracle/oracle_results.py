"""What results/oracle.json says: its problems, and the tables of docs/algorithms.md.

python tests/oracle/oracle_results.py     prints "Checked against others"
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

RESULT = Path(__file__).parent / "results" / "oracle.json"
WITHIN = 1e-6  # relative, in float64
FLOAT32_WITHIN = 1e-5  # of ours as used, relative to the largest number of a batch
DOCUMENTED = "as documented, tinker-cookbook a2b1b820d480"


def problems_of(results: Sequence[dict[str, Any]]) -> list[str]:
    """A line for each row that did not turn out as the table says."""
    return [
        f"{r['name']}, {r['peer']}: " + (r.get("why") or str(_numbers(r))).strip().splitlines()[-1]
        for r in results
        if r["status"] == "failed"
    ]


def checked_against_others(said: dict[str, Any]) -> str:
    """Markdown: what agrees, by how much; what differs, who follows the source; what isn't compared."""
    versions = ", ".join(f"{name} {version}" for name, version in said["versions"].items())
    rows = said["rows"]
    lines = [
        f"`make oracle` ran on {said['at'][:10]} at revision `{said['revision'][:12]}` with {versions}. "
        f"{max(r['batches'] for r in rows)} random batches a row; the largest relative difference of any "
        "number, in float64, of values and of gradients. In float32, as they are used, ours are within "
        f"{max(r['float32'] for r in rows if 'float32' in r):.0e} of a batch's largest number.",
        "",
        "| | formula | peer | its name for it | value | gradient |",
        "|---|---|---|---|---|---|",
    ]
    for r in rows:
        if r["status"] == "agrees":
            value = max(x for name, x in r["float64"].items() if name != "gradient")
            gradient = r["float64"].get("gradient")
            lines.append(_line(r["group"], r["name"], r["peer"], f"`{r['form']}`", value, gradient))
    lines += ["", "Where others compute something else:", ""]
    lines += [
        "| formula | peer | ours | theirs | who follows the source |",
        "|---|---|---|---|---|",
    ]
    lines += [
        _line(r["name"], r["peer"], r["ours"], r["theirs"], r["source"])
        for r in rows
        if r["status"] == "differs"
    ]
    lines += ["", "Theirs only: run on the same batches, nothing of ours to compare with.", ""]
    lines += ["| | formula | peers |", "|---|---|---|"]
    peers: dict[tuple[str, str], list[str]] = {}
    for r in rows:
        if r["status"] == "theirs only":
            agree = f", agrees with {r['against']}" if "against" in r else ""
            peers.setdefault((r["group"], r["name"]), []).append(
                f"{r['peer']} `{r['form']}`{agree}"
            )
    lines += [_line(*which, "; ".join(who)) for which, who in peers.items()]
    lines += ["", "Not compared:", ""]
    lines += [f"- {what}: {why}" for what, why in said["not_run"].items()]
    return "\n".join(lines) + "\n"


def _line(*cells: str | float | None) -> str:
    def text(cell: str | float | None) -> str:
        if isinstance(cell, float):
            return f"{cell:.0e}" if cell else "0"
        return (cell or "").replace("|", "\\|")

    return "| " + " | ".join(text(cell) for cell in cells) + " |"


def _numbers(result: dict[str, Any]) -> dict[str, Any]:
    return {
        name: result[name] for name in ("float64", "float32", "apart", "claimed") if name in result
    }


if __name__ == "__main__":
    sys.stdout.write(checked_against_others(json.loads(RESULT.read_text())))
