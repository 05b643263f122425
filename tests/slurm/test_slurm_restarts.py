"""One task of a step is started again on a real Slurm: on its node, with its GPU, and to nobody's harm."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

from slurm_cluster import SlurmCluster

HERE = Path(__file__).parent
ROOT = HERE.parent.parent


def test_a_task_is_started_again_beside_the_others(
    slurm_without_accounting: SlurmCluster, tmp_path: Path
) -> None:
    cluster = slurm_without_accounting
    path = ":".join(map(str, (HERE, HERE.parent / "support", ROOT)))
    # A GPU on each node is held by another step, so that the first ones are not the tasks' own.
    other = "srun --nodes=2 --ntasks=2 --mem=0 --cpus-per-task=1 --exact --gres=gpu:h200:1"
    job = (
        f"({other} sh -c 'touch {tmp_path}/held-$SLURMD_NODENAME; exec sleep 600' &) ; "
        f"until [ -e {tmp_path}/held-n1 ] && [ -e {tmp_path}/held-n2 ]; do sleep 0.1; done; exec "
        f"env PYTHONPATH={shlex.quote(path)} {sys.executable} {HERE}/restart_job.py {tmp_path} "
        f"> {tmp_path}/out 2>&1"
    )
    options = ("--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=8", "--gres=gpu:h200:4")
    job_id = cluster.submit(*options, "--mem=1000", command=job)
    cluster.wait_for_job(job_id, "COMPLETED", "FAILED", timeout_s=240)
    assert (tmp_path / "told.json").exists(), (tmp_path / "out").read_text()
    told = json.loads((tmp_path / "told.json").read_text())
    assert told["nodes"] == ["n1", "n2"]
    assert (told["killed 1"], told["killed 2"]) == (-9, -9)
    kind = "generation_server"
    assert told["running"] == [f"{kind}/{i}" for i in range(4)]
    assert told["ended"] == [True] * 4
    # pid, node, GPU, step: of each start.
    places = [[tuple(start[1:3]) for start in starts] for starts in told["seen"]]
    assert places == [
        [("n1", "1")],
        [("n1", "2")],
        [("n2", "1")],
        [("n2", "2")] * 3,
    ]
    steps = [start[3] for start in told["seen"][3]]
    assert steps == ["1", "2", "3"]
    logs = tmp_path / "run1/attempts/0001/logs"
    assert {p.name for p in logs.iterdir()} == {
        *(f"{kind}-{i}.log" for i in range(4)),
        f"srun-{kind}.log",
        f"srun-{kind}-3-1.log",
        f"srun-{kind}-3-2.log",
    }
