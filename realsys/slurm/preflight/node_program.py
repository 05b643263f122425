"""The program that the preflight runs on each node: checks, measures, and prints records as lines.

It is not imported there: its text goes to whichever Python is found, on the host or in an image, which may
lack realsys. So it uses the standard library only, of Python 3.7 and later, and torch in processes of
their own, one a GPU: what hangs in a driver hangs alone, and this one still says so in time.
Its one argument is a JSON object, see rounds.py. A record is cut into short lines, because Slurm keeps
lines of several tasks apart up to a kilobyte only.
"""

from __future__ import annotations

import json
import os
import queue
import re
import resource
import shutil
import socket
import subprocess
import sys
import threading
import time
from typing import Any

MARK = "REALSYS-PREFLIGHT "
PIECE = 600  # characters of a record in one line
SMI_S = 30.0
# As `nvidia-smi --help-query-gpu` and `--help-query-remapped-rows` list them. What a driver does not know
# is left out and asked for again; clocks_throttle_reasons is the older name of clocks_event_reasons.
GPU_FIELDS = (
    "index", "uuid", "name", "driver_version", "compute_cap", "memory.total", "mig.mode.current",
    "ecc.mode.current", "ecc.errors.uncorrected.volatile.total", "ecc.errors.corrected.volatile.total",
    "retired_pages.pending", "clocks.current.sm", "clocks.max.sm", "temperature.gpu", "power.draw",
    "pcie.link.width.current", "pcie.link.width.max",
    *("clocks_event_reasons." + name for name in (
        "hw_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown", "sw_thermal_slowdown",
    )),
)  # fmt: skip
ROW_FIELDS = (
    "gpu_uuid", "remapped_rows.correctable", "remapped_rows.uncorrectable",
    "remapped_rows.pending", "remapped_rows.failure",
)  # fmt: skip
_UNKNOWN = re.compile(r'Field "([^"]+)" is not a valid field')
_OLD_NAMES = {"clocks_event_reasons.": "clocks_throttle_reasons."}

_lock = threading.Lock()
_serial = [0]
_program = os.urandom(4).hex()  # programs of two containers on one node may have the same pid


def node_name() -> str:
    """Returns Slurm's name of this node; on a machine without Slurm the host name."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname().partition(".")[0]


def tell(what: str, **record: Any) -> None:
    """Prints one record."""
    text = json.dumps({"node": node_name(), "what": what, "at": time.time(), **record})
    pieces = [text[i : i + PIECE] for i in range(0, len(text), PIECE)]
    with _lock:
        _serial[0] += 1
        name = f"{node_name()}.{_program}.{_serial[0]}"
        for i, piece in enumerate(pieces):
            sys.stdout.write(f"{MARK}{name} {i + 1}/{len(pieces)} {piece}\n")
        sys.stdout.flush()


# ---- the node's own process: no torch ---------------------------------------------------------


def hold(request: dict[str, Any]) -> None:
    """Holds the lock until it is ended; reports whether it has it."""
    error, handle = try_lock(request["lock"])
    tell("held", error=error)
    if not error:
        time.sleep(request["limit_s"])
    os.close(handle) if handle >= 0 else None


def try_lock(path: str) -> tuple[str, int]:
    """Tries to lock the file; returns (why not, the open file): "" if locked, "held" if another process
    has it."""
    import fcntl

    handle = -1
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return "held", handle
    except OSError as error:
        return str(error), handle
    return "", handle


def look(request: dict[str, Any]) -> None:
    """Checks and measures everything on this node that needs no other one."""
    deadline = time.monotonic() + request["limit_s"]
    tell("node", **host_facts(request))
    asked = [in_background("before")]
    visible = devices(request)
    jobs = [{**request, "stage": "rank", "local": i} for i in range(len(visible))]
    group = {"nodes": [node_name()], "address": "127.0.0.1", "port": free_ports(None, 1)[0]}
    run_ranks(
        jobs, visible, group, deadline, request, at_load=lambda: asked.append(in_background("load"))
    )
    for thread in asked:
        thread.join(max(1.0, deadline - time.monotonic()))
    tell("end", of="look")


def reduce(request: dict[str, Any]) -> None:
    """Runs our part of an all-reduce with other nodes."""
    mine = [group for group in request["groups"] if node_name() in group["nodes"]]
    if mine:
        visible = devices(request)
        jobs = [{**request, "stage": "rank", "local": i, "groups": []} for i in range(len(visible))]
        deadline = time.monotonic() + request["limit_s"]
        run_ranks(jobs, visible, mine[0], deadline, request)
    tell("end", of="reduce")


def host_facts(request: dict[str, Any]) -> dict[str, Any]:
    """Returns limits, shared memory, the lock, and the address for other nodes."""
    lock = None
    if request["lock"]:
        lock, handle = try_lock(request["lock"])
        if handle >= 0:
            os.close(handle)
    try:
        room = os.statvfs("/dev/shm")
        shm = [room.f_blocks * room.f_frsize, room.f_bavail * room.f_frsize]
    except OSError:
        shm = [0, 0]
    return {
        "host": socket.gethostname(),
        "python": sys.executable,
        "visible": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "nofile": list(resource.getrlimit(resource.RLIMIT_NOFILE)),
        "memlock": list(resource.getrlimit(resource.RLIMIT_MEMLOCK)),
        "shm": shm,
        "infiniband": os.path.isdir("/dev/infiniband"),
        "lock": lock,
        "address": address(request["interface"], request["nodes"]),
        "ports": free_ports(request["ports"], 8),
    }


def devices(request: dict[str, Any]) -> list[str]:
    """Returns entries of CUDA_VISIBLE_DEVICES, one per process; made up if GPUs are not used."""
    if request["device"] == "cpu":
        return [""] * request["processes"]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return [str(i) for i in range(request["processes"])]
    return [entry.strip() for entry in visible.split(",") if entry.strip()]


def in_background(when: str) -> threading.Thread:
    """Queries the driver in a thread."""
    thread = threading.Thread(target=tell_smi, args=(when,), name="nvidia-smi " + when, daemon=True)
    thread.start()
    return thread


def tell_smi(when: str) -> None:
    """Prints nvidia-smi's records of the GPUs."""
    if shutil.which("nvidia-smi") is None:
        tell("smi", when=when, error="no nvidia-smi on PATH", gpus="", rows="")
        return
    gpus, error = smi("--query-gpu=", list(GPU_FIELDS))
    rows = "" if error or when != "before" else smi("--query-remapped-rows=", list(ROW_FIELDS))[0]
    tell("smi", when=when, error=error, gpus=gpus, rows=rows)


def smi(option: str, fields: list[str]) -> tuple[str, str]:
    """Queries nvidia-smi; returns (CSV with its header, "" or the error), without fields unknown to this
    driver."""
    while fields:
        code, text = answer(["nvidia-smi", option + ",".join(fields), "--format=csv,nounits"])
        unknown = _UNKNOWN.search(text)
        if code == 0:
            return text, ""
        if unknown is None or unknown.group(1) not in fields:
            return "", text.strip()[:500] or f"nvidia-smi ended with {code}"
        name = unknown.group(1)
        new = [name.replace(a, b) for a, b in _OLD_NAMES.items() if name.startswith(a)]
        at = fields.index(name)
        fields[at : at + 1] = new
    return "", "it knows none of the fields"


def answer(argv: list[str]) -> tuple[int, str]:
    """Runs a command; returns exit status and output. One that hangs in the driver can't be killed: it is
    abandoned."""
    try:
        process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    except OSError as error:
        return 1, str(error)
    try:
        output, _ = process.communicate(timeout=SMI_S)
    except subprocess.TimeoutExpired:
        process.kill()
        return 124, f"nvidia-smi did not answer in {SMI_S:g} s: the driver hangs"
    return process.returncode, output.decode("utf-8", "replace")


def run_ranks(
    jobs: list[dict[str, Any]],
    visible: list[str],
    group: dict[str, Any],
    deadline: float,
    request: dict[str, Any],
    at_load: Any = None,
) -> None:
    """Starts a process per GPU, passes on their records, and reports those not done by the deadline."""
    count, first = len(jobs), group["nodes"].index(node_name()) * len(jobs)
    said: queue.Queue[tuple[int, str]] = queue.Queue()
    running = {}
    for i, job in enumerate(jobs):
        rank_job = {**job, "rank": first + i, "world": count * len(group["nodes"]), "group": group}
        running[i] = start_rank(rank_job, visible[i], said, request)
    doing = dict.fromkeys(running, "start")
    loaded, asked = set(), at_load is None
    while running and time.monotonic() < deadline:
        try:
            i, line = said.get(timeout=0.2)
        except queue.Empty:
            continue
        if line.startswith("@doing "):
            doing[i] = line[7:].strip()
            loaded |= {i} if doing[i] == "matmul" else set()
        elif line.startswith("@tell "):
            record = json.loads(line[6:])
            tell(record.pop("what"), gpu=i, nodes=group["nodes"], **record)
        elif not line:
            process = running.pop(i)
            code = process.wait()
            if code != 0 and doing[i] != "end":
                why = last_words(process, code)
                tell("broken", gpu=i, nodes=group["nodes"], doing=doing[i], why=why)
        if not asked and loaded and len(loaded) + (count - len(running)) >= count:
            asked = True
            at_load()
    for i, process in running.items():
        tell("silent", gpu=i, nodes=group["nodes"], doing=doing[i])
        process.kill()


def start_rank(job: dict[str, Any], visible: str, said: Any, request: dict[str, Any]) -> Any:
    """Starts a process of this program for one GPU; its lines go to ``said``, the empty one at its end."""
    environment = {**os.environ, **request["environment"]}
    if request["device"] == "cuda":
        environment["CUDA_VISIBLE_DEVICES"] = visible
    name = interface_of(address(request["interface"], request["nodes"]))
    if name and len(job["group"]["nodes"]) > 1:
        environment.setdefault("GLOO_SOCKET_IFNAME", name)
        environment.setdefault("NCCL_SOCKET_IFNAME", "=" + name)  # without it a prefix of names
    environment.setdefault("OMP_NUM_THREADS", "1")
    process = subprocess.Popen(
        [sys.executable, "-c", own_text(), json.dumps({**job, "environment": {}})],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        universal_newlines=True,
        errors="replace",
    )
    words: list[str] = []
    process.words = words  # type: ignore[attr-defined]
    i = job["local"]

    def errors() -> None:
        for line in process.stderr or ():
            words.append(line.rstrip())
            del words[:-20]

    def lines() -> None:
        for line in process.stdout or ():
            said.put((i, line))
        listener.join(2.0)
        said.put((i, ""))

    listener = threading.Thread(target=errors, name=f"errors of rank {i}", daemon=True)
    listener.start()
    threading.Thread(target=lines, name=f"lines of rank {i}", daemon=True).start()
    return process


def own_text() -> str:
    """Returns this program's text from its own command line, behind -c."""
    with open("/proc/self/cmdline", "rb") as cmdline:
        words = cmdline.read().split(b"\0")
    if b"-c" in words[:3]:
        return words[words.index(b"-c") + 1].decode("utf-8")
    with open(__file__, encoding="utf-8") as own:
        return own.read()


def last_words(process: Any, code: int) -> str:
    """Returns why a rank ended, from its last line of error."""
    words = [line for line in process.words if line.strip()]
    return (words[-1] if words else f"it ended with {code}")[:300]


def address(interface: str, nodes: list[str]) -> str:
    """Returns the address for other nodes: of the site's interface or subnet, else towards one of them."""
    found = addresses()
    for name, mine in found:
        if interface and (interface == name or ("/" in interface and within(mine, interface))):
            return mine
    here = {node_name(), socket.gethostname().partition(".")[0]}
    for node in [one for one in nodes if one not in here]:
        try:
            target = socket.getaddrinfo(node, 9, socket.AF_INET, socket.SOCK_DGRAM)[0][4]
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
                probe.connect(target)  # sends nothing: it only asks the routing table
                mine = str(probe.getsockname()[0])
            if not mine.startswith("127."):
                return mine
        except OSError:
            continue
    return "127.0.0.1"


def within(one: str, subnet: str) -> bool:
    import ipaddress

    return ipaddress.ip_address(one) in ipaddress.ip_network(subnet, strict=False)


def addresses() -> list[tuple[str, str]]:
    """Returns (name, IPv4 address) of every interface that has one, see netdevice(7)."""
    import fcntl
    import struct

    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            try:
                asked = struct.pack("256s", name.encode()[:15])
                reply = fcntl.ioctl(any_socket.fileno(), 0x8915, asked)
                found.append((name, socket.inet_ntoa(reply[20:24])))
            except OSError:
                continue
    return found


def interface_of(mine: str) -> str:
    """Returns the name of the interface with that address; "" if there is none."""
    return next((name for name, found in addresses() if found == mine), "")


def free_ports(wanted: Any, count: int) -> list[int]:
    """Returns ``count`` ports that can be bound now, of the range if there is one. The first one differs
    from call to call, so that two doctors on one node don't collide."""
    if not wanted:
        found = []
        for _ in range(count):
            with socket.socket() as one:
                one.bind(("", 0))
                found.append(int(one.getsockname()[1]))
        return found
    low, high = wanted
    start = os.getpid() * 7919 % (high - low + 1)
    found = []
    for i in range(high - low + 1):
        port = low + (start + i) % (high - low + 1)
        with socket.socket() as one:
            try:
                one.bind(("", port))
                found.append(port)
            except OSError:
                continue
        if len(found) == count:
            break
    return found


# ---- a rank: torch ----------------------------------------------------------------------------


def rank(job: dict[str, Any]) -> None:
    """Runs one GPU (or CPU process): torch's facts, the rate of a matmul, and its part of an all-reduce."""
    out, number = os.dup(1), job["rank"]
    os.dup2(2, 1)  # what libraries print is no record of ours

    def put(line: str) -> None:
        os.write(out, (line + "\n").encode())

    put("@doing import torch")
    import torch

    cuda = job["device"] == "cuda"
    if job["matmul"]:
        put("@doing CUDA")
        facts = torch_facts(torch, cuda)
        put("@tell " + json.dumps({"what": "torch", **facts}))
        if "error" in facts:
            raise RuntimeError(facts["error"])
    if cuda:
        torch.cuda.set_device(0)
    if job["matmul"]:
        put("@doing matmul")
        seconds, flops = matmul_seconds(torch, cuda, job["matmul_s"])
        put("@tell " + json.dumps({"what": "matmul", "flops": flops / seconds}))
    if job["world"] > 1:
        put("@doing all-reduce")
        seconds, size = allreduce_seconds(torch, cuda, job)
        if number == 0:
            record = {"what": "reduce", "world": job["world"], "seconds": seconds, "bytes": size}
            put("@tell " + json.dumps(record))
    put("@doing end")
    if job["world"] > 1:
        try:
            torch.distributed.barrier()  # who leaves early breaks the others' last sums
        except Exception:  # the numbers are told already
            pass
    os._exit(0)  # libraries' own endings may hang


def torch_facts(torch: Any, cuda: bool) -> dict[str, Any]:
    """Returns what torch was built for and what it finds; an error's text if CUDA does not start."""
    found: dict[str, Any] = {
        "version": torch.__version__,
        "cuda": torch.version.cuda,
        "available": False,
    }
    if not cuda:
        return found
    found["available"] = torch.cuda.is_available()
    try:
        torch.cuda.init()
        found["count"] = torch.cuda.device_count()
        found["name"] = torch.cuda.get_device_name(0)
        found["capability"] = list(torch.cuda.get_device_capability(0))
        found["archs"] = torch.cuda.get_arch_list()
        if torch.distributed.is_nccl_available():
            found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    except Exception as error:  # CUDA's own words are what is wanted
        found["error"] = str(error).splitlines()[0][:300] if str(error) else type(error).__name__
    return found


def matmul_seconds(torch: Any, cuda: bool, lasts_s: float) -> tuple[float, float]:
    """Measures (seconds, floating-point operations) of one product, bfloat16 on a GPU: the median of
    many."""
    n, dtype = (8192, torch.bfloat16) if cuda else (256, torch.float32)
    a = torch.ones(n, n, dtype=dtype, device="cuda" if cuda else "cpu")
    b = a @ a
    low, high = float(b.min()), float(b.max())
    if low != n or high != n:  # a power of two: exact in every type
        raise RuntimeError(f"a product of ones is {low} to {high}, not {n}")
    a.normal_()  # ones need less power than weights do
    times: list[float] = []
    began = time.monotonic()
    while len(times) < 5 or time.monotonic() - began < lasts_s:
        synchronize(torch, cuda)
        start = time.perf_counter()
        for _ in range(4):
            a @ a
        synchronize(torch, cuda)
        times.append((time.perf_counter() - start) / 4)
    late = sorted(times[len(times) // 2 :])  # warm: clocks have settled
    return late[len(late) // 2], 2.0 * n**3


def allreduce_seconds(torch: Any, cuda: bool, job: dict[str, Any]) -> tuple[float, int]:
    """Measures (seconds, bytes) of one all-reduce: the slowest rank's, the mean over as many as fit in
    the time."""
    import datetime

    dist, group = torch.distributed, job["group"]
    limit = datetime.timedelta(seconds=job["limit_s"])
    options = {"device_id": torch.device("cuda", 0)} if cuda else {}
    store = dist.TCPStore(
        group["address"], group["port"], job["world"], job["rank"] == 0, timeout=limit
    )
    dist.init_process_group(
        "nccl" if cuda else "gloo", store=store, rank=job["rank"], world_size=job["world"],
        timeout=limit, **options,
    )  # fmt: skip
    where = "cuda" if cuda else "cpu"
    data = torch.full((job["bytes"] // 4,), float(job["rank"] + 1), device=where)
    dist.all_reduce(data)
    wanted = job["world"] * (job["world"] + 1) / 2
    low, high = float(data.min()), float(data.max())
    if low != wanted or high != wanted:
        raise RuntimeError(f"the sum is {low} to {high}, not {wanted}")
    data.zero_()
    once = timed(torch, cuda, data, 1, where)
    rounds = max(1, min(20, int(job["reduce_s"] / max(once, 1e-6))))
    return timed(torch, cuda, data, rounds, where), data.numel() * 4


def timed(torch: Any, cuda: bool, data: Any, rounds: int, where: str) -> float:
    """Returns the seconds of one all-reduce, the same number on all ranks."""
    torch.distributed.barrier()
    synchronize(torch, cuda)
    start = time.perf_counter()
    for _ in range(rounds):
        torch.distributed.all_reduce(data)
    synchronize(torch, cuda)
    seconds = torch.tensor(
        [(time.perf_counter() - start) / rounds], dtype=torch.float64, device=where
    )
    torch.distributed.all_reduce(seconds, op=torch.distributed.ReduceOp.MAX)
    return float(seconds)


def synchronize(torch: Any, cuda: bool) -> None:
    """Waits until the GPU has finished its work."""
    if cuda:
        torch.cuda.synchronize()


def main() -> None:
    """Runs one stage."""
    request = json.loads(sys.argv[1])
    stages = {"hold": hold, "look": look, "reduce": reduce, "rank": rank}
    stages[request["stage"]](request)
    sys.stdout.flush()
    os._exit(0)  # a thread that hangs in a driver must not delay the others' numbers


if __name__ == "__main__":
    main()
