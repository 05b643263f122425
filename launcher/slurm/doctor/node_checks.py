"""Evaluates the reports from a compute node (pure); node_job.py obtains them."""

from __future__ import annotations

import ipaddress
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from launcher.slurm.doctor.findings import Finding, unchecked
from launcher.slurm.doctor.node_job import NodeJob, NodeReport
from launcher.slurm.doctor.store_checks import node_store_finding
from launcher.slurm.images.image_pull import PROGRAMS
from realsys.api.cluster import ClusterSpec

OLDEST_PYTHON = (3, 11)
MOST_SKEW_S = 2.0
NEEDED = ("torch", "transformers", "safetensors", "numpy", "pyzmq", "msgspec")


def check_names(job: NodeJob) -> list[str]:
    """Names every check of this module that the site needs."""
    return ["compute node", *_of_host(job), *_insides(job), *(["GPU"] if job.gpu else [])]


def _of_host(job: NodeJob) -> list[str]:
    needed = ["shared file root"] + ["locks"] * (job.spec.rendezvous == "file")
    needed += ["name resolution there", "clock", "ports"]
    needed += ["interface"] if job.spec.interface else []
    return needed + (["runtime there"] if job.spec.container.runtime != "none" else [])


def _insides(job: NodeJob) -> dict[str, str]:
    """Maps each check to the step in which tasks run: an image, or the node itself."""
    if not job.images:
        return {"Python there": "host"}
    return {f"inside {option}": option for option in job.images}


def unchecked_node(job: NodeJob, what: str, fix: str) -> list[Finding]:
    """Makes the findings if no step ran: nothing was checked."""
    first, *rest = check_names(job)
    return [
        Finding(first, None, f"not checked: {what}", fix),
        *unchecked(rest, "no compute node", f"see {first}"),
    ]


def node_findings(job: NodeJob, seen: Mapping[str, NodeReport]) -> Iterator[Finding]:
    """Yields one finding for each of ``check_names``."""
    host = seen.get("host")
    if host is None or host.report is None:
        yield _no_report("compute node", host)
        yield from unchecked(_of_host(job), "the program did not run there", "see compute node")
    else:
        yield Finding("compute node", True, _where(host.report))
        yield from _host_findings(job, host.report, seen)
    for name, step in _insides(job).items():
        yield _inside(name, seen.get(step))
    if job.gpu:
        step = next((option for option in job.images if option.startswith("gpu")), "host")
        yield _gpu(seen.get(step))


def _host_findings(
    job: NodeJob, report: Mapping[str, Any], seen: Mapping[str, NodeReport]
) -> Iterator[Finding]:
    yield _shared(job, report["shared"])
    if job.spec.rendezvous == "file":
        yield _locks(report["shared"].get("locks", ""))
    yield node_store_finding(job.spec, report["store"])
    yield _clock(seen["host"], report)
    if report.get("pidfd") is False:
        yield no_pidfd("kernel there", str(report.get("kernel", "?")))
    yield from rule_findings("reward rules there", report.get("walls", {}))
    yield _ports(job.spec, report["ports"])
    if job.spec.interface:
        yield _interface(job.spec.interface, report["addresses"])
    if job.spec.container.runtime != "none":
        yield _runtime(job, report, seen)


def _where(report: Mapping[str, Any]) -> str:
    return f"a job ran on {report['node'] or report['host']}, Python {report['python']}"


def _no_report(name: str, seen: NodeReport | None) -> Finding:
    """Explains a step that printed no report by what it printed instead."""
    if seen is None:
        return Finding(name, None, "not checked: the job ended before this step", "try again")
    if seen.returncode == 124:
        took = f"it did not finish within {seen.ended - seen.begun:.0f} s"
        fix = "an image from a registry is slow to fetch: realsys image pull stores it as a file"
        return Finding(name, False, f"{took}: {seen.output}" if seen.output else took, fix)
    output = seen.output or f"exit status {seen.returncode}"
    fix = (
        "the message is from srun, the container runtime or Python; is this Python on the node too?"
    )
    return Finding(name, False, f"the program did not run: {output}", fix)


def _shared(job: NodeJob, shared: Mapping[str, Any]) -> Finding:
    name, root = "shared file root", job.spec.file_root
    if shared["read"] is None:
        problem = f"the node does not see {root}: {shared['error']}"
    elif shared["read"] != job.token:
        problem = f"the node sees a different file than was written in {root}"
    elif not shared["wrote"]:
        problem = f"the node can't write: {shared['error']}"
    elif not shared.get("seen_back"):
        problem = f"the file that the node wrote in {root} is not visible here"
    else:
        return Finding(name, True, f"{root}: each side sees what the other writes")
    fix = "set file_root to a folder shared by login and compute nodes that you can write"
    return Finding(name, False, problem, fix)


def _locks(found: str) -> Finding:
    """Evaluates the probe of a flock held by this host: model workers rendezvous through a locked file."""
    if found == "kept":
        return Finding("locks", True, "a lock held on this host is respected on the node")
    if not found:
        return Finding(
            "locks", None, "not checked: the file was not visible", "see shared file root"
        )
    what = (
        "a lock held on this host is not respected on the node"
        if found == "free"
        else f"locking failed: {found}"
    )
    fix = "mount the file root with flock (Lustre: flock, not localflock), or set rendezvous: tcp"
    return Finding("locks", False, what, fix)


def _clock(host: NodeReport, report: Mapping[str, Any]) -> Finding:
    """Compares the node's clock with this host's: its times must lie between those taken around its run."""
    behind, ahead = host.begun - report["begin"], report["end"] - host.ended
    if max(behind, ahead) > MOST_SKEW_S:
        side = "behind" if behind > ahead else "ahead"
        return Finding(
            "clock",
            False,
            f"the node's clock is at least {max(behind, ahead):.1f} s {side} of this one",
            "ask the site to check NTP; until then, times in logs and events of different nodes disagree",
        )
    within = host.ended - host.begun + max(0.0, behind, ahead)
    return Finding("clock", True, f"agrees with this host's to within {within:.1f} s")


def _ports(spec: ClusterSpec, ports: list[int]) -> Finding:
    tried, bound = ports
    what = f"{spec.port_range or 'any port'}: {bound} of {tried} ports tried can be used"
    if 2 * bound >= tried:
        return Finding("ports", True, what)
    fix = "choose another port_range, below the node's own (/proc/sys/net/ipv4/ip_local_port_range)"
    return Finding("ports", False, what, fix)


def _interface(wanted: str, addresses: list[list[str]]) -> Finding:
    for name, address in addresses:
        if wanted == name or ("/" in wanted and _within(address, wanted)):
            return Finding("interface", True, f"{wanted}: {name} has {address}")
    there = ", ".join(f"{name} ({address})" for name, address in addresses)
    return Finding("interface", False, f"the node has no {wanted}", f"use one of {there}")


def _within(address: str, subnet: str) -> bool:
    return ipaddress.ip_address(address) in ipaddress.ip_network(subnet, strict=False)


def _runtime(job: NodeJob, report: Mapping[str, Any], seen: Mapping[str, NodeReport]) -> Finding:
    """Checks the container runtime; an image that ran is proof. pyxis looks for enroot on slurmd's PATH,
    not on a task's.
    """
    name, program = "runtime there", PROGRAMS[job.spec.container.runtime]
    ran = [option for option in job.images if option in seen and seen[option].report]
    if ran:
        return Finding(name, True, f"runs {', '.join(ran)}")
    if program in report["programs"]:
        return Finding(name, True, f"{program} is on PATH there")
    fix = f"ask the site for {program} on compute nodes, or load its module in `setup`"
    return Finding(name, False, f"{program} is not on PATH there", fix)


def _inside(name: str, seen: NodeReport | None) -> Finding:
    """Checks Python and its packages, in an image or on the host."""
    if seen is None or seen.report is None:
        return _no_report(name, seen)
    report = seen.report
    packages: Mapping[str, str | None] = report["packages"]
    lacks = [package for package in NEEDED if packages[package] is None]
    has = f"Python {report['python']}, torch {packages['torch']}, realsys {packages['realsys']}"
    where = f" ({report['executable']})"
    if tuple(map(int, report["python"].split(".")[:2])) < OLDEST_PYTHON:
        return Finding(name, False, has + where, "realsys needs Python 3.11 or later there")
    if lacks:
        fix = f"install there: {' '.join(lacks)}; or name another Python (container.python, venv)"
        return Finding(name, False, f"lacks {', '.join(lacks)}{where}", fix)
    if report["procid"] is None or report["localid"] is None:
        fix = "the container runtime must pass on Slurm's variables: ask the site"
        return Finding(name, False, "SLURM_PROCID is not set inside", fix)
    if packages["realsys"] is None:
        has = has.replace("realsys None", "no realsys: a trial brings its own copy of the code")
    return Finding(name, True, has)


def _gpu(seen: NodeReport | None) -> Finding:
    if seen is None or seen.report is None:
        return Finding("GPU", None, "not checked: the program did not run", "see above")
    visible, gpus = seen.report["visible"], seen.report["gpus"]
    if not visible:
        fix = "check GresTypes and gres.conf, and gpu_type in the site file: ask the site"
        return Finding("GPU", False, "Slurm assigned none: CUDA_VISIBLE_DEVICES is not set", fix)
    number = len(visible.split(","))
    given = f"{number} GPU{'s' * (number > 1)} (index {visible})"
    if gpus is None:
        fix = "if the node has a driver: is it also in the image (--nv, NVIDIA's hook)?"
        what = f"not checked: Slurm gave {given}, but there is no nvidia-smi to query them"
        return Finding("GPU", None, what, fix)
    seen_there, text = gpus
    if not seen_there:
        return Finding("GPU", False, f"Slurm gave {given}; {text}", "the driver does not answer")
    return Finding("GPU", True, f"Slurm gave {given}; {text.splitlines()[0]}")


def local_python() -> str:
    """Returns this process's Python version, in the reports' format."""
    return ".".join(map(str, sys.version_info[:3]))


def rule_findings(name: str, lacking: Mapping[str, str]) -> Iterator[Finding]:
    """Yields what a kernel lacks to contain reward rules; they run there all the same."""
    for feature, effect in lacking.items():
        text = f"the kernel has no {feature}: a rule {effect} (docs/rewards.md)"
        yield Finding(name, True, text)


def no_pidfd(name: str, release: str) -> Finding:
    """Makes the finding of a kernel without pidfd_open(2), which every worker's heartbeat process needs."""
    fix = "use nodes with Linux 5.3 or later (or a distribution's kernel that has pidfd_open)"
    return Finding(name, False, f"Linux {release} has no pidfd_open(2): no worker starts", fix)
