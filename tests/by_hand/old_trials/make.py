"""Makes the archives of tests/old_trials, one small trial of each kind. By hand; a minute.

    python tests/by_hand/old_trials/make.py           those that are not there
    python tests/by_hand/old_trials/make.py stopped   that one again, as this revision makes it

For whoever changes what a trial's folder holds: add archives of the new kind under new names and keep the
old ones, since trials as they are made now will be looked at by later revisions. manifest.json says of each
by which command and revision it was made, and what the command line said of it then. Left out of the
archives: weights (but of `stopped`, which is resumed), pictures, the report (it is made again), keys. This
machine's paths, host and user are placeholders (unpack.py).
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parents[2]
ARCHIVES = TESTS / "old_trials"
CHECKOUT = TESTS.parent
sys.path.insert(0, str(TESTS))

from old_trials import unpack as old  # noqa: E402

SMALL = (
    "sft.init.hidden_size=16",
    "sft.init.num_layers=1",
    "sft.init.num_heads=2",
    "sft.init.num_kv_heads=1",
    "sft.init.vocab_size=300",
    "sft.dataset.train_size=96",
    "dataset.train_size=48",
    "dataset.train_bs_n_seqs=8",
    "dataset.eval_size=8",
    "group_size=2",
    "ppo.gen.max_new_tokens=12",
    "ppo.ppo_n_minibatches=2",
    "exp_ctrl.ckpt_freq_steps=2",
    "exp_ctrl.ckpt_freq_secs=none",
    "exp_ctrl.ckpt_keep=1",
    "exp_ctrl.eval_freq_steps=3",
    "scheduling.model_worker.cpu=1",
    "tensorboard=false",
    "sft.tensorboard=false",
)
RULE = '''"""A rule that is broken: it raises."""
from realsys.api.registry import register_reward

def broken(*, response, answer, **_):
    raise RuntimeError("this rule is broken")

register_reward("broken", broken)
'''
LONG = ("dataset.train_size=480",)  # 60 steps: long enough to be stopped
# Archive → experiment, trial, further words of the launch.
KINDS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "finished": ("ppo-math", "done", ()),
    "stopped": ("ppo-math", "stopped", LONG),
    "failed": ("ppo-math", "failed", ("--import", "{root}/rule.py", "reward=broken")),
    "async": ("ppo-math-async", "run1", ()),
    "detached": ("ppo-math-detached", "run1", ("detached.experience_batch_size=4",)),
    "sweep": ("ppo-math", "seeds", ("seed=1,2", "--sweep")),
}
LEFT_OUT = re.compile(
    r"\.(png|pt|safetensors)$|/(report\.html|timeline\.json|tokenizer\.json)$|/(secrets|rollout_dump)/"
    r"|/submitit/(lock|.*\.(pkl|sh))$|/name_resolve/(lock|tmp/)"
)
WAIT_S = 300


def realsys(root: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """The command line, under a file root."""
    environment = {
        **os.environ,
        "REALSYS_FILE_ROOT": str(root),
        "XDG_CONFIG_HOME": str(root / "config"),
        "XDG_STATE_HOME": str(root / "state"),
        "COLUMNS": "200",
    }
    command = [str(Path(sys.executable).with_name("realsys")), *words]
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=WAIT_S, check=False
    )


def make(name: str) -> dict[str, Any]:
    """Makes an archive; returns its line of the manifest."""
    experiment, trial, further = KINDS[name]
    with tempfile.TemporaryDirectory(prefix="old-trials-") as folder:
        root = Path(folder, "root")
        root.mkdir()
        (root / "rule.py").write_text(RULE)
        start = ["launch", experiment, "--trial", trial, *SMALL]
        names = {setting.partition("=")[0] for setting in further}
        words = [word for word in start if word.partition("=")[0] not in names]
        if "--sweep" not in further:  # on this machine a sweep's trials run one after another
            words.append("--detach")
        further = tuple(word.format(root=root) for word in further)
        done = realsys(root, *words, *further)
        if done.returncode != 0:
            raise SystemExit(f"{name}: {done.stderr}")
        trials = sorted(root.glob(f"runs/*/{experiment}/*"))
        if name == "stopped":
            stop(trials[0])
        for made in trials:
            realsys(root, "wait", f"{experiment}/{made.name}", "--timeout", str(WAIT_S))
        before = [state_of(root, made) for made in trials]
        ended = name if name in ("stopped", "failed") else "completed"
        if set(before) != {ended}:
            raise SystemExit(f"{name}: {before}, not {ended}")
        pack(name, root, trials)
        made_by = " ".join(["realsys", *words, *further]).replace(str(root), old.ROOT)
        again = Path(folder, "again")
        unpacked = old.unpack(name, again)
        after = [state_of(again, one) for one in unpacked]
        assert before == after, (before, after)
        return {
            "command": made_by,
            "revision": git("log", "-1", "--format=%H", "--", "realsys", "launcher", "experiments"),
            "trials": {f"{experiment}/{one.name}": said_of(again, one) for one in unpacked},
        }


def stop(trial: Path) -> None:
    """Stops it in its middle, by the signal that `realsys stop` falls back to: at once."""
    deadline = time.monotonic() + WAIT_S
    metrics = trial / "metrics.jsonl"
    while not metrics.exists() or metrics.read_bytes().count(b"\n") < 4:
        if time.monotonic() > deadline:
            raise SystemExit(f"{trial} does not get on")
        time.sleep(0.02)
    attempt = json.loads((trial / "attempts/0001/attempt.json").read_text())
    os.kill(attempt["supervisor_pid"], signal.SIGTERM)


def state_of(root: Path, trial: Path) -> str:
    """What status says."""
    state: str = status(root, trial)["state"]
    return state


def status(root: Path, trial: Path) -> dict[str, Any]:
    said = realsys(root, "status", f"{trial.parent.name}/{trial.name}", "--json")
    document: dict[str, Any] = json.loads(said.stdout)["trial"]
    return document


def said_of(root: Path, trial: Path) -> dict[str, Any]:
    """What later revisions must still say of it."""
    view = status(root, trial)
    name = f"{trial.parent.name}/{trial.name}"
    failure = (view["exit"] or {}).get("first_failure") or {}
    lines = json.loads(realsys(root, "logs", name, "--json").stdout)["lines"]
    return {
        **{key: view[key] for key in ("state", "phase", "step", "total_steps", "attempt")},
        "workers": {worker["worker"]: worker["state"] for worker in view["workers"]},
        "headline": view["progress"]["headline"] if view["progress"] else None,
        "failed_first": failure.get("worker"),
        "why": (failure.get("why") or "").partition("\n")[0] or None,
        "log_lines": len(lines),
        "log_workers": sorted({line["worker"] for line in lines}),
        "resume": resumed(root, name) if view["state"] != "completed" else "not tried",
    }


def resumed(root: Path, name: str) -> str:
    """How a resume of what is in the archive ends."""
    done = realsys(root, "resume", name, "--detach")
    if done.returncode != 0:
        return f"refused with {done.returncode}"
    realsys(root, "wait", name, "--timeout", str(WAIT_S))
    (trial,) = root.glob(f"runs/*/{name}")
    return state_of(root, trial)


def pack(name: str, root: Path, trials: list[Path]) -> None:
    """Writes the archive, without what is LEFT_OUT, with placeholders."""
    kept = root.parent / "packed"
    for trial in trials:
        to = kept / "runs" / old.USER_FOLDER / trial.parent.name / trial.name
        shutil.copytree(trial, to, symlinks=True)
    shutil.copytree(root / "name_resolve", kept / "name_resolve")
    if name == "stopped":
        shutil.copytree(root / "cache", kept / "cache")
    if (rule := root / "rule.py").exists() and name == "failed":
        shutil.copy(rule, kept / "rule.py")
    user, host = old.user(), socket.gethostname()
    ours = {
        str(root): old.ROOT,
        str(CHECKOUT): old.CODE,
        sys.base_prefix: "/usr",
        f"{old.ROOT}/runs/{user}/": f"{old.ROOT}/runs/{old.USER}/",
        f"/local/{user}/": f"/local/{old.USER}/",  # a key in the store
        f'"user": "{user}"': f'"user": "{old.USER}"',
        f'"{host}"': f'"{old.HOST}"',
        Path("/proc/sys/kernel/random/boot_id").read_text().strip(): "no such boot",
    }
    for file in old.files_in(kept):
        relative = f"/{file.relative_to(kept)}"
        if LEFT_OUT.search(relative) and not (name == "stopped" and needed(relative)):
            file.unlink()
        else:
            old.replace_in(file, ours)
    with tarfile.open(ARCHIVES / f"{name}.tar.xz", "w:xz", preset=9) as archive:
        archive.add(kept, arcname=".", filter=anonymous)


def needed(path: str) -> bool:
    """What a resume reads: checkpoints, and the model that the run began with."""
    return path.startswith("/cache/") or "/recover/step-" in path


def anonymous(member: tarfile.TarInfo) -> tarfile.TarInfo:
    """Without owner."""
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member


def git(*words: str) -> str:
    done = subprocess.run(["git", *words], cwd=CHECKOUT, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def main() -> None:
    """Makes those that are asked for, or that are missing."""
    told = old.manifest()
    for name in sys.argv[1:] or [name for name in KINDS if name not in told]:
        told[name] = make(name)
        old.MANIFEST.write_text(json.dumps(told, indent=1, sort_keys=True) + "\n")
        sys.stdout.write(
            f"{name}: {(ARCHIVES / name).with_suffix('.tar.xz').stat().st_size} bytes\n"
        )


if __name__ == "__main__":
    main()
