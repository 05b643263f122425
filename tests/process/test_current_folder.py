"""No verb, and nothing that a verb starts, imports from the folder in which it is typed.

The folder may be another user's: a shared scratch, an unpacked data set. One process goes through all
verbs, from such a folder; what they start is real. tests/unit/house/test_started_pythons.py reads the
command lines.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.cli.command_line import VERBS

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]

# Names that Python and our code import early, by all kinds of processes.
EVIL = ("json", "msgspec", "asyncio", "torch", "realsys", "launcher", "experiments")
MARK = "import os; open(os.environ['MARKERS'] + '/' + __name__, 'w'); raise SystemExit('evil')\n"
# An empty entry of PYTHONPATH is the current folder for every Python that inherits it. It is set when our
# code has been found: nothing of ours can help what Python imports before.
EMPTY_ENTRY = """
import contextlib, io, json, os, sys
from launcher.cli.entry import main
os.environ["PYTHONPATH"] = os.environ.get("PYTHONPATH", "") + os.pathsep
sys.path.insert(0, os.getcwd())
"""
# After each command line: which of the modules were run meanwhile.
DRIVER = (
    EMPTY_ENTRY
    + """
found = {}
for words in json.loads(sys.argv[1]):
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(shown):
        try:
            sys.argv = [sys.executable, *words]
            status = main()
        except SystemExit as stop:
            status = stop.code
    markers = os.environ['MARKERS']
    ran = sorted(os.listdir(markers))
    for name in ran:
        os.unlink(os.path.join(markers, name))
    found[" ".join(words)] = [status, ran, shown.getvalue()[-1500:]]
print(json.dumps(found))
"""
)
SMALL = ("task.train_size=16", "task.eval_size=4", "train_bs_n_seqs=8", "group_size=2")
SHORT = ("gen.max_new_tokens=4", "exp_ctrl.benchmark_steps=1", "algorithm.ppo_n_minibatches=1")
# Of a trial that has completed, and of a site without images and without an etcd.
REFUSED = {"replay", "resume", "exec", "tell", "scale", "image", "etcd"}


def command_lines(policy: Path, out: Path) -> list[list[str]]:
    """A line for each verb, on a trial that the first one makes."""
    run = ("grpo-math-async", f"actor.path={policy}", *SMALL, *SHORT, "task.reward=math_verify")
    trial = "grpo-math-async/new"
    return [
        ["plan", *run],
        ["launch", *run, "--trial", "new", "--detach"],
        ["wait", trial],
        ["replay", trial, "--trial", "new", "--detach"],
        ["resume", trial, "--detach"],
        *(
            [verb, trial]
            for verb in ("status", "watch", "explain", "logs", "show", "audit", "samples")
        ),
        ["exec", trial, "model_worker/0", "true"],
        ["tell", trial, "model_worker/0", "stacks"],
        ["scale", trial, "--workers", "2"],
        ["ls"],
        ["graph", trial, "--out", str(out / "graph.png")],
        ["report", trial],
        ["data", "show", *run],
        ["rescore", trial, "--reward", "math_verify"],
        ["chat", str(policy), "--max-tokens", "2"],
        ["eval", str(policy), "--task", "math", "--limit", "1", "--max-new-tokens", "2"],
        ["experiments"],
        ["schema", "ppo-math"],
        ["clusters"],
        ["doctor"],
        ["image", "build", "control"],
        ["etcd", "roles"],
        ["completion", "bash"],
        ["stop", trial],
        ["rm", trial, "--yes"],
    ]


def test_no_verb_imports_from_the_current_folder(
    tiny_policy: Path, file_root: Path, tmp_path: Path
) -> None:
    here, markers = tmp_path / "shared", tmp_path / "markers"
    for folder in (here, markers):
        folder.mkdir()
    for name in EVIL:
        (here / f"{name}.py").write_text(MARK)
    lines = command_lines(tiny_policy, tmp_path)
    environment = {
        **os.environ,
        "REALSYS_FILE_ROOT": str(file_root),
        "MARKERS": str(markers),
    }
    done = subprocess.run(
        [sys.executable, "-P", "-c", DRIVER, json.dumps(lines)],
        cwd=here,
        env=environment,
        input="hello\n",
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert {line: ran for line, (_, ran, _) in found.items() if ran} == {}
    refused = {line.split()[0]: shown for line, (status, _, shown) in found.items() if status}
    assert refused.keys() == REFUSED, refused
    entry = EMPTY_ENTRY + "sys.argv[0] = sys.executable; sys.exit(main())"
    words = ["serve", str(tiny_policy), "--port", "0", "--json"]
    with subprocess.Popen(
        [sys.executable, "-P", "-c", entry, *words],
        cwd=here,
        env={**environment, "REALSYS_API_KEY": "sk-local"},
        stdout=subprocess.PIPE,
        text=True,
    ) as server:
        assert server.stdout is not None
        try:
            told = [json.loads(line) for line in (server.stdout.readline(),) if line]
        finally:
            server.kill()
    assert sorted(markers.iterdir()) == []
    assert told[0]["url"].startswith("http://")
    assert {line[0] for line in (*lines, words)} == set(VERBS)
