"""What `realsys doctor` runs on a compute node: looks, and prints one line of JSON.

It is not imported there: its text goes to whichever Python is found, on the host or in an image, which
may lack realsys. So it uses the standard library only, of Python 3.6 and later, and raises nothing.
Its one argument is a JSON object: file_root, canary (a name), ports, interface, packages.
"""

import json
import os
import shutil
import socket
import subprocess
import sys
import time

MARK = "REALSYS-CANARY "
PORTS_TRIED = 32


def look(wanted):  # type: ignore[no-untyped-def]
    """All findings of this node, by name."""
    begin = time.time()
    found = {
        "host": socket.gethostname(),
        "node": os.environ.get("SLURMD_NODENAME", ""),
        "python": "%d.%d.%d" % sys.version_info[:3],
        "executable": sys.executable,
        "procid": os.environ.get("SLURM_PROCID"),
        "localid": os.environ.get("SLURM_LOCALID"),
        "visible": os.environ.get("CUDA_VISIBLE_DEVICES", os.environ.get("ROCR_VISIBLE_DEVICES")),
        "programs": [
            p for p in ("apptainer", "enroot", "nvidia-smi", "rocm-smi") if shutil.which(p)
        ],
        "shared": shared(wanted["file_root"], wanted["canary"]),
        "packages": {name: version(name) for name in wanted["packages"]},
        "ports": ports(wanted["ports"]),
        "addresses": addresses(),
        "gpus": gpus(),
    }
    found["begin"], found["end"] = begin, time.time()
    return found


def shared(root, name):  # type: ignore[no-untyped-def]
    """What the login node's file says, and whether we could write ours; an error's text if not."""
    found = {"read": None, "wrote": False, "error": ""}
    try:
        with open(os.path.join(root, name + ".login")) as file:
            found["read"] = file.read()
        with open(os.path.join(root, name + ".node"), "w") as file:
            file.write(found["read"][::-1])
        found["wrote"] = True
    except OSError as error:
        found["error"] = str(error)
    return found


def version(name):  # type: ignore[no-untyped-def]
    """Of an installed package; "?" if it can be imported without metadata, None if not at all."""
    try:
        from importlib import metadata, util

        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            return "?" if util.find_spec(name) else None
    except Exception:  # whatever is broken in there: the package can't be used
        return None


def ports(wanted):  # type: ignore[no-untyped-def]
    """[tried, bound] of a sample of the range."""
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


def addresses():  # type: ignore[no-untyped-def]
    """[name, IPv4 address] of every interface that has one, see netdevice(7)."""
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
    return found


def gpus():  # type: ignore[no-untyped-def]
    """Names of the GPUs that the driver's program lists; None where there is no such program."""
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


if __name__ == "__main__":
    print(MARK + json.dumps(look(json.loads(sys.argv[1]))), flush=True)
