"""Runs at the start of each Python of a test's trial: what imports for seconds is forked by server.py.

The process stays as a stand-in of the forked one. Where no server answers, it goes on as if this were not
here. It imports next to nothing: a trial starts a dozen of these.
"""

import os
import sys

FOLDER = os.path.dirname(__file__)  # we are a link in a folder made for one run of the tests
PR_SET_PDEATHSIG = 1
SERVERS = {
    "launcher.cli.entry": "commands",
    "realsys.observability.report.artifacts": "commands",
    "realsys.rewards.guard.guard_host": "hosts",
    "realsys.rewards.guard.service_host": "hosts",
    "realsys.policy_server.serve_model": "workers",
    "realsys.supervisor.job_entry": "commands",
    "realsys.heartbeat.heartbeat_process": "hosts",
    "realsys.worker.main": "workers",
    "parallel_ranks": "workers",
    "test_weight_sync_processes": "workers",
}
# The controller of a local job is not among these: its process id is the job's.
# Commands that load torch or transformers themselves.
HEAVY_VERBS = ("chat", "data", "eval", "rescore", "serve")
TIED = (
    "realsys.worker.main",
    "parallel_ranks",
)  # they end with the process that REALSYS_PARENT_PID names


def _asked() -> None:
    words = sys.orig_argv[1:]
    while words and words[0] in ("-u", "-P"):
        words.pop(0)
    if len(words) < 2 or words[0] != "-m" or words[1] not in SERVERS:
        return
    library = f"{FOLDER}/file_calls.so"  # the only one that what is forked has
    if os.environ.get("LD_PRELOAD", library) != library:
        return

    import _signal as signal  # the others import enum and more
    import _socket as socket
    import array
    import marshal

    fds = [int(name) for name in os.listdir("/proc/self/fd")]
    fds = sorted(fd for fd in fds if _is_open(fd))
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
    umask = os.umask(0)
    os.umask(umask)
    request = {
        "module": words[1],
        "arguments": words[2:],
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "umask": umask,
        "fds": fds,
    }
    signals = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1}
    signals |= {signal.SIGUSR2, signal.SIGWINCH}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        connection.connect(f"{FOLDER}/{_server(*words[1:3])}")
        files = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))
        connection.sendmsg([marshal.dumps(request)], [files])
        answer = connection.recv(4)
        if not answer:
            raise OSError
        pid = int.from_bytes(answer, sys.byteorder)
    except OSError:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
        connection.close()
        return
    if words[1] in TIED:  # as the worker itself would
        import ctypes

        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != int(os.environ["REALSYS_PARENT_PID"]):
            os._exit(0)
    for number in signals:
        signal.signal(number, lambda number, _frame: _pass_on(pid, number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
    for fd in fds:  # or a reader would wait for our end of a pipe
        os.close(fd)
    answer = connection.recv(4)
    status = int.from_bytes(answer, sys.byteorder) if answer else int(signal.SIGKILL)
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(os.waitstatus_to_exitcode(status))


def _server(module: str, first: str = "") -> str:
    """Which one has imported what the process is going to need."""
    is_heavy = module == "launcher.cli.entry" and first in HEAVY_VERBS
    return "workers" if is_heavy else SERVERS[module]


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def _pass_on(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass


_asked()
