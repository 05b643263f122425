"""The program that `realsys doctor` runs on a compute node: examines it and prints one line of JSON.

It is not imported there: its source text is passed to whichever Python is found, on the host or in an
image, and realsys may be missing. So it uses only the standard library of Python 3.7 and later, and
raises nothing. Its one argument is a JSON object: file_root, probe_file (a stem), store (see
store_checks.py), ports, packages.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import socket
import subprocess
import sys
import time
from typing import Any

MARK = "REALSYS-PROBE "
PORTS_TRIED = 32
CONNECT_S = 5.0


def look(wanted: dict[str, Any]) -> dict[str, Any]:
    """Collects all findings about this node, by name."""
    begin = time.time()
    found: dict[str, Any] = {
        "host": socket.gethostname(),
        "node": os.environ.get("SLURMD_NODENAME", ""),
        "python": ".".join(map(str, sys.version_info[:3])),
        "executable": sys.executable,
        "procid": os.environ.get("SLURM_PROCID"),
        "localid": os.environ.get("SLURM_LOCALID"),
        "visible": os.environ.get("CUDA_VISIBLE_DEVICES", os.environ.get("ROCR_VISIBLE_DEVICES")),
        "programs": [
            p for p in ("apptainer", "enroot", "nvidia-smi", "rocm-smi") if shutil.which(p)
        ],
        "shared": shared(wanted["file_root"], wanted["probe_file"]),
        "store": store(wanted["store"]),
        "packages": {name: version(name) for name in wanted["packages"]},
        "ports": ports(wanted["ports"]),
        "addresses": addresses(),
        "gpus": gpus(),
        "kernel": platform.release(),
        "pidfd": pidfd(),
        "walls": walls(),
    }
    found["begin"], found["end"] = begin, time.time()
    return found


def shared(root: str, name: str) -> dict[str, Any]:
    """Reads the login node's file and writes this node's own; "error" has the text if that failed."""
    found: dict[str, Any] = {"read": None, "wrote": False, "error": "", "locks": ""}
    try:
        with open(os.path.join(root, name + ".login")) as file:
            found["read"] = file.read()
        with open(os.path.join(root, name + ".node"), "w") as file:
            file.write(found["read"][::-1])
        found["wrote"] = True
        found["locks"] = locks(os.path.join(root, name + ".login"))
    except OSError as error:
        found["error"] = str(error)
    return found


def locks(path: str) -> str:
    """Tests a lock that the login node holds: "kept", "free", or an error's text."""
    import fcntl

    try:
        with open(path, "r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return "free"
    except BlockingIOError:
        return "kept"
    except OSError as error:
        return str(error)


def store(wanted: dict[str, Any]) -> list[str]:
    """Lists what keeps tasks on this node from using the store, as sentences."""
    found = []
    if wanted["folder"] is not None and not writable(wanted["folder"]):
        found.append("it can't be written there")
    for program in wanted["programs"]:
        if shutil.which(program) is None:
            found.append("no program " + program + " on PATH there")
    for path in wanted["files"]:
        try:
            with open(path, "rb"):
                pass
        except OSError as error:
            found.append(path + " can't be read there: " + str(error.strerror))
    for endpoint in wanted["endpoints"]:
        host, _, port = endpoint.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_S).close()
        except OSError as error:
            found.append(endpoint + " is not reached from there: " + str(error))
    return found


def writable(folder: str) -> bool:
    """Whether the folder can be written, or created."""
    while not os.path.exists(folder) and folder not in ("", "/"):
        folder = os.path.dirname(folder)
    return os.path.isdir(folder) and os.access(folder, os.W_OK | os.X_OK)


def version(name: str) -> str | None:
    """Returns an installed package's version; "?" if it can be imported but has no metadata, None if not
    installed.
    """
    try:
        from importlib import metadata, util

        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            return "?" if util.find_spec(name) else None
    except Exception:  # any failure means that the package can't be used
        return None


def ports(wanted: list[int]) -> list[int]:
    """Binds a sample of the port range and returns [tried, bound]."""
    low, high = wanted
    step = max(1, (high - low) // PORTS_TRIED)
    tried = range(low, high + 1, step)[:PORTS_TRIED]
    bound = 0
    for port in tried:
        with socket.socket() as one:
            try:
                one.bind(("", port))
                bound += 1
            except OSError:
                pass
    return [len(tried), bound]


def addresses() -> list[list[str]]:
    """Lists [name, address] of every interface that has one: IPv4, see netdevice(7), then IPv6."""
    import fcntl
    import struct

    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            try:
                reply = fcntl.ioctl(
                    any_socket.fileno(), 0x8915, struct.pack("256s", name.encode()[:15])
                )
                found.append([name, socket.inet_ntoa(reply[20:24])])
            except OSError:
                continue
    try:
        with open("/proc/net/if_inet6") as file:
            lines = [line.split() for line in file]
    except OSError:
        lines = []
    for address, _, _, scope, _, name in lines:
        if scope == "00":  # global scope: valid beyond one link
            found.append([name, socket.inet_ntop(socket.AF_INET6, bytes.fromhex(address))])
    return found


def gpus() -> list[Any] | None:
    """Queries the driver's program for [count, output]; None if there is no such program."""
    for argv in (["nvidia-smi", "-L"], ["rocm-smi", "--showproductname", "--csv"]):
        if shutil.which(argv[0]):
            try:
                done = subprocess.run(
                    argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=20
                )
            except (OSError, subprocess.SubprocessError) as error:
                return [0, str(error)]
            text = done.stdout.decode("utf-8", "replace").strip()
            lines = [line for line in text.splitlines() if line.lower().startswith(("gpu", "card"))]
            return [len(lines) if done.returncode == 0 else 0, text[:300]]
    return None


def pidfd() -> bool | None:
    """Tests whether the kernel has pidfd_open(2); None if that can't be determined."""
    import ctypes
    import errno

    try:
        call = ctypes.CDLL(None, use_errno=True).syscall
        descriptor = call(434, os.getpid(), 0)
    except (OSError, AttributeError):
        return None
    if descriptor < 0:
        return False if ctypes.get_errno() == errno.ENOSYS else None
    os.close(descriptor)
    return True


def walls() -> dict[str, str]:
    """Returns what the kernel lacks to contain reward rules, and what a rule can do therefore."""
    import ctypes
    import errno

    found = {}
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.syscall(444, None, 0, 1) < 1:  # landlock_create_ruleset: its version
            found["Landlock"] = "can read and write what you can"
        # A filter that can't be read: EFAULT where the kernel knows filters
        if libc.prctl(22, 2, None, 0, 0) != -1 or ctypes.get_errno() != errno.EFAULT:
            found["seccomp filters"] = "can open connections and start programs"
    except (OSError, AttributeError):
        pass
    return found


if __name__ == "__main__":
    sys.stdout.write(MARK + json.dumps(look(json.loads(sys.argv[1]))) + "\n")
