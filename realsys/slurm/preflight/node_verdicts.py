"""Evaluates the nodes' records: the checks, each with the nodes at fault (pure).

A check that could not be made is None, never True. A rate is compared only with its own kind: it fails if
it is far below the median of equal GPUs, or equal nodes, of the same run. The rate that a site should
reach is not known here.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from realsys.slurm.hostlist import compress
from realsys.slurm.preflight.node_records import ProbeRecords, able, number, own_rows, smi_rows
from realsys.slurm.preflight.rounds import Wanted, bus_bandwidth

K = TypeVar("K")
Record = Mapping[str, Any]

# Equal GPUs differ by a few percent. Without any, only links are judged, and leniently: a CPU's rate
# depends on what else computes there.
BELOW = {"cuda": 0.8, "cpu": 0.1}
# NCCL and torch keep buffers of several MiB a peer there; containers often have 64 MiB.
LEAST_SHM = 1 << 30
LEAST_MEMLOCK = 1 << 30  # registered for InfiniBand: `ulimit -l unlimited` is usual
LEAST_FILES = 4096
MOST_SKEW_S = 2.0
# CUDA's major version → least driver ("CUDA Compatibility", minor version compatibility).
LEAST_DRIVER = {11: 450, 12: 525, 13: 580}
# h100, gh200, l40s: of gpu_type, what a name must have.
_TYPE = re.compile(r"[a-z]{1,3}\d{2,4}[a-z]*")
_SLOWDOWNS = {
    "hw_thermal_slowdown": "too hot",
    "hw_power_brake_slowdown": "held back by the power supply",
    "sw_thermal_slowdown": "held back by the driver: too hot",
    "hw_slowdown": "held back by the hardware",
}


@dataclass(frozen=True)
class Check:
    """The outcome of one check over all nodes.

    Attributes:
        ok: None if it could not be made.
        against: node → the evidence against it; empty if no single node is at fault.
        is_own: a fault of a node itself, even if all have it: a broken GPU.
    """

    name: str
    ok: bool | None
    what: str
    fix: str = ""
    against: Mapping[str, str] = field(default_factory=dict)
    is_own: bool = False


def judge(wanted: Wanted, seen: ProbeRecords) -> list[Check]:
    """Returns every check, in reading order."""
    found = _Found(wanted, seen)
    checks = [found.answered()]
    if wanted.device == "cuda":
        checks.append(found.driver())
    if wanted.device == "cuda" or wanted.gpus or any(found.smi("before").values()):
        checks += [found.gpus(), found.ecc(), found.clocks()]
    checks += [found.shm(), found.limits()]
    if len(wanted.nodes) > 1:
        checks += [found.lock(), found.skew()]
    checks += [found.matmul(), found.inside()]
    if len(wanted.nodes) > 1:
        checks += [found.pairs(), found.all_nodes()]
    return checks


def to_leave_out(checks: Iterable[Check], nodes: Collection[str]) -> dict[str, str]:
    """Returns node → why, for nodes to leave out. Evidence against all nodes is the site's fault, unless
    it is a fault of the nodes themselves."""
    bad = [check for check in checks if check.ok is False]
    found = _told_by(bad)
    return found if set(nodes) - set(found) else _told_by(check for check in bad if check.is_own)


def _told_by(checks: Iterable[Check]) -> dict[str, str]:
    found: dict[str, str] = {}
    for check in checks:
        for node, why in check.against.items():
            found.setdefault(node, f"{check.name}: {why}")
    return found


def slow(rates: Mapping[K, float], *, below: float) -> dict[K, tuple[float, float]]:
    """Returns those under ``below`` times the median of all: (rate, median)."""
    if len(rates) < 2:
        return {}
    median = statistics.median(rates.values())
    return {key: (rate, median) for key, rate in rates.items() if rate < below * median}


def has_code_for(capability: Sequence[int], archs: Iterable[str]) -> bool:
    """Returns whether a torch built for ``archs`` (``sm_90``, ``sm_90a``, ``compute_90``) runs on such a
    GPU.

    Machine code runs on its own major version from its minor on, with an ``a`` only there, with an ``f`` in
    its family; PTX (``compute_``) is compiled for whatever is newer (CUDA C Programming Guide, Compute
    Capabilities; NVIDIA compiler driver, GPU compilation).
    """
    mine = 10 * capability[0] + capability[1]
    for arch in archs:
        match = re.fullmatch(r"(sm|compute)_(\d+)([af]?)", arch)
        if match is None:
            continue
        kind, digits, only = match[1], int(match[2]), match[3]
        if only == "a":
            fits = digits == mine
        elif kind == "sm" or only == "f":
            fits = digits // 10 == mine // 10 and digits <= mine
        else:
            fits = digits <= mine
        if fits:
            return True
    return False


def too_old(driver: str, cuda: str) -> int | None:
    """Returns the minimum driver for that CUDA, if this one is older."""
    least = LEAST_DRIVER.get(int(cuda.partition(".")[0]))
    mine = driver.partition(".")[0]
    return least if least is not None and mine.isdecimal() and int(mine) < least else None


def gpu_troubles(row: Mapping[str, str], rows: Mapping[str, str]) -> list[str]:
    """Returns a GPU's memory faults reported by the driver: uncorrected errors, and rows that wait to be
    remapped.

    Args:
        row, rows: of --query-gpu and --query-remapped-rows.
    """
    found: list[str] = []
    wrong = number(row, "ecc.errors.uncorrected.volatile.total")
    if wrong:
        found.append(f"{wrong:.0f} uncorrected ECC errors since the driver was loaded")
    if _is_yes(rows.get("remapped_rows.failure", "")):
        found.append("its spare rows are used up (row remapping failed)")
    pending = rows.get("remapped_rows.pending", "") or row.get("retired_pages.pending", "")
    if _is_yes(pending):
        found.append("rows wait to be replaced: it needs a reset")
    return found


def slowdowns(row: Mapping[str, str]) -> list[str]:
    """Returns the active slowdown reasons of a GPU that are faults."""
    found: list[str] = []
    for name, words in _SLOWDOWNS.items():
        values = {
            row.get(f"{kind}.{name}")
            for kind in ("clocks_event_reasons", "clocks_throttle_reasons")
        }
        if "Active" in values and not (name == "hw_slowdown" and found):
            found.append(words)
    width, most = number(row, "pcie.link.width.current"), number(row, "pcie.link.width.max")
    if width and most and width < most:
        found.append(f"PCIe has {width:.0f} of {most:.0f} lanes")
    return found


def _is_yes(value: str) -> bool:
    return value.lower() in ("yes", "true") or (value.isdecimal() and int(value) > 0)


@dataclass(frozen=True)
class _Found:
    wanted: Wanted
    seen: ProbeRecords

    # ---- the records, sorted ---------------------------------------------------------------

    def of(self, what: str, *, step: str = "") -> list[Record]:
        return [
            r for r in self.seen.records if r["what"] == what and str(r["step"]).startswith(step)
        ]

    @property
    def looked(self) -> dict[str, Record]:
        return {str(r["node"]): r for r in self.of("node")}

    def smi(self, when: str) -> dict[str, list[dict[str, str]]]:
        """Returns node → a row for each of our GPUs."""
        visible = {node: r["visible"] for node, r in self.looked.items()}
        return {
            str(r["node"]): own_rows(smi_rows(r["gpus"]), visible.get(str(r["node"])))
            for r in self.of("smi")
            if r["when"] == when
        }

    @property
    def smi_error(self) -> str:
        return next(
            (str(r["error"]) for r in self.of("smi") if r["error"]), "nvidia-smi told nothing"
        )

    def kind_of(self) -> dict[tuple[str, int], str]:
        """Returns (node, GPU) → its name, by torch."""
        return {
            (str(r["node"]), int(r["gpu"])): str(r.get("name", self.wanted.device))
            for r in self.of("torch")
        }

    # ---- checks ----------------------------------------------------------------------------

    def answered(self) -> Check:
        ended = {str(r["node"]) for r in self.of("end", step="look")}
        against: dict[str, str] = {}
        said = [line for step in self.seen.steps if step.name == "look" for line in step.said]
        for node in self.wanted.nodes:
            if node not in self.looked:
                its_own = [line for line in said if re.search(rf"\b{re.escape(node)}\b", line)]
                words = (its_own or said)[-1:] or ["it said nothing"]
                against[node] = (
                    f"no answer in {self.wanted.look_s + self.wanted.starts_s:.0f} s ({words[0][:200]})"
                )
            elif node not in ended:
                against[node] = (
                    f"began, and was not done after {self.wanted.look_s + self.wanted.starts_s:.0f} s"
                )
        fix = "check that node: does its driver hang (dmesg), does the image exist?"
        return _check("nodes", f"{len(ended)} answered: {compress(sorted(ended))}", against, fix)

    def driver(self) -> Check:
        told = self.of("torch")
        against: dict[str, str] = {}
        drivers = {
            node: rows[0].get("driver_version", "")
            for node, rows in self.smi("before").items()
            if rows
        }
        for record in told:
            node = str(record["node"])
            if problem := _torch_problem(record, drivers.get(node, "")):
                against.setdefault(node, problem)
        if not told:
            return Check("driver and torch", None, "not checked: no torch answered", "see nodes")
        unknown = not all(drivers.get(node) for node in self.looked)
        words = sorted(
            {
                f"torch {r['version']} (CUDA {r['cuda']}, NCCL {r.get('nccl', 'unknown')}), "
                f"driver {drivers.get(str(r['node'])) or 'unknown'}"
                for r in told
            }
        )
        fix = (
            "another driver or another torch: containers/README.md has images for CUDA's versions; "
            "in a container, does it get the driver's libraries (--nv, NVIDIA's hook)?"
        )
        if unknown and not against:
            return Check("driver and torch", None, f"{'; '.join(words)}: {self.smi_error}", fix)
        return _check("driver and torch", "; ".join(words), against, fix)

    def gpus(self) -> Check:
        rows = self.smi("before")
        against: dict[str, str] = {}
        if not any(rows.values()):
            fix = "is the driver on the nodes, and in the image (--nv, NVIDIA's hook)?"
            return Check("GPUs", None, f"not checked: {self.smi_error}", fix)
        words = set()
        for node in self.looked:
            mine = rows.get(node, [])
            names = sorted({row.get("name", "unknown") for row in mine})
            words.add(f"{len(mine)} × {', '.join(names)}" if mine else "none")
            if problem := self._gpus_problem(node, mine):
                against[node] = problem
        fix = "correct gpus and gpu_type in the site file, or ask the site about that node"
        return _check("GPUs", "a node has " + "; or ".join(sorted(words)), against, fix)

    def _gpus_problem(self, node: str, rows: Sequence[Mapping[str, str]]) -> str:
        if not rows:
            errors = [str(r["error"]) for r in self.of("smi") if r["node"] == node and r["error"]]
            return (errors or ["nvidia-smi lists none"])[0]
        visible = self.looked[node]["visible"]
        given = len(visible.split(",")) if visible else 0
        if self.wanted.device == "cuda" and 0 < given < self.wanted.gpus:
            return f"Slurm gave {given}, the site file says {self.wanted.gpus}"
        if len(rows) < self.wanted.gpus:
            return f"nvidia-smi lists {len(rows)}, the site file says {self.wanted.gpus}"
        type_ = _TYPE.search((self.wanted.gpu_type or "").lower())
        for row in rows:
            name = row.get("name", "")
            if type_ and name and type_[0] not in name.lower():
                return f"GPU {row.get('index', '?')} is {name}, the site file says {self.wanted.gpu_type}"
            if row.get("mig.mode.current") == "Enabled":
                return (
                    f"GPU {row.get('index', '?')} is cut into MIG instances, which NCCL can't join"
                )
        return ""

    def ecc(self) -> Check:
        against: dict[str, str] = {}
        told = 0
        remapped = {
            (str(r["node"]), row.get("gpu_uuid", "")): row
            for r in self.of("smi")
            for row in smi_rows(r["rows"])
        }
        for node, rows in self.smi("before").items():
            for row in rows:
                mine = remapped.get((node, row.get("uuid", "")), {})
                told += "ecc.errors.uncorrected.volatile.total" in row or bool(mine)
                if problems := gpu_troubles(row, mine):
                    against.setdefault(node, f"GPU {row.get('index', '?')}: {', '.join(problems)}")
        fix = "ask the site to reset or replace that GPU; until then leave the node out"
        if not told:
            why = "the GPUs do not tell" if any(self.smi("before").values()) else self.smi_error
            return Check(
                "GPU memory", None, f"not checked: {why}", "is ECC on? nvidia-smi -q -d ECC"
            )
        well = f"no uncorrected errors on {told} GPUs"
        return replace(_check("GPU memory", well, against, fix), is_own=True)

    def clocks(self) -> Check:
        against: dict[str, str] = {}
        told = 0
        before, load = self.smi("before"), self.smi("load")
        for node in self.looked:
            for row in load.get(node) or before.get(node) or []:
                told += any("_reasons." in name for name in row)
                if problems := slowdowns(row):
                    heat = f" at {row['temperature.gpu']} °C" if "temperature.gpu" in row else ""
                    words = f"GPU {row.get('index', '?')}{heat}: {', '.join(problems)}"
                    against.setdefault(node, words)
        if not told and not against:
            why = "the GPUs do not tell" if any(before.values()) else self.smi_error
            return Check("GPU clocks", None, f"not checked: {why}", "nvidia-smi -q -d PERFORMANCE")
        fix = "ask the site about cooling and power of that node; until then leave it out"
        return replace(
            _check("GPU clocks", f"{told} GPUs are not held back", against, fix), is_own=True
        )

    def shm(self) -> Check:
        sizes = {node: int(r["shm"][0]) for node, r in self.looked.items()}
        against = {n: f"{size / 2**20:.0f} MiB" for n, size in sizes.items() if size < LEAST_SHM}
        fix = (
            "give it 1 GiB or more: docker's --shm-size; a container of Slurm's has the node's own"
        )
        if not sizes:
            return Check("/dev/shm", None, "not checked: no node answered", "see nodes")
        return _check("/dev/shm", f"{min(sizes.values()) / 2**30:.1f} GiB or more", against, fix)

    def limits(self) -> Check:
        against: dict[str, str] = {}
        for node, r in self.looked.items():
            locked, files = r["memlock"][0], r["nofile"][1]
            if r["infiniband"] and 0 <= locked < LEAST_MEMLOCK:
                against[node] = f"memlock is {locked / 2**10:.0f} KiB, and there is InfiniBand"
            elif 0 <= files < LEAST_FILES:
                against[node] = f"nofile is {files}"
        fix = (
            "LimitMEMLOCK=infinity and LimitNOFILE=1048576 for slurmd, PropagateResourceLimitsExcept="
            "MEMLOCK,NOFILE in slurm.conf: ask the site"
        )
        if not self.looked:
            return Check("limits", None, "not checked: no node answered", "see nodes")
        ib = sum(bool(r["infiniband"]) for r in self.looked.values())
        return _check("limits", f"memlock and nofile; InfiniBand on {ib} nodes", against, fix)

    def lock(self) -> Check:
        fix = (
            "Lustre: mount with -o flock (not localflock); NFS: version 4, or lockd with 3; or another "
            "file_root"
        )
        holder = self.wanted.nodes[0]
        held = self.of("held")
        if not held:
            why = f"not checked: {holder}, which was to hold the lock, did not answer"
            return Check("flock", None, why, "see nodes")
        if held[0]["error"]:
            return Check(
                "flock", False, f"{holder} can't lock a file there: {held[0]['error']}", fix
            )
        tried = {node: str(r["lock"]) for node, r in self.looked.items() if node != holder}
        if not tried:
            return Check("flock", None, "not checked: no other node answered", "see nodes")
        for node, outcome in sorted(tried.items()):
            if outcome != "held":
                what = f"can't lock a file there: {outcome}"
                if outcome in ("", "None"):
                    what = f"got a lock that {holder} held at that time"
                return Check("flock", False, f"{node} {what}", fix)
        return Check("flock", True, f"a lock held on {holder} is seen by {len(tried)} other nodes")

    def skew(self) -> Check:
        begun = {step.name: step.begun for step in self.seen.steps}
        against: dict[str, str] = {}
        for r in self.seen.records:
            ahead, behind = r["at"] - r["heard"], begun[r["step"]] - r["at"]
            if max(ahead, behind) > MOST_SKEW_S:
                side = "ahead of" if ahead > behind else "behind"
                words = f"its clock is {max(ahead, behind):.1f} s or more {side} the one here"
                against.setdefault(str(r["node"]), words)
        if not self.looked:
            return Check("clocks of nodes", None, "not checked: no node answered", "see nodes")
        fix = "ask the site to check NTP there"
        return _check("clocks of nodes", "agree, as far as answers tell", against, fix)

    def matmul(self) -> Check:
        return self._rated(
            "matmul",
            {(str(r["node"]), int(r["gpu"])): float(r["flops"]) for r in self.of("matmul")},
            self._broken(before="all-reduce"),
            lambda rate: f"{rate / 1e12:.3g} TFLOP/s",
            "bfloat16, 8192 × 8192"
            if self.wanted.device == "cuda"
            else "on CPUs, says nothing of GPUs",
        )

    def inside(self) -> Check:
        kinds = self.kind_of()
        rates = {
            (str(r["node"]), -1): self._bus(r) for r in self.of("reduce", step="look")
        }  # fmt: skip
        if self.wanted.processes < 2:
            return Check("all-reduce in a node", True, "one GPU a node: nothing to reduce")
        return self._rated(
            "all-reduce in a node",
            rates,
            self._broken(doing="all-reduce"),
            _gigabytes,
            self._how(),
            kinds={key: kinds.get((key[0], 0), "") for key in rates},
        )

    def pairs(self) -> Check:
        name = "all-reduce of pairs"
        rates = {
            tuple(r["nodes"]): self._bus(r)
            for r in self.of("reduce", step="reduce")
            if len(r["nodes"]) == 2
        }
        failed = self._failed_groups(2)
        nodes = able(self.wanted.nodes, self.of_look())
        if not rates and not failed:
            why = "not checked: fewer than two nodes were able to take part"
            return Check(name, None, why, "see the lines above")
        best = {
            node: max((rate for pair, rate in rates.items() if node in pair), default=0.0)
            for node in nodes
        }
        fix = (
            "compare their cables, switches and NCCL's words (NCCL_DEBUG=INFO); leave the node out"
        )
        against: dict[str, str] = {}
        if rates:
            below = BELOW[self.wanted.device]
            for node, (rate, median) in slow(best, below=below).items():
                why = next((words for pair, words in failed.items() if node in pair), "")
                of = f", the median node {_gigabytes(median)}"
                against[node] = f"at best {_gigabytes(rate)}{of}" if rate else f"none worked: {why}"
        links = self._bad_links(rates, failed, against, best)
        if links and not against:
            return Check(name, False, "; ".join(links), fix)
        return _check(name, f"{_span(rates.values(), _gigabytes)}; {self._how()}", against, fix)

    def _bad_links(
        self,
        rates: Mapping[tuple[str, ...], float],
        failed: Mapping[tuple[str, ...], str],
        against: Collection[str],
        best: Mapping[str, float],
    ) -> list[str]:
        """Returns pairs that failed or are slow although neither node is."""
        median = statistics.median(best.values()) if best else 0.0
        bad = {pair: words for pair, words in failed.items() if not set(pair) & set(against)}
        for pair, rate in rates.items():
            if rate < BELOW[self.wanted.device] * median and not set(pair) & set(against):
                bad[pair] = f"{_gigabytes(rate)}, the median node {_gigabytes(median)}"
        return [f"{' and '.join(pair)}: {words}" for pair, words in sorted(bad.items())]

    def all_nodes(self) -> Check:
        name = "all-reduce of all"
        nodes = able(self.wanted.nodes, self.of_look())
        if len(nodes) < 3:
            ok = True if len(nodes) == 2 else None
            why = "two nodes are a pair" if ok else "not checked: too few nodes were able"
            return Check(name, ok, why, "see the lines above")
        found = [r for r in self.of("reduce", step="reduce") if len(r["nodes"]) > 2]
        if found:
            what = f"{_gigabytes(self._bus(found[0]))} over {len(nodes)} nodes; {self._how()}"
            return Check(name, True, what)
        failed = self._failed_groups(len(nodes))
        why = next(iter(failed.values()), f"it was not done in {self.wanted.reduce_s:.0f} s")
        return Check(name, False, f"over {len(nodes)} nodes: {why}", "NCCL_DEBUG=INFO says more")

    def of_look(self) -> list[Record]:
        return [r for r in self.seen.records if r["step"] == "look"]

    def _rated(
        self,
        name: str,
        rates: Mapping[tuple[str, int], float],
        broken: Mapping[str, str],
        words: Any,
        how: str,
        kinds: Mapping[tuple[str, int], str] | None = None,
    ) -> Check:
        """Evaluates rates by (node, GPU or -1), each within its kind. Those of CPUs are only reported:
        they follow what else the node computes.
        """
        kinds = self.kind_of() if kinds is None else kinds
        against = dict(broken)
        judged = rates if self.wanted.device == "cuda" else {}
        for kind in sorted({kinds.get(key, "") for key in judged}):
            mine = {key: rate for key, rate in judged.items() if kinds.get(key, "") == kind}
            for (node, gpu), (rate, median) in slow(mine, below=BELOW["cuda"]).items():
                which = f"GPU {gpu} " if gpu >= 0 else ""
                against.setdefault(node, f"{which}{words(rate)}, the median is {words(median)}")
        if not rates and not against:
            return Check(name, None, "not checked: nobody came so far", "see the lines above")
        fix = "leave the node out, and ask the site to check it: cooling, power, cables, NVLink"
        return _check(name, f"{_span(rates.values(), words)}; {how}", against, fix)

    def _broken(self, *, before: str = "", doing: str = "") -> dict[str, str]:
        """Returns node → which process failed or fell silent during its own checks, before or while
        ``doing``."""
        found: dict[str, str] = {}
        for r in self.of_look():
            if r["what"] not in ("broken", "silent"):
                continue
            if (before and r["doing"] == before) or (doing and r["doing"] != doing):
                continue
            found.setdefault(str(r["node"]), f"GPU {r['gpu']}: {self._end_of(r)}")
        return found

    def _end_of(self, record: Record) -> str:
        if record["what"] == "broken":
            return f"{record['doing']} failed: {record['why']}"
        limit_s = self.wanted.look_s if record["step"] == "look" else self.wanted.reduce_s
        return f"{record['doing']} was not done after {limit_s:.0f} s"

    def _failed_groups(self, size: int) -> dict[tuple[str, ...], str]:
        """Returns the groups of ``size`` nodes whose all-reduce gave no number → why, in one rank's
        words."""
        done = {tuple(r["nodes"]) for r in self.of("reduce")}
        found: dict[tuple[str, ...], str] = {}
        for r in sorted(self.seen.records, key=lambda r: r["what"] == "silent"):
            group = tuple(r.get("nodes", ()))
            ill = r["what"] in ("broken", "silent") and r["step"] != "look"
            if ill and len(group) == size and group not in done:
                found.setdefault(group, f"{self._end_of(r)} (on {r['node']})")
        return found

    def _bus(self, record: Record) -> float:
        return bus_bandwidth(record["bytes"], record["seconds"], record["world"])

    def _how(self) -> str:
        library = "NCCL" if self.wanted.device == "cuda" else "gloo, says nothing of GPUs"
        mebibytes = self.wanted.num_bytes >> 20
        return f"{library}, bus bandwidth 2(n-1)/n · {mebibytes} MiB / s"


def _torch_problem(record: Record, driver: str) -> str:
    version, cuda = record["version"], record["cuda"]
    if cuda is None:
        return f"torch {version} was built without CUDA"
    if not record["available"] or record.get("error"):
        why = record.get("error", "")
        least = too_old(driver, cuda)
        if least is not None:
            why = f"it needs driver {least} or later, this is {driver}"
        return f"torch {version} for CUDA {cuda} finds no GPU (driver {driver or 'unknown'}): {why}"
    if not has_code_for(record["capability"], record["archs"]):
        major, minor = record["capability"]
        known = " ".join(record["archs"])
        return f"torch {version} has no code for {record['name']} (sm_{major}{minor}), only {known}"
    return ""


def _check(name: str, well: str, against: Mapping[str, str], fix: str) -> Check:
    if not against:
        return Check(name, True, well)
    told = "; ".join(f"{node}: {why}" for node, why in sorted(against.items()))
    return Check(name, False, told, fix, dict(against))


def _span(rates: Iterable[float], words: Any) -> str:
    """Formats the lowest and the highest rate."""
    found = sorted(rates)
    low_high = list(dict.fromkeys(words(rate) for rate in (found[:1] + found[-1:])))
    return " to ".join(low_high) if low_high else "no number"


def _gigabytes(rate: float) -> str:
    return f"{rate / 1e9:.3g} GB/s"
