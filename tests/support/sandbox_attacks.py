"""Attempts to break out of a box, or to bring the node down from one: the rows of docs/sandbox.md.

Each is Python, run warm after PRELUDE, or a shell line. ``refused`` prints "refused" for what fails
and ESCAPED for what works. A row that should come to its end must print its own "done": a program
that breaks off for another reason has shown nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

PRELUDE = """
import ctypes, errno, os, platform, resource, signal, socket, subprocess, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)
X86 = platform.machine() == "x86_64"

def refused(action, *arguments):
    try:
        result = action(*arguments)
    except (OSError, ValueError) as error:
        print("refused:", error)
    else:
        print("ESCAPED:", action, arguments, result)

def syscall(x86, arm, *arguments):
    number = x86 if X86 else arm
    ctypes.set_errno(0)
    result = libc.syscall(ctypes.c_long(number), *map(ctypes.c_long, arguments))
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result

def spawn(action):
    pid = os.fork()
    if pid == 0:
        action()
        os._exit(0)
    return pid

def spin():
    while True:
        pass
"""

EXIT = ("exit",)
STOPPED = ("wall_time", "cpu_time")


@dataclass(frozen=True)
class Attack:
    """One attempt: what it tries, the code, and how the box must end."""

    name: str
    code: str
    ended: tuple[str, ...] = EXIT
    shell: bool = False
    exit_code: int | None = 0  # of those that exit; None: any
    collect: tuple[str, ...] = ()
    folders: tuple[str, ...] = ()
    memory_bytes: int = 256 << 20


ATTACKS = [
    # ---- bombs ------------------------------------------------------------------------------
    Attack("a fork bomb", """
while True:
    try:
        os.fork()
    except OSError:
        pass
""", (*STOPPED, "processes")),
    Attack("a fork bomb of a shell", "bomb() { bomb | bomb & }; bomb; sleep 60",
           (*STOPPED, "processes", "exit"), shell=True, exit_code=None),
    Attack("a bomb of threads", """
count = 0
try:
    while True:
        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
        count += 1
except RuntimeError as error:
    print("refused after", count)
assert count < 100
print("done", flush=True)
os._exit(0)
""", ("exit", "processes")),
    Attack("memory, in one process", "hoard = []\nwhile True:\n    hoard.append(bytearray(1 << 24))",
           ("exit", "memory"), exit_code=1),
    Attack("memory, in many processes", """
def hoard():
    kept = bytearray(b"x") * (60 << 20)
    time.sleep(60)
for _ in range(12):
    spawn(hoard)
time.sleep(60)
""", ("memory",)),
    Attack("memory that processes share", """
import mmap
area = mmap.mmap(-1, 2 << 30)
for at in range(0, 2 << 30, 4096):
    area[at] = 1
print("ESCAPED")
""", ("memory",)),
    Attack("memory in files without a name", """
refused(os.memfd_create, "hoard")
refused(syscall, 447, 447, 0)
print("done")
"""),
    Attack("memory of System V and POSIX queues", """
refused(syscall, 29, 194, 0, 1 << 30, 0o1600)
refused(syscall, 68, 186, 0, 0o1600)
refused(syscall, 240, 180, 0, 0o102, 0o600, 0)
print("done")
"""),
    Attack("locked memory", """
assert resource.getrlimit(resource.RLIMIT_MEMLOCK) == (0, 0)
page = ctypes.create_string_buffer(1 << 16)
if libc.mlock(page, ctypes.c_size_t(1 << 16)) == 0:
    print("ESCAPED")
print("done")
"""),
    Attack("buffers of many pipes", """
pipes = []
try:
    while True:
        pipes.append(os.pipe())
        os.set_blocking(pipes[-1][1], False)
        try:
            while True:
                os.write(pipes[-1][1], b"x" * 65536)
        except BlockingIOError:
            pass
except OSError as error:
    print("refused:", error)
assert len(pipes) < 100
print("done")
"""),
    Attack("a flood of output", "while True:\n    os.write(1, b'x' * 65536)", ("output",)),
    Attack("a flood of error output", "while True:\n    sys.stderr.write('x' * 65536)", ("output",)),
    Attack("a flood of output from many processes", """
def flood():
    while True:
        os.write(1, b"y" * 65536)
for _ in range(8):
    spawn(flood)
time.sleep(60)
""", ("output",)),
    Attack("a flood of output after the end of the program", """
def flood():
    while True:
        os.write(1, b"y" * 4096)
spawn(flood)
print("done", flush=True)
os._exit(0)
""", ("exit", "output")),
    Attack("a file that fills the disk", """
with open("large", "wb") as file:
    refused(lambda: [file.write(bytes(1 << 20)) for _ in range(1 << 12)])
    os._exit(0 if os.path.getsize("large") <= 8 << 20 else 1)
"""),
    Attack("many files that fill the disk", """
def fill():
    for folder in ("/tmp", "/box", "/dev/shm"):
        for number in range(100):
            with open(f"{folder}/{number}", "wb") as file:
                file.write(bytes(1 << 20))
refused(fill)
print("done")
"""),
    Attack("a flood of empty files", """
def flood():
    for number in range(1 << 20):
        os.close(os.open(f"/tmp/{number}", os.O_CREAT | os.O_WRONLY))
refused(flood)
print("done")
"""),
    Attack("folders, deep in one another", """
def dig():
    for _ in range(1 << 16):
        os.mkdir("d")
        os.chdir("d")
refused(dig)
print("done")
"""),
    Attack("a sparse file of a terabyte", """
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
with open("sparse", "wb") as file:
    refused(file.truncate, 1 << 40)
print("done")
"""),
    Attack("a sparse file of a terabyte that is asked for", """
with open("sparse", "wb") as file:
    try:
        file.truncate(1 << 40)
    except OSError:
        file.truncate(8 << 20)
print("done")
""", collect=("sparse",)),
    Attack("a busy loop", "spin()", ("cpu_time",)),
    Attack("busy loops in many processes", "[spawn(spin) for _ in range(6)]\ntime.sleep(60)",
           ("cpu_time",)),
    Attack("a busy loop that ignores every signal", """
for number in range(1, 65):
    try:
        signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError):
        pass
spin()
""", ("cpu_time",)),
    Attack("an operation of hours in the interpreter", "9 ** 9 ** 9 ** 9",
           (*STOPPED, "memory", "exit"), exit_code=None),
    Attack("a regular expression of hours", "import re\nre.match(r'(a+)+$', 'a' * 64 + 'b')",
           ("cpu_time",)),
    Attack("sleep", "time.sleep(3600)", ("wall_time",)),
    Attack("sleep with SIGTERM, SIGINT and SIGHUP ignored", """
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
while True:
    time.sleep(60)
""", ("wall_time",)),
    Attack("stopping itself", "os.kill(os.getpid(), signal.SIGSTOP)", ("wall_time",)),
    Attack("closing its output and lingering", """
os.close(1)
os.close(2)
time.sleep(3600)
""", ("wall_time",)),
    Attack("waiting for input for ever", "os.read(os.pipe()[0], 1)", ("wall_time",)),
    Attack("a daemon that outlives the program", """
def daemon():
    os.setsid()
    if os.fork() == 0:
        for number in range(3):
            os.close(number)
        time.sleep(3600)
os.waitpid(spawn(daemon), 0)
print("done")
"""),
    Attack("children that hold the output open", """
spawn(lambda: time.sleep(3600))
print("done", flush=True)
os._exit(0)
"""),
    Attack("a time-out while children hold the output open", """
for _ in range(8):
    spawn(lambda: time.sleep(3600))
time.sleep(3600)
""", ("wall_time",)),
    Attack("zombies without end", """
try:
    for _ in range(10_000):
        spawn(lambda: None)
except OSError as error:
    print("refused:", error)
print("done")
""", ("exit", "processes")),
    Attack("orphans without end", """
for _ in range(200):
    pid = os.fork()
    if pid == 0:
        try:
            os.fork()
        except OSError:
            pass
        os._exit(0)
    os.waitpid(pid, 0)
print("done")
"""),
    Attack("recursion without end", "def again():\n    again()\nagain()", exit_code=1),
    Attack("recursion of the machine's stack", """
sys.setrecursionlimit(10 ** 9)
def again(*_):
    return sorted([1, 2], key=again)
again()
""", ("signal", "exit", "memory", *STOPPED), exit_code=None),
    Attack("an argument of gigabytes", """
refused(os.execv, "/bin/echo", ["echo", "x" * (1 << 22)])
print("done")
"""),
    Attack("descriptors without end", """
kept = []
try:
    while True:
        kept.append(os.open("/dev/null", os.O_RDONLY))
except OSError as error:
    print("refused:", error)
assert len(kept) < 200
print("done")
"""),
    Attack("timers without end", """
timer, count = ctypes.c_void_p(), 0
while count < 10_000 and libc.timer_create(1, None, ctypes.byref(timer)) == 0:
    count += 1
print("refused after", count) if count < 10_000 else print("ESCAPED")
print("done")
"""),
    Attack("a core dump", """
os.kill(spawn(os.abort), 0)
os.wait()
assert resource.getrlimit(resource.RLIMIT_CORE) == (0, 0)
assert not os.listdir("/box"), os.listdir("/box")
print("done")
"""),
    # ---- files of others --------------------------------------------------------------------
    Attack("reading /etc/shadow", """
refused(open, "/etc/shadow")
assert "root" not in open("/etc/passwd").read()
print("done")
"""),
    Attack("reading a file of the worker's", """
refused(open, os.environ["HOST_FILE"])
refused(os.listdir, os.environ["HOST_HOME"] + "/.ssh")
refused(os.stat, os.environ["HOST_HOME"] + "/.bashrc")
print("done")
"""),
    Attack("a symbolic link to the worker's file", """
os.symlink(os.environ["HOST_FILE"], "link")
refused(open, "link")
print("done")
"""),
    Attack("symbolic links among the files asked for", """
os.symlink("/etc/passwd", "link")
os.symlink("/etc", "folder")
os.mkfifo("fifo")
os.mkdir("real")
print("done")
""", collect=("link", "folder/passwd", "fifo", "real")),
    Attack("hard links to what is outside", """
refused(os.link, "/usr/bin/env", "/usr/bin/env2")
refused(os.link, "/usr/bin/env", "/box/env")
refused(os.link, "/proc/1/exe", "/box/init")
print("done")
"""),
    Attack("the way out by /proc/1/root and /proc/1/cwd", """
refused(os.listdir, "/proc/1/root")
refused(os.listdir, "/proc/1/cwd/..")
refused(os.listdir, "/proc/1/fd")
refused(os.listdir, "/proc/1/map_files")
print("done")
"""),
    Attack("the way out by /proc/self/root and ..", """
os.chdir("/")
os.chdir("../../../..")
assert os.path.samefile("/", "..")
assert os.path.samefile("/", "/proc/self/root")
refused(open, "/proc/self/root" + os.environ["HOST_FILE"])
print("done")
"""),
    Attack("chroot and a folder held open", """
folder = os.open("/", os.O_RDONLY)
os.makedirs("/box/jail")
refused(os.chroot, "/box/jail")
os.fchdir(folder)
refused(os.listdir, "../" + os.environ["HOST_FILE"])
print("done")
"""),
    Attack("file handles without names", """
refused(syscall, 303, 264, -100, 0, 0, 0, 0)
refused(syscall, 304, 265, -100, 0, 0)
print("done")
"""),
    Attack("descriptors inherited from the worker", """
assert sorted(os.listdir("/proc/self/fd"))[:3] == ["0", "1", "2"]
assert len(os.listdir("/proc/self/fd")) == 4, os.listdir("/proc/self/fd")
for number in range(3, 120):
    refused(os.write, number, b"forged reply")
print("done")
"""),
    Attack("writing the interpreter and the system", """
import os.path
for path in (os.__file__, "/usr/bin/env", "/etc/passwd", "/bin/x", "/x", sys.prefix + "/x",
             sys.base_prefix + "/x", "/usr/x", "/etc/x", "/dev/x", "/.read_only/x"):
    refused(open, path, "ab")
refused(os.unlink, os.__file__)
refused(os.rename, os.__file__, os.__file__ + "2")
refused(os.chmod, sys.base_prefix, 0o777)
refused(os.utime, sys.base_prefix)
print("done")
"""),
    Attack("devices", """
for name in ("mem", "kmem", "port", "kmsg", "vda", "sda", "nvme0n1", "nvidia0", "nvidiactl", "fuse",
             "kvm", "net/tun", "loop-control", "tty", "ptmx", "vhost-vsock", "infiniband"):
    refused(os.stat, "/dev/" + name)
refused(os.mknod, "/box/vda", 0o60666, os.makedev(254, 0))
refused(os.mknod, "/box/mem", 0o20666, os.makedev(1, 1))
print("done")
"""),
    Attack("/sys", """
refused(os.listdir, "/sys/kernel")
refused(os.listdir, "/sys/fs/cgroup")
print("done")
"""),
    Attack("settings of the kernel", """
for name in ("sys/kernel/core_pattern", "sys/kernel/hostname", "sys/vm/drop_caches",
             "sys/vm/overcommit_memory", "sys/kernel/modprobe", "sys/net/ipv4/ip_forward",
             "sysrq-trigger", "self/oom_score_adj", "1/oom_score_adj", "self/uid_map"):
    refused(open, "/proc/" + name, "w")
print("done")
"""),
    Attack("files of another box", """
assert os.listdir("/box") == [] and os.listdir("/dev/shm") == []
open("/tmp/left_behind", "w").close()
open("/dev/shm/left_behind", "w").close()
assert not os.path.exists("/tmp/from_before")
print("done")
"""),
    # ---- processes of others ----------------------------------------------------------------
    Attack("other processes in /proc", """
pids = sorted(int(name) for name in os.listdir("/proc") if name.isdecimal())
assert len(pids) == 2 and pids[0] == 1 and pids[1] == os.getpid(), pids
if int(os.environ["HOST_PID"]) not in pids:
    refused(open, "/proc/" + os.environ["HOST_PID"] + "/environ")
print("done")
"""),
    Attack("secrets in the environment", """
assert "SECRET" not in "".join(os.environ) and "hush" not in "".join(os.environ.values())
assert "hush" not in open("/proc/self/environ").read()
refused(open, "/proc/1/environ")
out = subprocess.run(["env"], capture_output=True, text=True).stdout
assert "hush" not in out, out
print("done")
"""),
    Attack("what another box was given, in its own memory", """
found, word = 0, "from" + "_another_box"
with open("/proc/self/maps") as maps, open("/proc/self/mem", "rb", buffering=0) as memory:
    for line in maps:
        area, rights = line.split()[:2]
        begin, end = (int(text, 16) for text in area.split("-"))
        if "r" in rights and "[v" not in line:
            memory.seek(begin)
            try:
                found += (memory.read(end - begin) or b"").count(b"box_one_" + word.encode())
            except OSError:
                pass
print("ESCAPED" if found else "not found")
print("done")
"""),
    Attack("signals to the worker and to pid 1", """
for number in (signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM, signal.SIGUSR1, signal.SIGSEGV):
    os.kill(1, number)
host = int(os.environ["HOST_PID"])
refused(os.kill, host, 9) if host != os.getpid() else None
refused(os.killpg, host, 9)
time.sleep(0.1)
print("done")
"""),
    Attack("a signal to everybody", """
child = spawn(lambda: time.sleep(60))
os.kill(-1, signal.SIGKILL)
assert os.waitpid(child, 0)[1] == signal.SIGKILL
print("done")
"""),
    Attack("a flood of signals to pid 1", """
for _ in range(100_000):
    os.kill(1, signal.SIGCHLD)
print("done")
"""),
    Attack("ptrace", """
for request in (16, 0x4206, 0):
    refused(syscall, 101, 117, request, 1, 0, 0)
print("done")
"""),
    Attack("the memory of pid 1", """
for name in ("mem", "maps", "syscall", "stack", "auxv", "smaps"):
    refused(lambda: open(f"/proc/1/{name}", "rb").read(1))
buffer = ctypes.create_string_buffer(64)
refused(syscall, 310, 270, 1, ctypes.addressof(buffer), 1, ctypes.addressof(buffer), 1, 0)
refused(syscall, 311, 271, 1, ctypes.addressof(buffer), 1, ctypes.addressof(buffer), 1, 0)
print("done")
"""),
    Attack("descriptors of pid 1", """
pidfd = os.pidfd_open(1)
for number in range(12):
    refused(syscall, 438, 438, pidfd, number, 0)
print("done")
"""),
    Attack("becoming root", """
for action in (os.setuid, os.setgid, os.seteuid, os.setegid):
    refused(action, 0)
refused(os.setgroups, [0])
refused(os.setresuid, 65534, 65534, 65534)
print("done")
"""),
    Attack("programs that set their user", """
status = open("/proc/self/status").read()
assert "NoNewPrivs:\\t1" in status and "CapBnd:\\t0000000000000000" in status
for argv in (["su", "-c", "id"], ["mount", "-t", "tmpfs", "x", "/tmp"], ["passwd"], ["sudo", "-n", "id"]):
    try:
        made = subprocess.run(argv, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    except OSError as error:
        print("refused:", error)
        continue
    print("ESCAPED" if made.returncode == 0 or "uid=0" in made.stdout else "refused")
print("done")
"""),
    Attack("a set-user file of its own", """
import shutil
shutil.copy("/usr/bin/id", "/box/id")
os.chmod("/box/id", 0o6755)
out = subprocess.run(["/box/id"], capture_output=True, text=True).stdout
assert "uid=1000" in out and "euid" not in out, out
print("done")
"""),
    Attack("higher limits and priority", """
for name in ("RLIMIT_NPROC", "RLIMIT_DATA", "RLIMIT_FSIZE", "RLIMIT_CPU", "RLIMIT_NOFILE"):
    number = getattr(resource, name)
    hard = resource.getrlimit(number)[1]
    refused(resource.setrlimit, number, (hard + 1, hard + 1))
refused(os.setpriority, os.PRIO_PROCESS, 0, -5)
refused(os.sched_setscheduler, 0, os.SCHED_FIFO, os.sched_param(10))
print("done")
"""),
    Attack("capabilities by capset", """
header, none = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)(*[0xFFFFFFFF] * 6)
refused(syscall, 126, 91, ctypes.addressof(header), ctypes.addressof(none))
print("done")
"""),
    # ---- namespaces and mounts --------------------------------------------------------------
    Attack("a user namespace of its own", """
for flag in (0x10000000, 0x20000, 0x20000000, 0x40000000, 0x8000000, 0x4000000, 0x2000000, 0x80):
    refused(syscall, 272, 97, flag)
    refused(syscall, 56, 220, flag | 17, 0, 0, 0, 0) if flag != 0x80 else None
print("done")
"""),
    Attack("namespaces by clone3", """
arguments = (ctypes.c_uint64 * 11)(0x10000000)
refused(syscall, 435, 435, ctypes.addressof(arguments), 88)
print("done")
"""),
    Attack("the namespaces of others", """
for name in ("user", "mnt", "pid", "net", "ipc", "uts"):
    refused(os.open, f"/proc/1/ns/{name}", os.O_RDONLY)
refused(syscall, 308, 268, os.pidfd_open(1), 0x10000000)
print("done")
"""),
    Attack("mounts", """
text = lambda word: ctypes.addressof(ctypes.create_string_buffer(word))
for kind in (b"tmpfs", b"proc", b"sysfs", b"devtmpfs", b"overlay", b"ext4", b"cgroup2"):
    refused(syscall, 165, 40, text(b"x"), text(b"/tmp"), text(kind), 0, 0)
refused(syscall, 165, 40, 0, text(b"/usr"), 0, 0x20 | 0x1000, 0)
refused(syscall, 165, 40, 0, text(b"/"), 0, 0x20 | 0x1000, 0)
print("done")
"""),
    Attack("taking mounts away", """
text = lambda word: ctypes.addressof(ctypes.create_string_buffer(word))
for path in (b"/proc", b"/usr", b"/tmp", b"/box", b"/"):
    refused(syscall, 166, 39, text(path), 2)
refused(syscall, 155, 41, text(b"/box"), text(b"/box"))
print("done")
"""),
    Attack("mounts by the newer calls", """
for x86, arm in ((428, 428), (429, 429), (430, 430), (431, 431), (432, 432), (433, 433), (442, 442)):
    refused(syscall, x86, arm, 0, 0, 0, 0, 0)
print("done")
"""),
    # ---- network ----------------------------------------------------------------------------
    Attack("a service on the node's loopback, such as etcd", """
for family, host in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")):
    with socket.socket(family) as s:
        s.settimeout(2)
        refused(s.connect, (host, int(os.environ["HOST_PORT"])))
print("done")
"""),
    Attack("an abstract Unix socket of the node", """
with socket.socket(socket.AF_UNIX) as s:
    refused(s.connect, "\\0" + os.environ["HOST_ABSTRACT"])
print("done")
"""),
    Attack("a Unix socket in a folder of the node", """
with socket.socket(socket.AF_UNIX) as s:
    refused(s.connect, os.environ["HOST_SOCKET"])
print("done")
"""),
    Attack("the network outside", """
for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
    with socket.socket(socket.AF_INET, kind) as s:
        s.settimeout(2)
        refused(s.connect, ("192.0.2.1", 53))
refused(socket.getaddrinfo, "example.org", 80)
print("done")
"""),
    Attack("switching the loopback on", """
import fcntl, struct
with socket.socket() as s:
    refused(fcntl.ioctl, s, 0x8914, struct.pack("16sH14x", b"lo", 0x1 | 0x40))
print("done")
"""),
    Attack("raw, netlink, packet, vsock and kernel-crypto sockets", """
refused(socket.socket, socket.AF_INET, socket.SOCK_RAW, 1)
for family in (16, 17, 40, 38, 31, 44, 21, 29):
    refused(socket.socket, family, socket.SOCK_DGRAM)
print("done")
"""),
    # ---- the kernel -------------------------------------------------------------------------
    Attack("the kernel's keyring", """
text = lambda word: ctypes.addressof(ctypes.create_string_buffer(word))
refused(syscall, 248, 217, text(b"user"), text(b"name"), text(b"data"), 4, -3)
refused(syscall, 249, 218, text(b"user"), text(b"name"), 0, -3)
refused(syscall, 250, 219, 0, -3, 0)
assert open("/proc/keys").read() == ""
print("done")
"""),
    Attack("bpf", "refused(syscall, 321, 280, 0, 0, 0)\nprint('done')"),
    Attack("perf_event_open", "refused(syscall, 298, 241, 0, 0, -1, -1, 0)\nprint('done')"),
    Attack("io_uring", """
arguments = (ctypes.c_uint32 * 30)()
refused(syscall, 425, 425, 8, ctypes.addressof(arguments))
refused(syscall, 426, 426, 0, 0, 0, 0, 0)
refused(syscall, 427, 427, 0, 0, 0, 0)
print("done")
"""),
    Attack("userfaultfd", """
refused(syscall, 323, 282, 1)
refused(os.open, "/dev/userfaultfd", os.O_RDWR)
print("done")
"""),
    Attack("modules, kexec, swap and reboot", """
for x86, arm in ((175, 105), (313, 273), (176, 106), (246, 104), (320, 294), (167, 224), (169, 142)):
    refused(syscall, x86, arm, 0, 0, 0, 0, 0)
print("done")
"""),
    Attack("the kernel's log", "refused(syscall, 103, 116, 3, 0, 0)\nrefused(open, '/proc/kmsg')\n"
           "refused(open, '/proc/kcore', 'rb')\nprint('done')"),
    Attack("the clock and the host's name", """
refused(time.clock_settime, time.CLOCK_REALTIME, 0.0)
refused(socket.sethostname, "mine")
assert socket.gethostname() == "box"
print("done")
"""),
    Attack("typing into a terminal", """
import fcntl
for request in (0x5412, 0x541C):
    for number in range(3):
        try:
            fcntl.ioctl(number, request, b"x")
            print("ESCAPED")
        except OSError as error:
            assert error.errno == errno.EPERM, error
print("done")
"""),
    Attack("another personality of the processor", "refused(syscall, 135, 92, 0x0008)\nprint('done')"),
    Attack("system calls of 32 bits, around the filter", """
import mmap
if X86:
    area = mmap.mmap(-1, 4096, prot=7)
    area.write(b"\\xb8\\x14\\x00\\x00\\x00\\xcd\\x80\\xc3")  # mov eax, getpid; int 0x80; ret
    call = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(area)))
    call()
    print("ESCAPED")
os.kill(os.getpid(), signal.SIGSYS)
""", ("signal",)),
    Attack("system calls of x32, around the filter", """
if X86:
    refused(syscall, 0x40000000 | 165, 0, 0, 0, 0, 0, 0)
print("done")
"""),
    Attack("a seccomp filter of its own that allows", """
class Program(ctypes.Structure):
    _fields_ = [("len", ctypes.c_ushort), ("filter", ctypes.c_void_p)]
allow = (ctypes.c_uint64 * 1)(0x7FFF000000000006)
program = Program(1, ctypes.addressof(allow))
libc.prctl(22, 2, ctypes.byref(program), 0, 0)
refused(syscall, 272, 97, 0x10000000)
print("done")
"""),
    # ---- further folders --------------------------------------------------------------------
    Attack("the root in which further folders stand", """
open("/app/mine", "w").close()
for path in ("/mine", "/logs/mine", "/etc/mine", "/usr/mine", "/.read_only/mine", "/mnt/mine"):
    refused(open, path, "w")
    refused(os.mkdir, path)
for path in ("/app", "/logs/agent", "/etc/passwd"):
    refused(os.rename, path, "/box/moved")
for path in ("/app", "/logs/agent", "/logs", "/mnt"):
    refused(os.rmdir, path)
for path in ("/bin", "/lib64", "/etc/hosts"):
    refused(os.unlink, path)
refused(os.chmod, "/", 0o777)
refused(os.symlink, "/app", "/tests")
refused(os.link, "/etc/passwd", "/app/passwd")
refused(syscall, 165, 40, 0, 0, 0, 32 | 4096, 0)
refused(syscall, 166, 39, 0, 0)
assert os.listdir("/app") == ["mine"] and os.listdir("/mnt") == [], os.listdir("/mnt")
print("done")
""", folders=("/app", "/logs/agent")),
    Attack("many files that fill further folders", """
filled = 0
for folder in ("/app", "/logs/agent", "/tmp", "/box", "/dev/shm"):
    for number in range(20):
        try:
            with open(f"{folder}/{number}", "wb", buffering=0) as file:
                filled += file.write(bytes(1 << 20))
        except OSError as error:
            print("refused:", error)
assert 0 < filled <= 8 << 20, filled
print("done")
""", folders=("/app", "/logs/agent")),
    # ---- memory of the kernel ---------------------------------------------------------------
    Attack("memory in sockets that nobody reads", """
def fill():
    kept = []
    try:
        while True:
            kept.append(socket.socketpair())
            for end in kept[-1]:
                end.setblocking(False)
                try:
                    while True:
                        end.send(b"x" * 32768)
                except BlockingIOError:
                    pass
    except OSError:
        time.sleep(3600)
for _ in range(20):
    spawn(fill)
time.sleep(3600)
""", ("memory",)),
    Attack("larger buffers of sockets", """
for family in (socket.AF_UNIX, socket.AF_INET):
    for option in (7, 8, 32, 33):
        with socket.socket(family) as s:
            before = s.getsockopt(socket.SOL_SOCKET, 7), s.getsockopt(socket.SOL_SOCKET, 8)
            refused(s.setsockopt, socket.SOL_SOCKET, option, 1 << 24)
            assert before == (s.getsockopt(socket.SOL_SOCKET, 7), s.getsockopt(socket.SOL_SOCKET, 8))
            s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
print("done")
"""),
    Attack("larger pipes", """
import fcntl
read, write = os.pipe()
refused(fcntl.fcntl, write, 1031, 1 << 20)
refused(fcntl.fcntl, write, 1031, (1 << 16) + 1)
assert fcntl.fcntl(write, 1032) <= 16 * resource.getpagesize()
fcntl.fcntl(write, 1031, 4096)
print("done")
"""),
    Attack("memory in pipes, named ones too", """
def fill(number):
    kept = []
    try:
        while True:
            kept.append(os.pipe())
            path = f"/tmp/{number}-{len(kept)}"
            os.mkfifo(path)
            kept.append([os.open(path, os.O_RDWR)])
    except OSError:
        time.sleep(3600)
for number in range(20):
    spawn(lambda: fill(number))
time.sleep(3600)
""", ("memory",), memory_bytes=96 << 20),
    Attack("memory in page tables", """
import mmap
def table():
    area = mmap.mmap(-1, 15 << 30, prot=mmap.PROT_READ)
    area.madvise(15)  # no huge pages
    for at in range(0, 15 << 30, 2 << 20):
        area[at]
    time.sleep(3600)
for _ in range(8):
    spawn(table)
time.sleep(3600)
""", ("memory",), memory_bytes=128 << 20),
    Attack("locks on ranges of files without end", """
import fcntl
kept = [open(f"/tmp/{number}", "w") for number in range(60)]
at = 0
while True:
    for file in kept:
        fcntl.lockf(file, fcntl.LOCK_EX, 1, at)
    at += 2
""", (*STOPPED, "memory"), memory_bytes=16 << 20),
    Attack("the watches of files that a user has", """
refused(syscall, 253, 26, 0)
refused(syscall, 294, 26, 0)
print("done")
"""),
]  # fmt: skip
