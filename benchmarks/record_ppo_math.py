"""Records one `realsys launch ppo-math` for README: its figures as JSON, its terminal as a picture.

    python benchmarks/record_ppo_math.py run [NAME=VALUE …]    # minutes; docs/pictures/ppo_math_run.json
    python benchmarks/record_ppo_math.py draw   # terminal.svg from it; with chromium, also report.png

README quotes the JSON (tests/unit/house/test_docs.py compares). The run has a file root of its own, so that
the starting policy is trained, too.
"""

from __future__ import annotations

import datetime
import getpass
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from html import escape
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "docs/pictures/ppo_math_run.json"
PICTURE = ROOT / "docs/pictures/terminal.svg"
REPORT = ROOT / "build/report.html"  # not committed; its picture is
REPORT_PICTURE = ROOT / "docs/pictures/report.png"
TRIAL = "ppo-math/run1"
COLUMNS = 118
SHOWN = 6  # lines of progress
FOLDER = "~/.local/share/realsys"


def record(settings: Sequence[str]) -> None:
    """Runs the commands and writes what they printed and what was learned."""
    with tempfile.TemporaryDirectory(prefix="realsys-") as root:
        environment = {**os.environ, "REALSYS_FILE_ROOT": root, "COLUMNS": str(COLUMNS)}
        environment |= {"NO_COLOR": "1"}

        def call(*words: str) -> tuple[str, float]:
            began = time.monotonic()
            done = subprocess.run(
                [sys.executable, "-m", "launcher.cli.entry", *words],
                env=environment,
                cwd=ROOT,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                check=True,
            )
            return anonymous(done.stdout.replace(root, FOLDER)), time.monotonic() - began

        launched, seconds = call("launch", "ppo-math", *settings)
        status, _ = call("status", "ppo-math")
        (folder,) = Path(root).glob(f"runs/*/{TRIAL}")
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        report = (folder / "report.html").read_text()
    scores = [row["eval/accuracy"] for row in rows if "eval/accuracy" in row]
    revision = subprocess.run(
        ["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True, check=True
    )
    found = {
        "command": " ".join(["realsys launch ppo-math", *settings]),
        "revision": revision.stdout.strip(),
        "at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "torch": version("torch"),
        "cores": os.cpu_count(),
        "minutes": round(seconds / 60, 1),
        "load_average": round(os.getloadavg()[1], 1),
        "steps": max(row["step"] for row in rows),
        "held_out_accuracy": {"start": scores[0], "end": scores[-1]},
        "terminal": [
            {"command": "realsys launch ppo-math", "output": launched.splitlines()},
            {"command": "realsys status ppo-math", "output": status.splitlines()},
        ],
    }
    RECORD.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")
    (ROOT / "build").mkdir(exist_ok=True)
    REPORT.write_text(anonymous(report))
    sys.stdout.write(f"{RECORD}\n")


def anonymous(text: str) -> str:
    """Without the names of this machine and its user."""
    text = re.sub(rf"\b{re.escape(socket.gethostname())}\b", "laptop", text)
    text = text.replace(f"runs/{getpass.getuser()}/", "runs/me/")
    return text.replace(f" by {getpass.getuser()} ", " by me ")


def shortened(lines: Sequence[str]) -> list[str]:
    """An output with SHOWN of its lines of progress, evenly spaced."""
    lines = [line.rstrip() for line in lines if line.strip()]
    steps = [i for i, line in enumerate(lines) if re.search(r"\| step [1-9]", line)]
    kept = {steps[i * (len(steps) - 1) // (SHOWN - 1)] for i in range(SHOWN)} if steps else set()
    shown: list[str] = []
    for i, line in enumerate(lines):
        starts = " | starting" in line or "/0 ready" in line
        if i in kept or (i not in steps and not starts):
            shown.append(line if len(line) <= COLUMNS else line[: COLUMNS - 1] + "…")
        elif i - 1 in kept:
            shown.append("…")
    return shown


def svg(terminal: Sequence[dict[str, object]]) -> str:
    """A picture of a terminal, in a system font: nothing is fetched by who looks at it."""
    rows: list[tuple[str, str]] = []
    for part in terminal:
        rows.append(("command", f"$ {part['command']}"))
        output = part["output"]
        assert isinstance(output, list)
        rows += [("left" if line == "…" else "text", line) for line in shortened(output)]
        rows.append(("text", ""))
    rows.pop()
    line_px, width = 18, int(COLUMNS * 7.85) + 40
    height = line_px * len(rows) + 56
    body = "\n".join(
        f'<text class="{kind}" x="20" y="{52 + i * line_px}" xml:space="preserve">{escape(line)}</text>'
        for i, (kind, line) in enumerate(rows)
    )
    dots = "".join(
        f'<circle cx="{22 + 20 * i}" cy="18" r="6" fill="{colour}"/>'
        for i, colour in enumerate(("#ff5f57", "#febc2e", "#28c840"))
    )
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}">
<title>realsys launch ppo-math, recorded by benchmarks/record_ppo_math.py</title>
<style>text {{ font: 13px ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace; fill: #d7dde5; }}
.command {{ fill: #7fd3a4; font-weight: bold; }} .left {{ fill: #8a95a5; }}</style>
<rect width="{width}" height="{height}" rx="9" fill="#161b22"/>
{dots}
{body}
</svg>
"""


def main() -> None:
    """The command line."""
    verb, *settings = sys.argv[1:] or [""]
    if verb == "run" and all(re.fullmatch(r"[\w.]+=.*", word) for word in settings):
        record(settings)
    if verb not in ("run", "draw"):
        raise SystemExit(__doc__)
    PICTURE.write_text(svg(json.loads(RECORD.read_text())["terminal"]))
    if (browser := shutil.which("chromium")) and REPORT.exists():
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        options += ["--window-size=1180,800", f"--screenshot={REPORT_PICTURE}"]
        subprocess.run([browser, *options, REPORT.as_uri()], check=True, capture_output=True)


if __name__ == "__main__":
    main()
