"""Our losses, advantages and weights against verl's, trl's and Tinker's, on the same batches. By hand.

    make oracle     makes both environments in .oracle/ (network, 3 GB), runs, writes results/oracle.json

oracle_table.py has all of what is compared. Values, and gradients with respect to log-probabilities,
must agree within 1e-6 in float64: ours are computed in float64 too, by letting ``Tensor.float`` be
``Tensor.double`` meanwhile, so that a difference is one of formulas and not of rounding. What ours give in
float32, as they are used, must be within 1e-5 of theirs, by the largest number of a batch.
Peers run in interpreters of their own. A row that is known to differ must differ, in the way that it says.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support"), str(HERE)]

import numpy as np  # noqa: E402
import tinker_forms  # noqa: E402
import torch  # noqa: E402
from by_hand import HandCheck  # noqa: E402
from oracle_batches import BATCHES, REACH, make_batches  # noqa: E402
from oracle_results import DOCUMENTED, FLOAT32_WITHIN, WITHIN, problems_of  # noqa: E402
from oracle_rows import Peer, Row  # noqa: E402
from oracle_table import NOT_RUN, ROWS  # noqa: E402
from peer_io import Arrays, Form, evaluate, read_batches, write_batches  # noqa: E402
from widths import wide  # noqa: E402

RUNNERS = ("verl", "trl")
Measure = Callable[[list[np.ndarray], list[np.ndarray]], float]


def relative(ours: list[np.ndarray], theirs: list[np.ndarray]) -> float:
    """Largest |ours - theirs| / |theirs| of all batches. Numbers below a hundredth of their median count as
    if they were that: a sum that happens to be nearly 0 is no more exact than others.
    """
    a, b = (np.concatenate([x.ravel() for x in batches]) for batches in (ours, theirs))
    sizes = np.abs(b)
    usual = float(np.median(sizes[sizes > 0])) if sizes.any() else 1.0
    return float((np.abs(a - b) / np.maximum(sizes, 1e-2 * usual)).max())


def relative_to_largest(ours: list[np.ndarray], theirs: list[np.ndarray]) -> float:
    """Largest |ours - theirs| of a batch, over its largest |theirs| or 1."""
    return float(
        max(
            np.abs(a - b).max() / max(np.abs(b).max(), 1.0)
            for a, b in zip(ours, theirs, strict=True)
        )
    )


def differences(ours: list[Arrays], theirs: list[Arrays], measure: Measure) -> dict[str, float]:
    """Of each output."""
    found = {}
    for name in theirs[0]:
        columns = [[said[name] for said in batches] for batches in (ours, theirs)]
        for i, (a, b) in enumerate(zip(*columns, strict=True)):
            if a.shape != b.shape:
                raise ValueError(f"{name} of batch {i}: ours is {a.shape}, theirs {b.shape}")
        found[name] = measure(*columns)
    return found


class Peers:
    """Outputs of all peers for all rows."""

    def __init__(self, folder: Path, environments: Path, batches: dict[str, list[Arrays]]) -> None:
        self.versions: dict[str, dict[str, str]] = {}
        self._folder, self._batches = folder, batches
        self._numbers: dict[str, list[tuple[str, str]]] = {name: [] for name in RUNNERS}
        self._failed: dict[str, dict[str, str]] = {}
        for name in RUNNERS:
            self._run(name, environments / name / "bin" / "python")

    def _run(self, name: str, python: Path) -> None:
        jobs = []
        for row in ROWS:
            if (peer := row.peers.get(name)) is not None:
                self._numbers[name].append((row.group, row.name))
                jobs.append(
                    {
                        "form": peer.form,
                        "options": dict(peer.options),
                        "batches": set_of(row, peer),
                        "wrt": row.wrt,
                        "dtype": row.dtype,
                    }
                )
        (self._folder / f"jobs-{name}.json").write_text(json.dumps(jobs))
        runner = [str(python), "-W", "ignore", str(HERE / f"{name}_runner.py")]
        subprocess.run([*runner, str(self._folder), name], check=True, timeout=1800)
        said = json.loads((self._folder / f"said-{name}.json").read_text())
        self.versions[name], self._failed[name] = said["versions"], said["failed"]

    def outputs(self, row: Row, name: str) -> list[Arrays]:
        """Raises RuntimeError with the peer's traceback where it failed."""
        if name == "tinker":
            peer = row.peers[name]
            form, options = tinker_forms.FORMS[peer.form], peer.options
            return [
                evaluate(form, x, wrt=row.wrt, options=options)
                for x in self._batches[set_of(row, peer)]
            ]
        number = self._numbers[name].index((row.group, row.name))
        if (traceback := self._failed[name].get(str(number))) is not None:
            raise RuntimeError(traceback)
        return read_batches(self._folder / f"{name}-{number}.npz")


def set_of(row: Row, peer: Peer) -> str:
    """Which batches a peer and we get for this row."""
    return peer.batches or row.batches


def compared(row: Row, said: list[Arrays]) -> list[Arrays]:
    """The outputs that the row compares."""
    return said if row.only is None else [{row.only: x[row.only]} for x in said]


def checked(row: Row, name: str, peers: Peers, batches: dict[str, list[Arrays]]) -> dict[str, Any]:
    """One result."""
    peer = row.peers[name]
    inputs = batches[set_of(row, peer)]
    found: dict[str, Any] = {
        "group": row.group,
        "name": row.name,
        "peer": name,
        "form": peer.form,
        "options": dict(peer.options),
        "batches": len(inputs),
        "of": set_of(row, peer),
    }
    try:
        theirs = compared(row, peers.outputs(row, name))
        if not all(np.isfinite(x).all() for said in theirs for x in said.values()):
            raise ValueError(f"{name} says what is no finite number")
        if row.ours is None:
            return {**found, **_among_others(row, name, theirs, peers)}
        with wide():
            ours = compared(row, [evaluate(row.ours, x, wrt=row.wrt) for x in inputs])
        apart = differences(ours, theirs, relative)
        if row.differs is not None:
            return {**found, **_differs(row, inputs, theirs, apart)}
        used = [evaluate(row.ours, x, wrt=row.wrt, dtype="float32") for x in inputs]
        used = compared(row, used)
        narrow = max(differences(used, theirs, relative_to_largest).values())
        agrees = max(apart.values()) <= WITHIN and narrow <= FLOAT32_WITHIN
        status = "agrees" if agrees else "failed"
        return {**found, "status": status, "float64": apart, "float32": narrow}
    except Exception as error:  # one row must not hide the others; the result says that it failed
        return {**found, "status": "failed", "why": str(error)}


def _differs(
    row: Row, inputs: list[Arrays], theirs: list[Arrays], apart: dict[str, float]
) -> dict[str, Any]:
    """Theirs is what we say it is, and that isn't ours."""
    assert row.differs is not None
    form: Form = row.differs.claimed
    with wide():
        said = [evaluate(form, x, wrt=row.wrt, dtype=row.dtype) for x in inputs]
    claimed = differences(said, theirs, relative)
    shown = max(claimed.values()) <= WITHIN < max(apart.values())
    return {
        "status": "differs" if shown else "failed",
        "apart": apart,
        "claimed": claimed,
        "ours": row.differs.ours,
        "theirs": row.differs.theirs,
        "source": row.differs.source,
    }


def _among_others(row: Row, name: str, theirs: list[Arrays], peers: Peers) -> dict[str, Any]:
    """Compared with the row's first peer, if that is another."""
    first = next(iter(row.peers))
    if first == name:
        return {"status": "theirs only"}
    apart = differences(theirs, peers.outputs(row, first), relative)
    status = "theirs only" if max(apart.values()) <= WITHIN else "failed"
    return {"status": status, "against": first, "float64": apart}


def main() -> int:
    """Returns 0 when all held."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--environments", type=Path, default=ROOT / ".oracle")
    parser.add_argument("--batches", type=int, default=BATCHES)
    options = parser.parse_args()
    torch.set_num_threads(1)
    check = HandCheck(__file__)
    batches = {which: make_batches(which, options.batches) for which in REACH}
    with tempfile.TemporaryDirectory(prefix="oracle-") as folder:
        for which, made in batches.items():
            write_batches(Path(folder) / f"batches-{which}.npz", made)
        peers = Peers(Path(folder), options.environments, batches)
        results = [checked(row, name, peers, batches) for row in ROWS for name in row.peers]
    for result in results:
        numbers = result.get("float64") or result.get("apart") or {}
        line = [f"{result['status']:12}", f"{result['peer']:7}", f"{result['name']:60}"]
        line += [f"{name} {x:.1e}" for name, x in numbers.items()]
        line += [f"float32 {result['float32']:.1e}"] if "float32" in result else []
        line += [f"claimed {max(result['claimed'].values()):.1e}"] if "claimed" in result else []
        sys.stdout.write("  ".join(line) + "\n" + result.get("why", ""))
    versions = {
        **{name: said[name] for name, said in peers.versions.items()},
        "tinker": DOCUMENTED,
        "torch": torch.__version__,
    }
    return check.write(
        "our algorithms against verl, trl and Tinker's documented losses, on random batches",
        problems_of(results),
        versions=versions,
        within=WITHIN,
        not_run=NOT_RUN,
        rows=results,
    )


if __name__ == "__main__":
    sys.exit(main())
