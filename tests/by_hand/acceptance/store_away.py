"""Etcd is away for twenty minutes in a run with steps of five seconds. By hand; about half an hour.

    python tests/by_hand/acceptance/store_away.py            writes results/store_away.json beside this file

The run must compute on meanwhile, ``status`` must say so throughout, and the run must end as the same run
does that nothing disturbed, bit for bit. tests/etcd/test_store_away.py shows the same in seconds.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
sys.path[:0] = [str(ROOT), *(str(ROOT / "tests" / part) for part in ("", "support", "etcd"))]

from etcd_server import EtcdCluster  # noqa: E402
from real_trials import Trials, make_policy  # noqa: E402
from runs_without_store import play  # noqa: E402

RESULT = HERE / "results" / "store_away.json"
AWAY_S, STEP_S, PATIENCE_S, LOOK_EVERY_S = 1200.0, 5.0, 1800, 30.0


def main() -> int:
    """Returns 0 when all held."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--away", type=float, default=AWAY_S, help="seconds")
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    began = time.time()
    with tempfile.TemporaryDirectory(prefix="store-away-") as folder:
        trials = Trials(Path(folder) / "root")
        try:
            with EtcdCluster(Path(folder) / "etcd") as etcd:
                outcome = play(
                    trials,
                    make_policy(Path(folder) / "policy"),
                    etcd,
                    step_s=STEP_S,
                    away_s=options.away,
                    patience_s=PATIENCE_S,
                    look_every_s=LOOK_EVERY_S,
                )
        finally:
            trials.end_all()
    result = {
        "what": "etcd is away in a run with slow steps: it computes on, and ends equal bit for bit",
        "command": "python tests/by_hand/acceptance/store_away.py",
        "revision": _git("rev-parse", "HEAD"),
        "changed": bool(_git("status", "--porcelain", "--untracked-files=no")),
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(began)),
        "minutes": round((time.time() - began) / 60, 1),
        "ok": not outcome.problems,
        **outcome.to_json(),
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    sys.stdout.write("\n".join([*(outcome.problems or ["all held"]), str(options.out)]) + "\n")
    return 1 if outcome.problems else 0


def _git(*words: str) -> str:
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
