"""`realsys doctor --gpu` and the check at a job's start, on the real Slurm.

gloo stands in for NCCL, and for nvidia-smi a program that says what NVIDIA's would.
"""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
from real_trials import SMALL_PPO, explain
from slurm_daemons import wait_until
from slurm_trials import SlurmTrials

from launcher.sites.clusters import find_cluster
from launcher.slurm.doctor import gpu_job
from launcher.slurm.doctor.gpu_job import GpuProbeRequest, gpu_findings
from launcher.trials.status import trial_view
from realsys.slurm.preflight.rounds import Wanted
from realsys.trial.records import ExitMarker, PreflightRecord, read_record
from realsys.trial.trial_state import State

# Knows no event reasons, as drivers before 535: it is asked again by their older names.
NVIDIA_SMI = """\
#!/bin/sh
wrong=0
[ "$SLURMD_NODENAME" = n2 ] && wrong=3
fields=${1#--query-*=}
case "$1" in
*clocks_event_reasons*) f=$(echo "$fields" | tr , '\\n' | grep clocks_event | head -1)
  echo "Field \\"$f\\" is not a valid field to query."; exit 2 ;;
--query-remapped-rows=*) echo "$fields"
  for i in 0 1 2 3 4 5 6 7; do echo "GPU-$i, 0, 0, 0, 0"; done; exit ;;
esac
echo "$fields"
for i in 0 1 2 3 4 5 6 7; do
  echo "$fields" | tr , '\\n' | while read field; do case $field in
    index) printf "$i, " ;; uuid) printf "GPU-$i, " ;; name) printf 'NVIDIA H200, ' ;;
    driver_version) printf '580.65.06, ' ;;
    ecc.errors.uncorrected.volatile.total) [ $i = 5 ] && printf "$wrong, " || printf '0, ' ;;
    clocks_throttle_reasons.*) printf 'Not Active, ' ;;
    *) printf '[N/A], ' ;;
  esac; done | sed 's/, $//'
  echo
done
"""


def put_nvidia_smi(folder: Path, text: str = NVIDIA_SMI) -> str:
    """A line of a site's set-up that finds it."""
    folder.mkdir()
    (folder / "nvidia-smi").write_text(text)
    (folder / "nvidia-smi").chmod(0o755)
    return f"export PATH={folder}:$PATH"


def test_the_doctor_measures_nodes_and_names_those_that_are_ill(
    slurm_trials: SlurmTrials, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One node has a broken GPU, one never answers; the other two are measured all the same. A process a
    node: the next test has two, and an all-reduce among them."""
    hangs = '[ "$SLURMD_NODENAME" != n3 ] || exec sleep 600'
    path = slurm_trials.write_spec(setup=[put_nvidia_smi(tmp_path / "bin"), hangs])
    limited = functools.partial(Wanted, look_s=50.0, reduce_s=300.0, starts_s=10.0)
    monkeypatch.setattr(gpu_job, "Wanted", limited)
    monkeypatch.setattr(gpu_job, "CPU_PROCESSES", 1)
    question = GpuProbeRequest(nodelist="n[1-4]", gloo=True)
    found = {f.name: f for f in gpu_findings(find_cluster(str(path)), None, question)}
    bad = {name: f.what for name, f in found.items() if not f.ok}
    assert set(bad) == {"nodes", "GPU memory", "outliers"}, found
    assert bad["nodes"].startswith("n3: no answer in 60 s")
    assert "n2: GPU 5: 3 uncorrected" in bad["GPU memory"]
    assert found["outliers"].fix.endswith("--exclude n[2-3]")
    assert found["GPUs"].what == "a node has 8 × NVIDIA H200"
    assert "24 GPUs" in found["GPU clocks"].what
    assert "by 2 other nodes" in found["flock"].what
    for name in ("matmul", "all-reduce of pairs", "all-reduce of all"):
        assert "nothing of GPUs" in found[name].what, found[name]
    assert list(slurm_trials.file_root.glob(".realsys-doctor-*")) == []


def test_a_job_that_begins_on_an_ill_node_goes_on_without_it(
    slurm_trials: SlurmTrials, tiny_policy: Path, tmp_path: Path
) -> None:
    """With requeue; the workers of the first start never ran. The second finds its node well."""
    ill = NVIDIA_SMI.replace("= n2", "= n1")
    slurm_trials.write_spec(
        setup=[put_nvidia_smi(tmp_path / "bin", ill)], slurm={"preflight": "stop", "requeue": True}
    )
    words = [*SMALL_PPO, "exp_ctrl.benchmark_steps=1", f"actor.path={tiny_policy}"]
    files = slurm_trials.launch("ppo-math", "f", *words)
    wait_until(  # between its first end and the requeue it is a failed one
        lambda: len(files.all_attempts()) > 1,
        lambda: explain(files, trial_view(files)),
        timeout_s=120,
    )
    view = slurm_trials.wait(files, timeout_s=120)
    assert view.state is State.COMPLETED, explain(files, view)
    first, second = files.all_attempts()
    marker = read_record(ExitMarker, first.exit)
    assert marker is not None
    assert marker.first_failure is not None
    assert (marker.first_failure.worker, marker.first_failure.host) == ("preflight", "n1")
    assert marker.first_failure.why == (
        "GPU memory: GPU 5: 3 uncorrected ECC errors since the driver was loaded (failed the preflight)"
    )
    assert not (first.logs / "srun-model_worker.log").exists()
    told = read_record(PreflightRecord, second.preflight)
    assert told is not None
    assert told.ill == {}
    checks = {c["name"]: c for c in told.checks}
    assert checks.keys() >= {"nodes", "GPU memory", "all-reduce in a node"}
    assert "nothing of GPUs" in checks["all-reduce in a node"]["what"], "it was not measured"
