"""What results/oracle.json says: its problems, and a section of docs/algorithms.md.

python tests/by_hand/oracle/oracle_results.py           prints "Checked against others"
python tests/by_hand/oracle/oracle_results.py --write   puts it into the page
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

RESULT = Path(__file__).parent / "results" / "oracle.json"
PAGE = Path(__file__).parents[3] / "docs" / "algorithms.md"
HEADING = "\n## Checked against others\n\n"  # the page's last section
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
        f"Each formula is computed by both on {max(r['batches'] for r in rows)} random batches, ragged and "
        "with tokens that don't count. The numbers are the largest relative differences, in float64; in "
        "float32, as they are used, ours are within "
        f"{max(r['float32'] for r in rows if 'float32' in r):.0e} of a batch's largest number.",
        "",
        "| formula | agrees with | value | gradient |",
        "|---|---|---|---|",
    ]
    lines += [_agreement(which, found) for which, found in _by_name(rows, "agrees").items()]
    lines += ["", "Where others compute something else, each shown to be what they return:", ""]
    for r in rows:
        if r["status"] == "differs":
            lines += [
                f"- **{r['name']}** ({r['peer']})",
                f"  - ours: {r['ours']}",
                f"  - theirs: {r['theirs']}",
                f"  - by the source: {r['source']}",
            ]
    lines += ["", "Theirs only, run on the same batches; nothing of ours to compare with:", ""]
    for (group, name), found in _by_name(rows, "theirs only").items():
        who = ", ".join(r["peer"] for r in found)
        agree = ", which agree" if any("against" in r for r in found) else ""
        lines.append(f"- {group}: {name} ({who}{agree})")
    lines += ["", "Not compared:", ""]
    lines += [f"- {what}: {why}" for what, why in said["not_run"].items()]
    return "\n".join(lines) + "\n"


def _by_name(
    rows: Sequence[dict[str, Any]], status: str
) -> dict[tuple[str, str], list[dict[str, Any]]]:
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for r in rows:
        if r["status"] == status:
            found.setdefault((r["group"], r["name"]), []).append(r)
    order = list(dict.fromkeys(group for group, _ in found))
    return {which: found[which] for which in sorted(found, key=lambda x: order.index(x[0]))}


def _agreement(which: tuple[str, str], found: list[dict[str, Any]]) -> str:
    """A line of the table, with the largest differences from any of the peers."""

    def largest(gradient: bool) -> str:
        numbers = [
            x for r in found for name, x in r["float64"].items() if (name == "gradient") == gradient
        ]
        return "–" if not numbers else f"{max(numbers):.0e}" if max(numbers) else "0"

    who = ", ".join(r["peer"] for r in found)
    cells = (": ".join(which), who, largest(gradient=False), largest(gradient=True))
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _numbers(result: dict[str, Any]) -> dict[str, Any]:
    return {
        name: result[name] for name in ("float64", "float32", "apart", "claimed") if name in result
    }


def main() -> None:
    """Prints the section, or writes it."""
    section = checked_against_others(json.loads(RESULT.read_text()))
    if sys.argv[1:] == ["--write"]:
        before = PAGE.read_text().partition(HEADING)[0]
        PAGE.write_text(before + HEADING + section)
    else:
        sys.stdout.write(section)


if __name__ == "__main__":
    main()
