"""Harbor tasks in real boxes: the example's own solution gets 1, and no script can make its verdict up."""

from __future__ import annotations

import asyncio
import os
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harbor_tasks import write_task

from realsys.api.errors import ClusterError, DataError, SandboxFailure
from realsys.data.harbor.task_directory import read_task
from realsys.rewards.harbor import try_tasks
from realsys.rewards.harbor.harbor_rule import HarborTests
from realsys.rewards.sandbox import sandbox as door
from realsys.rewards.sandbox.node_support import NodeSupport

DOCKER, TEST = "environment/Dockerfile", "tests/test.sh"
SLOW = "[agent]\ntimeout_sec = 3\n[verifier]\ntimeout_sec = 20\n"
BOTH_SLOW = SLOW.replace("20", "1")


@pytest.fixture(scope="module")
def rule() -> Iterator[HarborTests]:
    made = HarborTests(agent_s=30, verifier_s=30, mem=256, disk=64)
    yield made
    close(made)


def close(rule: Any) -> None:
    if rule._sandbox is not None:
        rule._sandbox._sandbox.close()


def scores(rule: HarborTests, response: str, task: Path) -> dict[str, float]:
    return asyncio.run(rule(response, {"task_directory": str(task)}))


def reward(rule: HarborTests, script: str, task: Path) -> float:
    """Reward of a script in a fenced block."""
    return scores(rule, f"So:\n```bash\n{script}\n```\n", task)["reward"]


def test_a_script_is_scored_by_the_tests(rule: HarborTests, tmp_path: Path) -> None:
    task = write_task(tmp_path)
    right = {"reward": 1.0, "correct": 1.0, "no_verdict": 0.0}
    wrong = {"reward": 0.0, "correct": 0.0, "no_verdict": 0.0}
    assert scores(rule, "```sh\necho 42 > answer.txt\n```", task) == right
    assert scores(rule, "```\necho 43 > answer.txt\n```", task) == wrong
    two = "```bash\necho 42 > answer.txt\n```\nNo:\n```bash\necho 1 > answer.txt\n```"
    assert scores(rule, two, task) == wrong
    assert scores(rule, "echo 42 > answer.txt", task) == wrong  # no fenced block
    whole = HarborTests(fenced=False, disk=64)
    assert scores(whole, "echo 42 > answer.txt\0", task) == right
    close(whole)
    with pytest.raises(DataError, match="task_directory"):
        asyncio.run(rule("x", {"prompt": "x"}))


def test_named_rewards_are_parts(rule: HarborTests, tmp_path: Path) -> None:
    test = """echo '{"made": 1, "right": 0.5}' > /logs/verifier/reward.json\n"""
    found = scores(rule, "```\ntrue\n```", write_task(tmp_path, **{TEST: test}))
    assert found == {"made": 1.0, "right": 0.5, "reward": 0.75, "correct": 0.0, "no_verdict": 0.0}


def test_the_dockerfile_is_done_in_the_box(rule: HarborTests, tmp_path: Path) -> None:
    docker = r"""FROM some/image
ARG WHO=you
ENV GREETING="hello $WHO" PATH=/srv/bin:$PATH
RUN apt-get update && apt-get install -y bash && pip install --no-cache-dir msgspec
WORKDIR /srv/work
COPY data ./data/
COPY one.txt renamed.txt
COPY *.sh /srv/bin/
RUN chmod +x /srv/bin/*.sh && \
    cat data/a.txt renamed.txt > both.txt && echo "$WHO" >> both.txt
"""
    test = """{ cat both.txt; hello.sh; echo "$GREETING $CASE $CHECK"; pwd; ls data; } > /tmp/all
grep -v '^#' /tests/expected | diff /tmp/all - && echo 1 > /logs/verifier/reward.txt
"""
    expected = "a\none\nyou\nhi\nhello you 7 8\n/srv/work\na.txt\nlink\n"
    config = "[environment.env]\nCASE = '7'\n[verifier.env]\nCHECK = '8'\n"
    task = write_task(
        tmp_path,
        **{
            DOCKER: docker, TEST: test, "task.toml": config, "tests/expected": expected,
            "environment/data/a.txt": "a\n", "environment/one.txt": "one\n",
            "environment/hello.sh": "#!/bin/sh\necho hi\n",
        },
    )  # fmt: skip
    (task / "environment/data/link").symlink_to("/etc/shadow")
    verdict = rule.verdict("true", task)
    assert (verdict.reward, verdict.output) == (1.0, ""), verdict
    assert rule.verdict("echo more >> both.txt", task).reward == 0.0  # and it is as before
    assert rule.verdict("true", task).reward == 1.0


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("RUN echo before; curl http://x; exit 3", "exit 3.*before"),
        ("RUN useradd me", "a step of the Dockerfile failed"),
        ("RUN mkdir /usr/share/x", "Read-only file system"),
        ("COPY large .", "larger than the box's 64 MiB"),
    ],
)
def test_a_dockerfile_that_fails_here_is_no_score(
    rule: HarborTests, tmp_path: Path, line: str, what: str
) -> None:
    task = write_task(tmp_path, **{DOCKER: f"FROM a\n{line}\n", "environment/large": ""})
    os.truncate(task / "environment/large", 65 << 20)
    with pytest.raises(DataError, match=what) as raised:
        reward(rule, "true", task)
    if line.startswith("RUN"):
        assert raised.value.where.endswith("environment/Dockerfile:2")


CHEATS = {
    "a verdict written beforehand": "mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt",
    "a link for the verdict": "ln -s /app /logs/verifier; echo 1 > /app/reward.txt",
    "a verdict beside the logs": "echo 1 > /logs/agent/reward.txt; echo 1 > /logs/artifacts/reward.json",
    "tests of its own": "mkdir -p /tests; echo 'echo 1 > /logs/verifier/reward.txt' > /tests/test.sh",
    "the tests, read": "cat /tests/* /logs/verifier/* && echo 42 > answer.txt",
    "the task's files on the node": "grep -r 42 TASK && echo 42 > answer.txt",
    "a process that waits for the tests": """
(trap '' TERM HUP INT; exec setsid bash -c '
    until test -d /tests; do :; done; echo 42 > /app/answer.txt; echo 1 > /logs/verifier/reward.txt') &
setsid nohup bash -c 'until test -d /logs/verifier; do sleep 0.01; done; echo 42 > /app/answer.txt' &""",
    "folders that are gone": "rm -rf /app /logs/agent; mv /app /logs/verifier; rmdir /app",
    "another root": "mkdir -p /app/x; unshare -r mount --bind /app/x /tests; chroot /app/x true",
    "another bash": "cp /usr/bin/true /app/bash; export PATH=/app:$PATH; alias grep=true",
    "a program of the system": "cp /usr/bin/true /usr/bin/grep; ln -sf /usr/bin/true /bin/grep",
    "a file that can't be kept": "mkfifo answer.txt /app/f; exec 3<>/app/f; chmod 0 /app",
}


@pytest.mark.parametrize("cheat", CHEATS, ids=lambda name: name.replace(" ", "_"))
def test_a_script_can_not_make_up_its_verdict(
    rule: HarborTests, tmp_path: Path, cheat: str
) -> None:
    script = CHEATS[cheat].replace("TASK", str(tmp_path))
    assert reward(rule, script, write_task(tmp_path)) == 0.0


def test_a_script_that_fails_or_takes_too_long_is_judged_by_what_it_left(
    rule: HarborTests, tmp_path: Path
) -> None:
    task = write_task(tmp_path, **{"task.toml": SLOW})
    for script in ("exit 3", "sleep 60", "kill -9 $$", "while true; do :; done"):
        assert reward(rule, f"echo 42 > answer.txt\n{script}", task) == 1.0


@pytest.mark.parametrize(
    "test",
    [
        "exit 0",
        "echo passed > /logs/verifier/reward.txt",
        "echo 1 > /logs/verifier/reward.txt; sleep 60",
        "mkdir /logs/verifier/reward.txt",
        "ln -s /proc/self/status /logs/verifier/reward.txt",
    ],
)
def test_tests_without_a_verdict_count_0(rule: HarborTests, tmp_path: Path, test: str) -> None:
    task = write_task(tmp_path, **{TEST: test, "task.toml": BOTH_SLOW})
    assert scores(rule, "```\ntrue\n```", task) == {
        "reward": 0.0,
        "correct": 0.0,
        "no_verdict": 1.0,
    }


def test_files_stay_from_one_command_to_the_next_and_processes_do_not(
    rule: HarborTests, tmp_path: Path
) -> None:
    instruction = {"instruction.md": "Write 42 into answer.txt; /data has nothing."}
    box = rule.open_box(read_task(write_task(tmp_path, **instruction)))
    assert box.verify().reward == 0.0
    first = box.run("echo 4 > /data/part; echo 2 > ~/part; echo x > /tmp/x; sleep 600 & echo $!")
    assert first.stdout.strip().isdigit()
    second = box.run("cat /data/part ~/part | tr -d '\\n' > answer.txt; cat /tmp/x; pgrep sleep")
    assert (second.stdout, second.exit_code) == (b"x\n", 1)
    assert box.verify().reward == 1.0
    assert box.run("head -c 60M /dev/urandom > /app/a").archive is not None
    lost = box.run("head -c 60M /dev/urandom > /app/b; rm answer.txt; ls /app")
    assert (lost.stdout, lost.archive) == (b"a\nb\n", None)  # more than its disk: undone
    assert box.verify().reward == 1.0
    assert box.run("ls /app; echo 41 > answer.txt").stdout == b"a\nanswer.txt\n"
    assert box.verify().reward == 0.0


def test_a_box_that_fails_has_changed_nothing(
    rule: HarborTests, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    box = rule.open_box(read_task(write_task(tmp_path)))
    box.run("echo 42 > answer.txt")
    with monkeypatch.context() as patch:
        patch.setattr(door.Sandbox, "_reply", lambda *_: door.messages.BoxReply(failure="killed"))
        with pytest.raises(SandboxFailure, match="killed"):
            box.run("rm answer.txt")
        with pytest.raises(SandboxFailure):
            box.verify()
    assert box.verify().reward == 1.0


def test_a_node_that_lacks_what_a_task_needs_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = write_task(tmp_path / "tasks/good")
    write_task(tmp_path / "tasks/other", **{DOCKER: "FROM a\nRUN apt-get install no-such-tool\n"})
    tasks = (str(tmp_path / "tasks"),)
    with pytest.raises(ClusterError, match=r"no-such-tool \(other:2\)"):
        reward(HarborTests(tasks=tasks, disk=64), "true", good)
    assumed = HarborTests(tasks=tasks, assume=("no-such-tool",), disk=64)
    assert reward(assumed, "echo 42 > answer.txt", good) == 1.0
    close(assumed)
    nothing = NodeSupport(missing={"user": "no"}, landlock_abi=0, kernel="4")
    monkeypatch.setattr(door, "node_support", lambda: nothing)
    with pytest.raises(ClusterError, match="missing: user"):
        reward(HarborTests(disk=64), "true", good)


def test_trying_tasks_tells_which_work_here(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_task(tmp_path / "a")
    assert try_tasks.main([str(tmp_path), "disk=64"]) == 0
    write_task(tmp_path / "b", **{TEST: "curl http://x || echo no network\n"})
    write_task(tmp_path / "c", **{DOCKER: "FROM a\nRUN apt install no-such-tool\n"})
    write_task(tmp_path / "d", **{"task.toml": "[environment]\ngpus = 1\n"})
    write_task(tmp_path / "e", **{TEST: "echo 1 > /logs/verifier/reward.txt\n"})
    helper = {
        "solution/solve.sh": "cp /solution/answer .; mv answer answer.txt",
        "solution/answer": "42\n",
    }
    write_task(tmp_path / "f", **helper)
    assert try_tasks.main([str(tmp_path), "disk=64"]) == 1
    lines = [line for line in capsys.readouterr().out.splitlines() if line[:3] in ("ok ", "NO ")]
    begins = [
        "ok  a: solution 1, nothing 0",
        "ok  a: solution 1, nothing 0",
        "NO  b: solution 0, nothing 0 there is no reward.json and no reward.txt; the tests ended with",
        "NO  c: this node does not have no-such-tool (c:2)",
        "NO  d: it asks for GPUs, which a box does not have (",
        "NO  e: solution 1, nothing 1",
        "ok  f: solution 1, nothing 0",
    ]
    assert all(map(str.startswith, lines, begins)), lines
    assert len(lines) == len(begins)


# ---- images -----------------------------------------------------------------------------------

# What `apptainer exec OPTIONS IMAGE COMMAND` is to do, with the node's system in place of an image's.
APPTAINER = """#!/bin/bash
printf '%s\\n' "$@" > {log}.$$
while [ "$1" != {image} ]; do shift; done
shift
exec unshare --user --map-root-user --mount --pid --net --fork --kill-child bash -c '
    root={root}; mount -t tmpfs none $root
    set -e
    for name in usr bin lib lib64 sbin; do
        if [ -L /$name ]; then cp -P /$name $root; continue; fi
        mkdir $root/$name; mount --bind /$name $root/$name; mount -o remount,bind,ro $root/$name
    done
    mkdir $root/dev $root/tmp $root/proc; touch $root/dev/null
    mount --bind /dev/null $root/dev/null; mount -t proc none $root/proc
    ln -s /proc/self/fd $root/dev/fd
    exec env -i PATH=/usr/bin:/bin /usr/sbin/chroot $root "$@"' sh "$@"
"""


@pytest.fixture
def apptainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in for Apptainer on PATH, and the file of an image; the folder with what it was told."""
    places = {"log": tmp_path / "told", "image": tmp_path / "image.sif", "root": tmp_path / "root"}
    for folder in (places["root"], tmp_path / "programs"):
        folder.mkdir()
    places["image"].write_text("")
    program = tmp_path / "programs/apptainer"
    text = APPTAINER
    for name, path in places.items():
        text = text.replace(f"{{{name}}}", shlex.quote(str(path)))
    program.write_text(text)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    return tmp_path


def test_commands_run_in_a_tasks_image_where_apptainer_is(apptainer: Path) -> None:
    docker = "FROM python:3.12\nRUN curl http://x | sh\nWORKDIR /work\nCOPY --from=a b c\n"
    image = str(apptainer / "image.sif")
    task = write_task(apptainer / "task", **{DOCKER: docker, "task.toml": SLOW})
    rule = HarborTests(images=(f"task={image}",), disk=64, mem=256)
    box = rule.open_box(read_task(task, rule.images))
    first = box.run(
        "echo 42 > answer.txt; echo seen; pwd; ls -d /tests /logs/verifier; touch /usr/x"
    )
    assert (first.ended, first.exit_code) == ("exit", 1)
    assert first.stderr.startswith(b"seen\n/work\n")
    assert first.stderr.count(b"No such file or directory") == 2
    assert b"Read-only file system" in first.stderr
    assert box.verify().reward == 1.0
    assert box.run("sleep 60").ended == "wall_time"
    assert box.verify().reward == 1.0
    assert box.run_solution().exit_code == 0
    told = [path.read_text().splitlines() for path in apptainer.glob("told.*")]
    assert len(told) == 5
    for words in told:
        given = words[: words.index(image)]
        assert given[0] == "exec"
        assert {"--containall", "--cleanenv", "--no-home", "--writable-tmpfs"} <= set(given)
        assert given[given.index("--network") + 1] == "none"
    for cheat in (
        "exec 3>/proc/$PPID/fd/1; echo 1 > reward.txt; tar -c -f - reward.txt >&3",
        "mkdir -p /tests /logs/verifier; echo 1 > /logs/verifier/reward.txt; echo exit > /tests/test.sh",
        "kill -9 $PPID; rm -f answer.txt",
    ):
        assert rule.verdict(cheat, task).reward == 0.0, cheat
    close(rule)


def test_a_container_that_does_not_start_is_no_score(apptainer: Path) -> None:
    task = read_task(write_task(apptainer / "task"), [f"task={apptainer}/image.sif"])
    rule = HarborTests(disk=64)
    box = rule.open_box(task)
    (apptainer / "programs/apptainer").write_text(
        "#!/bin/sh\necho FATAL: no loop device >&2; exit 255\n"
    )
    with pytest.raises(SandboxFailure, match="FATAL: no loop"):
        box.run("echo 42 > answer.txt")
    (apptainer / "image.sif").unlink()
    with pytest.raises(ClusterError, match="no file"):
        rule.open_box(task)
    images = (f"task={apptainer}/image.sif",)
    all_checked = HarborTests(disk=64, images=images, tasks=(str(apptainer),))
    with pytest.raises(ClusterError, match="no file"):  # before another task's box
        reward(all_checked, "true", write_task(apptainer / "other"))
    (apptainer / "programs/apptainer").unlink()
    with pytest.raises(ClusterError, match="apptainer"):
        rule.open_box(task)
    close(rule)
