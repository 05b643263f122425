"""The second cluster of this tier (other_site.py) is of the other shape that its tests rely on."""

from __future__ import annotations

import other_site
from slurm_cluster import SlurmCluster

AS_USER = ("setpriv", f"--reuid={other_site.USER}", "--regid=nogroup", "--clear-groups")


def test_nodes_have_threads_other_host_names_and_memory_of_their_own(
    other_slurm: SlurmCluster,
) -> None:
    said = other_slurm.run("sinfo", "--noheader", "--Node", "--format=%N %z %m %P").stdout
    assert "t2 2:4:2 64000 main*" in said.splitlines()
    hosts = other_slurm.run("srun", "--nodes=2", "--account=lab", "hostname").stdout.split()
    assert sorted(hosts) == ["host-t1.lab.example", "host-t2.lab.example"]
    node = other_slurm.run("scontrol", "show", "node", "t1").stdout
    assert "MemSpecLimit=1000" in node


def test_a_job_that_takes_more_memory_than_it_asked_for_is_killed(
    other_slurm: SlurmCluster,
) -> None:
    assert other_slurm.shape.constrains_memory, "cgroup v1's memory controller is not here"
    big = ("python3", "-c", "len(bytearray(400 << 20))")
    done = other_slurm.run("srun", "--account=lab", "--mem=100", *big, check=False)
    assert "Out Of Memory" in done.stderr, done.stderr


def test_partitions_qos_and_users_have_limits(other_slurm: SlurmCluster) -> None:
    def refused(*options: str) -> str:
        argv = ("sbatch", "--parsable", "--output=/dev/null", *options, "--wrap=true")
        done = other_slurm.run(*argv, check=False)
        assert done.returncode != 0, options
        return done.stderr

    assert "Invalid account or account/partition" in refused("--partition=theirs", "--account=lab")
    assert "QOSMaxCpuPerJobLimit" in refused("--qos=tiny", "--ntasks=4", "--account=lab")
    assert "time limit" in refused("--time=90", "--account=lab").lower()
    waits = other_slurm.submit("--partition=broken", "--account=lab", command="true")
    assert other_slurm.wait_for_job(waits, "PENDING")["Reason"] == "PartitionDown"
    job = other_slurm.submit("--account=lab", command="sleep 300")
    assert other_slurm.wait_for_job(job, "RUNNING")["TimeLimit"] == "00:20:00"


def test_an_ordinary_user_has_jobs_and_sees_no_others(other_slurm: SlurmCluster) -> None:
    other_slurm.submit("--account=lab", command="sleep 300")
    argv = ("sbatch", "--parsable", "--output=/dev/null", "--wrap=sleep 300")
    job = other_slurm.run(*AS_USER, *argv).stdout.strip()
    seen = other_slurm.run(*AS_USER, "squeue", "--noheader", "--format=%A %u").stdout
    assert seen.split() == [job, other_site.USER]
