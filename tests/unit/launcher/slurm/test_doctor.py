from __future__ import annotations

import json
import socket
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import golden
import pytest
import typer

from launcher.cli.verbs import site_verbs
from launcher.sites.clusters import read_spec, write_spec
from launcher.slurm.discovery.discover import Discovered, site_from_output
from launcher.slurm.discovery.site_facts import site_facts
from launcher.slurm.discovery.site_yaml import site_yaml
from launcher.slurm.doctor import doctor as doctor_module
from launcher.slurm.doctor import node_job as jobs
from launcher.slurm.doctor import node_probe
from launcher.slurm.doctor.doctor import examine, space_finding
from launcher.slurm.doctor.findings import Finding
from launcher.slurm.doctor.gpu_job import GpuProbeRequest
from launcher.slurm.doctor.login_checks import (
    account_findings,
    partition_findings,
    version_finding,
)
from launcher.slurm.doctor.node_checks import NEEDED, check_names, node_findings
from launcher.slurm.doctor.node_job import (
    PACKAGES,
    NodeReport,
    node_job,
    parse,
    script,
    small_request,
)
from launcher.slurm.doctor.store_checks import node_store_finding, node_store_probe
from launcher.slurm.images.image_pull import pull
from realsys.api.cluster import ClusterSpec, ContainerSpec, EtcdSpec, PartitionSpec, SlurmSpec
from realsys.api.errors import ClusterError, ConfigError

# Stands in for Slurm's programs: `bin/NAME` for each, all this script. FAKE_BUSY: no node is free.
FAKE = """\
#!/bin/sh
me=$(basename "$0")
echo "$me $*" | head -c 300 | tr '\\n' ' ' >>"$FAKE_CALLS"; echo >>"$FAKE_CALLS"
case "$me $1" in
"srun --help") echo "$FAKE_SRUN_HELP"; exit ;;
"scontrol show") case "$2" in
  partition) echo "${FAKE_PARTITION:-PartitionName=main State=UP DefaultTime=NONE}"; exit ;;
  node) echo "${FAKE_NODE:-NodeName=n1 CPUEfctv=64 State=IDLE ThreadsPerCore=1}"; exit ;;
  esac; printf 'ClusterName = lab\\nSLURM_VERSION = 22.05.8\\n'
  echo "AccountingStorageType = ${FAKE_ACCOUNTING:-accounting_storage/slurmdbd}"; exit ;;
"sinfo "*) echo 'main*|2|64|1000|gpu:h200:8|a|infinite|1-infinite|n[1-2]|2:32:1'; exit ;;
"sacctmgr "*) echo "${FAKE_ACCOUNTS:-me||normal||me}"; exit ;;
"sacct "*) [ -z "$FAKE_NO_SACCT" ] || { echo "sacct: error: $FAKE_NO_SACCT" >&2; exit 1; }; exit ;;
"sbatch "*) [ -z "$FAKE_REFUSES" ] || { echo "sbatch: error: $FAKE_REFUSES" >&2; exit 1; }
  echo 'sbatch: Job 7 to start at 2026-11-21T10:00:00 in partition main' >&2; exit ;;
"scancel "*) exit ;;
esac
if [ "$me" = salloc ]; then
  [ -z "$FAKE_BUSY" ] || { echo "salloc: error: $FAKE_BUSY" >&2; exit 1; }
  while [ "$1" != sh ]; do shift; done
  export CUDA_VISIBLE_DEVICES=0
  exec "$@"
fi
while case "$1" in --*) true ;; *) false ;; esac; do shift; done
[ -z "$FAKE_SRUN_SAYS" ] || { echo "srun: error: $FAKE_SRUN_SAYS"; exit 1; }
export SLURM_PROCID=0 SLURM_LOCALID=0 SLURMD_NODENAME=n1
exec "$@"
"""
PROGRAMS = ("sinfo", "scontrol", "sacct", "sacctmgr", "sbatch", "salloc", "srun", "scancel")


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    """A fake Slurm on PATH; tells which programs were called, in order."""
    folder, log = tmp_path / "bin", tmp_path / "calls"
    folder.mkdir()
    for name in PROGRAMS:
        add_program(folder / name, FAKE)
    log.write_text("")
    monkeypatch.setenv("FAKE_CALLS", str(log))
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.delenv("REALSYS_FILE_ROOT", raising=False)
    return lambda: [line.split()[0] for line in log.read_text().splitlines()]


def add_program(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


@pytest.fixture
def spec(tmp_path: Path) -> ClusterSpec:
    root = tmp_path / "root"
    return ClusterSpec(
        name="lab",
        scheduler="slurm",
        file_root=str(root),
        name_resolve=f"file://{root}/name_resolve",
        slurm=SlurmSpec(partition="main", account="me"),
        partitions={"main": PartitionSpec(nodes=2, cpus=64, memory_mib=1000, gpus=8)},
    )


def found(spec: ClusterSpec) -> dict[str, Finding]:
    return {finding.name: finding for finding in examine(spec)}


def test_a_healthy_site(calls: Callable[[], list[str]], spec: ClusterSpec, tmp_path: Path) -> None:
    add_program(tmp_path / "bin/nvidia-smi", '#!/bin/sh\necho "GPU 0: NVIDIA H200 (UUID: GPU-1)"\n')
    findings = found(spec)
    assert [name for name, finding in findings.items() if not finding.ok] == []
    assert list(findings) == [
        "file root",
        "folders",
        "disk space",
        "name resolution",
        "slurm",
        "accounting",
        "account",
        "partition main",
        "submission",
        "compute node",
        "shared file root",
        "locks",
        "name resolution there",
        "clock",
        "ports",
        "Python there",
        "GPU",
    ]
    golden.check(findings["submission"])
    golden.check(findings["GPU"])
    assert calls() == [
        *("srun", "scontrol", "sinfo", "scontrol", "scontrol", "sacctmgr"),  # the site
        *("sacct", "sbatch", "sbatch", "salloc", "srun"),
    ]
    assert list((tmp_path / "root").iterdir()) == []  # canaries are gone


def test_a_jobs_own_etcd_needs_its_program_on_the_node(
    calls: Callable[[], list[str]], spec: ClusterSpec, tmp_path: Path
) -> None:
    spec = replace(spec, name_resolve="etcd+job://")
    (tmp_path / "bin/etcd").unlink(missing_ok=True)
    asked = node_store_probe(spec)
    assert asked == {"folder": None, "endpoints": [], "files": [], "programs": ["etcd"]}
    golden.check(node_probe.store({**asked, "programs": ["no-such-program"]}))
    add_program(tmp_path / "bin/etcd", "#!/bin/sh\n")
    findings = found(spec)
    assert findings["name resolution"].ok
    golden.check(findings["name resolution there"])


def test_on_this_machine_a_jobs_own_etcd_is_looked_for_here(
    spec: ClusterSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    spec = replace(spec, scheduler="local", name_resolve="etcd+job://")
    finding = found(spec)["name resolution"]
    assert (finding.ok, "install etcd" in finding.fix) == (False, True)
    add_program(tmp_path / "etcd", "#!/bin/sh\n")
    assert found(spec)["name resolution"].ok


def test_a_node_says_which_server_it_does_not_reach_and_which_file_it_does_not_see(
    spec: ClusterSpec, tmp_path: Path
) -> None:
    (tmp_path / "ca.pem").write_text("")
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # nobody listens
        up, down = (f"127.0.0.1:{one.getsockname()[1]}" for one in (server, closed))
        section = EtcdSpec(
            user="me", password_file=f"{tmp_path}/none", ca_file=f"{tmp_path}/ca.pem"
        )
        spec = replace(spec, name_resolve=f"etcd://{up},{down}", etcd=section)
        problems = node_probe.store(node_store_probe(spec))
    golden.check(problems)
    finding = node_store_finding(spec, problems)
    assert not finding.ok
    assert "firewall" in finding.fix
    assert node_store_finding(spec, []).ok


def test_a_gpu_that_nobody_can_ask_is_not_called_ok(
    calls: Callable[[], list[str]], spec: ClusterSpec
) -> None:
    finding = found(spec)["GPU"]
    assert finding.ok is None
    golden.check(finding)


@pytest.mark.parametrize(
    ("says", "last"),
    [
        ("Unable to allocate resources: Requested nodes are busy", "salloc"),
        # What 22.05 says of --immediate. It could be no answer as well, so the job is cancelled.
        ("Unable to allocate resources: Connection timed out", "scancel"),
    ],
)
def test_a_full_cluster_leaves_checks_open(
    calls: Callable[[], list[str]], spec: ClusterSpec, monkeypatch: pytest.MonkeyPatch, says: str,
    last: str,
) -> None:  # fmt: skip
    monkeypatch.setenv("FAKE_BUSY", says)
    findings = found(spec)
    there = check_names(node_job(spec, None))
    assert {name: findings[name].ok for name in there} == dict.fromkeys(there)
    golden.check(findings["compute node"])
    assert findings["slurm"].ok
    assert calls()[-1] == last
    assert list(Path(spec.file_root).iterdir()) == []


def test_a_refused_job_is_not_sent(
    calls: Callable[[], list[str]], spec: ClusterSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_REFUSES", "Invalid account or account/partition combination specified")
    findings = found(spec)
    assert findings["submission"].ok is False
    assert "slurm.account" in findings["submission"].fix
    assert findings["compute node"].ok is None
    assert "salloc" not in calls()


def test_without_slurm_everything_about_it_is_open(
    spec: ClusterSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    findings = found(spec)
    assert findings["slurm"].ok is False
    golden.check(findings["slurm"])
    open_ones = ["accounting", "partitions", "container runtime", "submission", "compute node"]
    assert [findings[name].ok for name in open_ones] == [None] * 5


def test_srun_that_can_not_start_the_program(
    calls: Callable[[], list[str]], spec: ClusterSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_SRUN_SAYS", "execve(): python: No such file or directory")
    findings = found(spec)
    assert findings["compute node"].ok is False
    golden.check(findings["compute node"])
    assert findings["clock"].ok is None
    assert findings["Python there"].ok is False


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("says", "keeps", "sacct_error", "ok"),
    [
        (None, "accounting_storage/slurmdbd", "", True),
        (None, "accounting_storage/none", "", True),
        (False, "accounting_storage/none", "", True),
        (True, "accounting_storage/none", "", False),
        (None, "accounting_storage/slurmdbd", "Problem talking to the database", False),
        (None, "accounting_storage/slurmdbd", "denied", False),
    ],
)
def test_accounting(
    calls: Callable[[], list[str]],
    spec: ClusterSpec,
    monkeypatch: pytest.MonkeyPatch,
    says: bool | None,
    keeps: str,
    sacct_error: str,
    ok: bool,
) -> None:
    monkeypatch.setenv("FAKE_ACCOUNTING", keeps)
    monkeypatch.setenv("FAKE_NO_SACCT", sacct_error)
    finding = found(replace(spec, slurm=replace(spec.slurm, accounting=says)))["accounting"]
    assert finding.ok is ok
    assert ok or "slurm.accounting: false" in finding.fix


def test_a_site_file_that_promises_too_much(
    calls: Callable[[], list[str]], spec: ClusterSpec
) -> None:
    partitions = {
        "main": PartitionSpec(nodes=3, cpus=128, gpu_type="a100"),
        "gone": PartitionSpec(),
    }
    findings = found(replace(spec, partitions=partitions))
    golden.check(findings["partition main"])
    golden.check(findings["partition gone"])
    other = replace(spec, slurm=SlurmSpec(partition="nope"), partitions={})
    assert found(other)["partition nope"].ok is False
    assert found(other)["partitions"].ok is False


@pytest.mark.thorough
def test_pyxis_that_srun_does_not_have(
    calls: Callable[[], list[str]], spec: ClusterSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    pyxis = replace(spec, container=ContainerSpec(runtime="pyxis"), gpu_image="a#b", cpu_image="/x")
    findings = found(pyxis)
    assert findings["container runtime"].ok is False
    golden.check(findings["cpu_image"])
    golden.check(findings["gpu_image"])
    monkeypatch.setenv("FAKE_SRUN_HELP", "--container-image=[USER@][REGISTRY#]IMAGE")
    assert found(pyxis)["container runtime"].ok


def test_an_image_is_looked_at_from_inside(
    calls: Callable[[], list[str]], spec: ClusterSpec, tmp_path: Path
) -> None:
    """The fake apptainer gives the inside what the real one would: APPTAINERENV_ and nothing else."""
    add_program(
        tmp_path / "bin/apptainer",
        '#!/bin/sh\nwhile [ "$1" != /x.sif ]; do shift; done; shift\n'
        "set -- $(env | sed -n 's/^APPTAINERENV_\\([A-Z_]*=[^ ]*\\)$/\\1/p') \"$@\"\n"
        'exec env -i PATH=/usr/bin:/bin "$@"\n',
    )
    container = ContainerSpec(runtime="apptainer", python=sys.executable)
    findings = found(replace(spec, container=container, gpu_image="/x.sif"))
    golden.check(findings["gpu_image"])
    assert findings["runtime there"].ok
    assert findings["inside gpu_image"].ok, findings["inside gpu_image"]
    golden.check(findings["GPU"])


def report(**changes: Any) -> dict[str, Any]:
    return {
        "host": "n1",
        "node": "n1",
        "python": "3.11.7",
        "executable": "/py",
        "procid": "0",
        "localid": "0",
        "visible": "0",
        "programs": ["apptainer"],
        "shared": SHARED,
        "store": [],
        "packages": dict.fromkeys(PACKAGES, "1.0"),
        "ports": [32, 32],
        "addresses": [["lo", "127.0.0.1"], ["ib0", "10.1.0.7"]],
        "gpus": [1, "GPU 0: H200"],
        "begin": 100.1,
        "end": 100.2,
        **changes,
    }


def judged(spec: ClusterSpec, begun: float = 100.0, ended: float = 101.0, **changes: Any) -> Any:
    job = replace(node_job(spec, None), token="token")
    seen = NodeReport(begun=begun, ended=ended, returncode=0, report=report(**changes), output="")
    return {finding.name: finding for finding in node_findings(job, {"host": seen})}


SHARED = {"read": "token", "wrote": True, "error": "", "locks": "kept", "seen_back": True}


@pytest.mark.parametrize(
    ("name", "changes", "what"),
    [
        ("shared file root", {"shared": {**SHARED, "read": None, "error": "no such file"}},
         "the node does not see /f: no such file"),
        ("shared file root", {"shared": {**SHARED, "read": "other"}},
         "the node sees a different file than was written in /f"),
        ("shared file root", {"shared": {**SHARED, "wrote": False, "error": "read-only"}},
         "the node can't write: read-only"),
        ("shared file root", {"shared": {**SHARED, "seen_back": False}},
         "the file that the node wrote in /f is not visible here"),
        ("locks", {"shared": {**SHARED, "locks": "free"}},
         "a lock held on this host is not respected on the node"),
        ("locks", {"shared": {**SHARED, "locks": "[Errno 38] Function not implemented"}},
         "locking failed: [Errno 38] Function not implemented"),
        ("name resolution there", {"store": ["it can't be written there"]},
         "file:///f/n: it can't be written there"),
        ("clock", {"begin": 90.0, "end": 90.1},
         "the node's clock is at least 10.0 s behind of this one"),
        ("clock", {"begin": 104.0, "end": 104.5},
         "the node's clock is at least 3.5 s ahead of this one"),
        ("ports", {"ports": [32, 15]}, "20000-29999: 15 of 32 ports tried can be used"),
        ("Python there", {"python": "3.9.1"}, "Python 3.9.1, torch 1.0, realsys 1.0 (/py)"),
        ("Python there", {"packages": {**dict.fromkeys(PACKAGES, "1"), "torch": None}},
         "lacks torch (/py)"),
        ("Python there", {"procid": None}, "SLURM_PROCID is not set inside"),
        ("GPU", {"visible": ""}, "Slurm assigned none: CUDA_VISIBLE_DEVICES is not set"),
        ("GPU", {"gpus": [0, "Driver not loaded"]}, "Slurm gave 1 GPU (index 0); Driver not loaded"),
        ("interface", {"addresses": [["lo", "127.0.0.1"]]}, "the node has no 10.1.0.0/16"),
    ],
)  # fmt: skip
def test_what_can_be_wrong_on_a_node(
    spec: ClusterSpec, name: str, changes: dict[str, Any], what: str
) -> None:
    spec = replace(
        spec, file_root="/f", name_resolve="file:///f/n", port_range="20000-29999", interface="10.1.0.0/16"
    )  # fmt: skip
    well = judged(spec)
    assert [finding.ok for finding in well.values()] == [True] * len(well)
    ill = judged(spec, **changes)
    assert [n for n, finding in ill.items() if not finding.ok] == [name]
    assert (ill[name].ok, ill[name].what) == (False, what)


def test_a_clock_within_the_job_is_not_judged(spec: ClusterSpec) -> None:
    assert judged(spec, begun=100.0, ended=160.0, begin=130.0, end=131.0)["clock"].ok


def test_every_check_has_one_finding(spec: ClusterSpec) -> None:
    job = node_job(spec, None)
    for seen in ({}, {"host": NodeReport(begun=0, ended=1, returncode=1, report=None, output="x")}):
        assert [finding.name for finding in node_findings(job, seen)] == check_names(job)


def test_an_image_that_ran_proves_its_runtime(spec: ClusterSpec) -> None:
    spec = replace(spec, container=ContainerSpec(runtime="pyxis"), gpu_image="a#b:1")
    seen = NodeReport(begun=100, ended=101, returncode=0, report=report(), output="")
    job = replace(node_job(spec, None), token="token")
    both = {f.name: f for f in node_findings(job, {"host": seen, "gpu_image": seen})}
    assert both["runtime there"] == Finding("runtime there", True, "runs gpu_image")
    alone = {f.name: f for f in node_findings(job, {"host": seen})}
    golden.check(alone["runtime there"])
    assert alone["inside gpu_image"].ok is None


def test_packages_that_are_needed_are_looked_for() -> None:
    assert set(NEEDED) <= set(PACKAGES)


def test_the_small_job_asks_as_the_sites_jobs_do(spec: ClusterSpec) -> None:
    slurm = SlurmSpec(partition="p", account="a", qos="q", reservation="r", constraint="c")
    assert small_request(replace(spec, slurm=slurm), None) == [
        "--partition=p", "--account=a", "--qos=q", "--reservation=r", "--constraint=c", "--nodes=1",
        "--ntasks=1", "--cpus-per-task=1", "--mem=1024M",
    ]  # fmt: skip
    assert small_request(spec, None)[-1] == "--gres=gpu:1"
    assert small_request(spec, "other")[0] == "--partition=other"


def test_modules_and_setup_come_before_python(spec: ClusterSpec) -> None:
    spec = replace(spec, modules=("a b", "c"), setup=("ulimit -n 5",), venv="/v")
    text = script(node_job(spec, None))
    assert "bash -l -c 'module load '\"'\"'a b'\"'\"' c\nulimit -n 5\nexec \"$@\"'" in text
    assert "realsys-doctor /v/bin/python -c" in text


def test_a_step_that_was_cut_off_is_not_there() -> None:
    output = (
        'noise\n@@ realsys begin host 1.5\nwarning\nREALSYS-PROBE {"a": 1}\n@@ realsys end host 0 2.5\n'
        "@@ realsys begin gpu_image 3\nsrun: error: pulling\n@@ realsys end gpu_image 124 9\n"
        "@@ realsys begin cpu_image 9\n"
    )
    assert parse(output) == {
        "host": NodeReport(begun=1.5, ended=2.5, returncode=0, report={"a": 1}, output="warning"),
        "gpu_image": NodeReport(
            begun=3, ended=9, returncode=124, report=None, output="srun: error: pulling"
        ),
    }


def test_an_image_that_takes_too_long(spec: ClusterSpec) -> None:
    spec = replace(spec, container=ContainerSpec(runtime="pyxis"), gpu_image="a#b:1")
    seen = {
        "gpu_image": NodeReport(begun=3, ended=9, returncode=124, report=None, output="pulling")
    }
    finding = {f.name: f for f in node_findings(node_job(spec, None), seen)}["inside gpu_image"]
    golden.check((finding.ok, finding.what))
    assert "realsys image pull" in finding.fix


def test_each_image_is_looked_at_once(spec: ClusterSpec) -> None:
    pyxis = replace(spec, container=ContainerSpec(runtime="pyxis"), gpu_image="/x", cpu_image="/x")
    assert node_job(pyxis, None).images == {"gpu_image": "/x"}
    assert node_job(replace(pyxis, cpu_image="/y"), None).images == {
        "gpu_image": "/x",
        "cpu_image": "/y",
    }
    assert node_job(spec, None).images == {}


def test_an_old_slurm() -> None:
    assert version_finding("21.08.8").ok is False
    assert version_finding("22.05.8").ok
    assert version_finding("25.11.0-0rc1").ok


def test_little_space(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("launcher.slurm.doctor.doctor.LEAST_FREE_GIB", 1e9)
    assert space_finding(str(tmp_path / "not/yet")).ok is False


def test_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("REALSYS_FILE_ROOT", str(tmp_path))
    assert site_verbs.doctor(cluster="local", json=True) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["ok"] is True
    assert [f["name"] for f in document["findings"]] == [
        "file root", "folders", "disk space", "name resolution", "packages",
    ]  # fmt: skip


def test_doctor_for_people(
    calls: Callable[[], list[str]], spec: ClusterSpec, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
) -> None:  # fmt: skip
    monkeypatch.setenv("FAKE_BUSY", "1")
    write_spec("lab", f"scheduler: slurm\nfile_root: {tmp_path}/root\nslurm.partition: main\n")
    assert site_verbs.doctor(cluster="lab") == 1
    lines = capsys.readouterr().out.splitlines()
    assert "ok   slurm                    Slurm 22.05.8 answers" in lines
    golden.line(lines, "clock ")


def test_clusters_lists_sites_and_their_mistakes(
    calls: Callable[[], list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    write_spec("bad", "file_rot: /x\n")
    site_verbs.clusters(json=True)
    rows = json.loads(capsys.readouterr().out)["clusters"]
    assert [(r["name"], r["scheduler"], r["problem"]) for r in rows] == [
        ("bad", "?", "no option called 'file_rot'; see realsys doctor --cluster bad"),
        ("local", "local", ""),
    ]
    site_verbs.clusters()
    with pytest.raises(typer.BadParameter):
        site_verbs.clusters("unit")


def test_clusters_init_writes_once(
    calls: Callable[[], list[str]], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    site_verbs.clusters("init")
    text = capsys.readouterr().out
    site_verbs.clusters("init", write=True)
    path = tmp_path / "config/realsys/clusters/lab.yaml"
    assert capsys.readouterr().out == f"{path}\n"
    assert path.read_text() == text
    with golden.raises(ConfigError):
        site_verbs.clusters("init", "lab", write=True)


PULL = """\
#!/bin/sh
echo "$*" >>"$FAKE_CALLS"
if [ "$1" = import ]; then target=$3; else target=$2; fi
[ -z "$FAKE_FAILS" ] || exit 3
[ -e "$target" ] && exit 4
echo image >"$target"
"""


@pytest.mark.parametrize(
    ("runtime", "program", "source", "file", "called"),
    [
        ("pyxis", "enroot", "nvcr.io/nvidia/x:1", "nvcr.io+nvidia+x+1.sqsh", "docker://nvcr.io#nvidia/x:1"),
        ("apptainer", "apptainer", "nvcr.io#nvidia/x:1", "nvcr.io+nvidia+x+1.sif",
         "docker://nvcr.io/nvidia/x:1"),
    ],
)  # fmt: skip
def test_an_image_is_pulled_once(
    calls: Callable[[], list[str]], spec: ClusterSpec, tmp_path: Path, runtime: str, program: str,
    source: str, file: str, called: str,
) -> None:  # fmt: skip
    spec = replace(spec, container=ContainerSpec(runtime=runtime))
    with golden.raises(ClusterError):
        pull(spec, source, timeout_s=100)
    add_program(tmp_path / "bin" / program, PULL)
    target = Path(spec.file_root, "images", file)
    first = pull(spec, source, timeout_s=100)
    assert (first.path, first.already, target.read_text()) == (target, False, "image\n")
    assert called in (tmp_path / "calls").read_text()
    assert pull(spec, source, timeout_s=100).already
    assert [path.name for path in target.parent.iterdir()] == [file]


def test_a_pull_that_fails_leaves_nothing(
    calls: Callable[[], list[str]], spec: ClusterSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    add_program(tmp_path / "bin/enroot", PULL)
    monkeypatch.setenv("FAKE_FAILS", "1")
    spec = replace(spec, container=ContainerSpec(runtime="pyxis"))
    with golden.raises(ClusterError):
        pull(spec, "ubuntu:22.04", timeout_s=100)
    assert list(Path(spec.file_root, "images").iterdir()) == []


def test_what_can_not_be_pulled(spec: ClusterSpec) -> None:
    with golden.raises(ConfigError):
        pull(spec, "ubuntu:22.04", timeout_s=1)
    pyxis = replace(spec, container=ContainerSpec(runtime="pyxis"))
    for source in ("/x.sqsh", "", "a b"):
        with golden.raises(ConfigError):
            pull(pyxis, source, timeout_s=1)


def test_a_hung_salloc_is_cancelled(
    calls: Callable[[], list[str]], spec: ClusterSpec, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:  # fmt: skip
    add_program(tmp_path / "bin/salloc", "#!/bin/sh\nsleep 60\n")
    for name in ("QUEUE_S", "HOST_S"):
        monkeypatch.setattr(jobs, name, -14.9)
    with golden.raises(ClusterError):
        jobs.run_node_job(node_job(spec, None))
    assert calls() == ["scancel"]


# ---- what Slurm knows of partitions, nodes and accounts -----------------------------------------------

# As 22.05.8 prints it.
PARTITIONS = """\
PartitionName=main AllowGroups=ALL AllowAccounts=ALL AllowQos=ALL Default=YES QoS=N/A DefaultTime=NONE MaxTime=UNLIMITED Nodes=n[1-4] State=UP MaxMemPerNode=UNLIMITED TRES=cpu=64,mem=250G
PartitionName=short AllowGroups=ALL AllowAccounts=ALL AllowQos=normal Default=NO QoS=N/A DefaultTime=00:03:00 MaxTime=00:10:00 Nodes=n[1-2] State=UP MaxMemPerNode=2000 TRES=cpu=32
PartitionName=closed AllowGroups=ALL AllowAccounts=other,third AllowQos=ALL Default=NO DefaultTime=NONE Nodes=n3 State=DOWN MaxMemPerNode=UNLIMITED
PartitionName=drainp AllowGroups=ALL DenyAccounts=lab AllowQos=ALL DefaultTime=NONE Nodes=n3 State=DRAIN MaxMemPerCPU=100
"""  # noqa: E501
NODE_LINES = """\
NodeName=n1 Arch=x86_64 CoresPerSocket=8  CPUAlloc=0 CPUEfctv=16 CPUTot=16 Gres=gpu:h200:8 OS=Linux 6.18.44 #1 SMP @0  RealMemory=64000 MemSpecLimit=4000 State=IDLE ThreadsPerCore=2 Partitions=main,small
NodeName=n2 CPUEfctv=14 CPUTot=16 RealMemory=64000 State=MIXED ThreadsPerCore=2
NodeName=n3 CPUEfctv=16 CPUTot=16 RealMemory=64000 State=IDLE+DRAIN ThreadsPerCore=1 Reason=bad fan in rack 3 [root@2026-11-23T03:05:20]
NodeName=n4 CPUEfctv=16 RealMemory=64000 State=DOWN* ThreadsPerCore=1 Reason=Not responding [slurm@2026-11-23T03:05:20]
"""  # noqa: E501
ASSOCIATIONS = "lab||normal,spot,urgent||lab\nteam||big|big|lab\n"
SHAPES = """\
main*|2|16|64000|gpu:h200:8|a|infinite|1-infinite|n[1-2]|2:4:2
main*|2|16|64000|gpu:h200:8|a|infinite|1-infinite|n[3-4]|2:8:1
short|2|16|64000|gpu:h200:8|a|10:00|1-infinite|n[1-2]|2:4:2
closed|1|16|64000|gpu:h200:8|a|infinite|1-infinite|n3|2:8:1
drainp|1|16|64000|gpu:h200:8|a|infinite|1-infinite|n3|2:8:1
"""
ENFORCED = (
    "AccountingStorageType = accounting_storage/slurmdbd\n"
    "AccountingStorageEnforce = associations,limits\n"
)


def site(**changes: str) -> Discovered:
    texts = {"partitions": PARTITIONS, "nodes": NODE_LINES, "accounts": ASSOCIATIONS, **changes}
    return site_from_output(ENFORCED, SHAPES, runtime="none", name="lab", more=site_facts(**texts))


def test_what_jobs_can_have_of_nodes_is_described() -> None:
    described = site().spec.partitions
    main, short = described["main"], described["short"]
    assert (main.memory_mib, main.cpus, main.default_time) == (60_000, 14, None)
    assert (short.memory_mib, short.default_time, short.max_time) == (2000, "00:03:00", "10:00")


def test_a_written_site_file_tells_what_slurm_knows(tmp_path: Path) -> None:
    text = site_yaml(site())
    for line in (
        "  # account:                  # yours: lab (default), team",
        "  # qos:                      # yours: normal, spot, urgent, big",
        "    # only QOS normal",
        "    # MaxMemPerNode: a job can use at most 2000 MiB per node",
        "    # MemSpecLimit: 4000 MiB per node are reserved for the system and not counted below",
        "    # 2 threads per core; Slurm allocates whole cores",
        "    # its state is DOWN: it starts no jobs at present",
        "    # only accounts other, third",
        "    # not accounts lab",
        "    # n3 is IDLE+DRAIN: bad fan in rack 3",
        "    # n4 is DOWN*: Not responding",
    ):
        assert f"{line}\n" in text
    path = tmp_path / "site.yaml"
    path.write_text(text)
    assert read_spec(path).partitions == site().spec.partitions


def of_partition(name: str, account: str | None = None, qos: str | None = None) -> Finding:
    """The finding of a site file that describes the partition as Slurm does."""
    described = {name: site().spec.partitions[name]}
    spec = ClusterSpec(partitions=described, slurm=SlurmSpec(account=account, qos=qos))
    (finding,) = partition_findings(spec, site())
    return finding


def test_a_partition_where_some_nodes_are_out_is_ok_and_they_are_named() -> None:
    finding = of_partition("main")
    assert finding.ok
    told = "; down or drained: n3 (IDLE+DRAIN: bad fan in rack 3), n4 (DOWN*: Not responding)"
    assert finding.what.endswith(told)


@pytest.mark.parametrize(
    ("name", "account", "qos", "why"),
    [
        ("closed", None, None, "its state is DOWN: Slurm starts no jobs there"),
        ("closed", None, None, "only account other, third may use it, yours is lab"),
        ("closed", None, None, "all its nodes are out; down or drained: n3 (IDLE+DRAIN: bad fan"),
        ("drainp", None, None, "its state is DRAIN"),
        ("drainp", None, None, "account lab may not use it"),
        ("short", "team", None, "only QOS normal may use it, yours is spot"),
    ],
)
def test_a_partition_where_no_job_of_ours_starts_is_bad(
    name: str, account: str | None, qos: str | None, why: str
) -> None:
    finding = of_partition(name, account, "spot" if name == "short" else qos)
    assert finding.ok is False
    assert why in finding.what


def test_a_partition_that_our_account_and_qos_may_use_is_ok() -> None:
    assert of_partition("short", "lab", "normal").ok
    assert of_partition("short").ok  # which QOS a job without one gets is not known


def test_a_site_file_that_promises_memory_or_time_that_jobs_do_not_get() -> None:
    described = {"short": PartitionSpec(nodes=2, cpus=14, memory_mib=64_000, gpus=8)}
    spec = ClusterSpec(partitions=described, slurm=SlurmSpec(account="lab", qos="normal"))
    (finding,) = partition_findings(spec, site())
    assert finding.ok is False
    golden.check(finding)


@pytest.mark.parametrize(
    ("account", "qos", "said"),
    [
        (None, None, {"account": True}),
        ("team", "big", {"account": True}),
        ("other", None, {"account": False}),
        ("lab", "big", {"account": True, "QOS": False}),
    ],
)
def test_accounts_and_qos_that_are_mine(
    account: str | None, qos: str | None, said: dict[str, bool]
) -> None:
    spec = ClusterSpec(slurm=SlurmSpec(account=account, qos=qos))
    assert {f.name: f.ok for f in account_findings(spec, site())} == said


def test_nobody_is_asked_for_an_account_where_none_is_needed() -> None:
    shapes = {"runtime": "none", "more": site_facts("", "", "")}
    assert list(account_findings(ClusterSpec(), site_from_output("A = b", SHAPES, **shapes))) == []
    (finding,) = account_findings(ClusterSpec(), site(accounts=""))
    golden.check((finding.ok, finding.what))


def test_a_site_that_wants_a_time_limit_of_every_job(
    calls: Callable[[], list[str]], spec: ClusterSpec, tmp_path: Path
) -> None:
    """The small job has one; what a launch would send has none, and is refused."""
    refuses = (
        '#!/bin/sh\ncase "$*" in *--time=*) exit 0;; esac\n'
        "echo 'allocation failure: Time limit specification required, but not provided' >&2; exit 1\n"
    )
    add_program(tmp_path / "bin/sbatch", refuses)
    findings = found(spec)
    assert findings["submission"].ok
    assert findings["time limit"].ok is False
    golden.check(findings["time limit"])
    assert "slurm.time_limit" in findings["time limit"].fix
    assert "time limit" not in found(replace(spec, slurm=replace(spec.slurm, time_limit="60")))


def test_a_kernel_that_can_not_hold_a_process_is_told(
    spec: ClusterSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert node_probe.pidfd() is True
    monkeypatch.setattr(node_probe, "walls", dict)
    assert list(doctor_module.local_kernel_findings()) == []
    told = judged(spec, pidfd=False, kernel="4.18.0-553.el8_10.x86_64")
    finding = told["kernel there"]
    assert finding.ok is False
    golden.check(finding)
    assert "kernel there" not in judged(spec, pidfd=True)
    assert "kernel there" not in judged(spec, pidfd=None)  # nobody could ask

    def lacks(pid: int) -> int:
        raise ClusterError("no pidfd_open", where="here", fix="another kernel")

    monkeypatch.setattr(doctor_module, "pidfd_open", lacks)
    assert found(replace(spec, scheduler="local"))["kernel"].ok is False


def test_what_a_kernel_lacks_to_contain_reward_rules_is_reported(
    spec: ClusterSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert set(node_probe.walls()) <= {"Landlock", "seccomp filters"}
    lacking = {"Landlock": "can read and write what you can"}
    finding = judged(spec, walls=lacking)["reward rules there"]
    assert finding.ok, "they run there all the same"
    assert "Landlock" in finding.what
    assert "reward rules there" not in judged(spec, walls={})
    monkeypatch.setattr(node_probe, "walls", lambda: lacking)
    assert "Landlock" in found(replace(spec, scheduler="local"))["reward rules"].what


def test_locks_are_not_asked_for_where_workers_do_not_meet_by_a_file(spec: ClusterSpec) -> None:
    assert "locks" not in judged(
        replace(spec, rendezvous="tcp"), shared={**SHARED, "locks": "free"}
    )


def test_gpus_are_measured_where_that_is_asked_and_slurm_takes_jobs(
    calls: Callable[[], list[str]], spec: ClusterSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_BUSY", "Unable to allocate resources: Requested nodes are busy")
    *_, last = examine(spec, gpu=GpuProbeRequest(nodes=2))
    assert (last.name, last.ok) == ("GPU nodes", None)
    golden.check(last)
    assert calls()[-2:] == ["salloc", "salloc"]  # the small job's, and this one
    assert list(Path(spec.file_root).iterdir()) == []
    monkeypatch.setenv("FAKE_REFUSES", "Invalid account or account/partition combination specified")
    before = len(calls())
    *_, last = examine(spec, gpu=GpuProbeRequest())
    golden.check((last.name, last.what))
    assert "salloc" not in calls()[before:]
