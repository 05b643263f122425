"""Two tables of docs/agents_endpoint.md, of what tool_calls_read.py found.

python tests/by_hand/templates/tool_calls_table.py           prints them
python tests/by_hand/templates/tool_calls_table.py --write   writes them into the page
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
PAGE = HERE.parents[2] / "docs" / "agents_endpoint.md"
RESULT = HERE / "results" / "tool_calls_read.json"
BEGIN, END = "<!-- tool_calls_table.py -->", "<!-- end -->"
CASES = (
    *("one call", "parallel", "text before", "thoughts before"),
    *("cut off", "in thoughts", "NaN", "twice"),
)
Row = Mapping[str, Any]


def tables(result: Row) -> str:
    """Returns both tables, with the marks around them."""
    families: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for name, row in result["families"].items():
        by = row["read_by"].replace(f": {name}", "")
        families[(by, *(_cell(row["cases"].get(case)) for case in CASES))].append(name)
    return "\n".join(
        [
            BEGIN,
            "",
            f"| families | read by | {' | '.join(CASES)} |",
            "|" + "---|" * (len(CASES) + 2),
            *(
                f"| {', '.join(f'`{name}`' for name in names)} | `{by}` | {' | '.join(cells)} |"
                for (by, *cells), names in families.items()
            ),
            "",
            "| form | hostile texts of 1 MB | longest, s | twice the text | calls invented, NaN "
            "| the package alone: 4 × the text |",
            "|---|--:|--:|--:|--:|--:|",
            *(_cost(name, cost) for name, cost in result["hostile"].items()),
            "",
            END,
        ]
    )


def _cell(said: Row | None) -> str:
    if said is None:
        return "–"
    ours, package = said["ours"] == "right", said["package"] == "right"
    if ours:
        return "both" if package else "ours"
    if package:
        return "package"
    return "checks" if said["used"] == "right" else "neither"


def _cost(name: str, cost: Row) -> str:
    none = "none" if not cost["calls_invented"] and cost["no_nan"] else "some"
    alone = cost["package_alone"]
    times = f"{alone['four_times']:.0f} ×" if alone["slowest_s"] >= 0.003 else "too short to tell"
    return (
        f"| `{name}` | {cost['pieces']} | {cost['slowest_s']:.2f} | {cost['doubled']:.1f} × | {none} "
        f"| {times} |"
    )


def with_tables(page: str, result: Row) -> str:
    """Returns the page with the tables in place of those between its marks."""
    before, _, rest = page.partition(BEGIN)
    return before + tables(result) + rest.partition(END)[2]


def main() -> None:
    """Prints the tables, or writes them."""
    result = json.loads(RESULT.read_text())
    if "--write" in sys.argv:
        PAGE.write_text(with_tables(PAGE.read_text(), result))
    else:
        sys.stdout.write(tables(result) + "\n")


if __name__ == "__main__":
    main()
