"""Harbor task directories: what is read, and everything wrong with one at once, with file and line."""

from __future__ import annotations

import sys
from pathlib import Path

import golden
import pytest
from harbor_tasks import FILES, write_task

from realsys.api.errors import DataError
from realsys.data.harbor import node_packages
from realsys.data.harbor.dockerfile import (
    BuildPlan,
    CopyStep,
    PackageNeed,
    RunStep,
    named_folders,
    read_dockerfile,
)
from realsys.data.harbor.node_packages import lacking_packages
from realsys.data.harbor.task_directory import checked_task, read_task, task_paths


def faults(path: Path) -> list[str]:
    """``FILE:LINE what`` of everything that is wrong."""
    task, problems = checked_task(path)
    assert (task is None) == bool(problems)
    return [f"{Path(p.where).relative_to(path)} {p.what}" for p in problems]


def test_a_task_is_read(tmp_path: Path) -> None:
    config = """
version = "1.0"
some_day = true
[metadata]
author = "x"
[agent]
timeout_sec = 10
[verifier]
timeout_sec = 20.5
env = { MODEL = "${JUDGE:-none}" }
[environment]
cpus = 2
memory = "2G"
storage_mb = 100
allow_internet = true
gpus = 0
env = { CASE = "7" }
[environment.unknown]
x = 1
"""
    marked = "<!-- a canary GUID 1 -->\n# canary 2\n\nDo it in /data/x and /usr/y.\n"
    path = write_task(
        tmp_path / "one", **{"task.toml": config, "instruction.md": marked},
        tests__test_sh=None, tests__helper="x",
    )  # fmt: skip
    task = read_task(path)
    assert (task.name, task.instruction) == ("one", "Do it in /data/x and /usr/y.")
    assert (task.agent.timeout_sec, task.verifier.timeout_sec) == (10.0, 20.5)
    assert task.environment.memory_bytes == 2 << 30
    assert task.environment.storage_bytes == 100 << 20
    assert (task.environment.cpus, task.environment.env) == (2.0, {"CASE": "7"})
    assert task.verifier.env == {"MODEL": "none"}
    assert task.answer == FILES["solution/solve.sh"]
    assert (task.workdir, task.folders) == ("/app", ("/app", "/root", "/data"))
    assert task.downloads == ()


def test_a_solution_of_several_files_is_no_answer(tmp_path: Path) -> None:
    assert read_task(write_task(tmp_path / "a", solution__more="x")).answer is None
    assert read_task(write_task(tmp_path / "b", **{"solution__solve.sh": None})).answer is None


def test_tests_that_download_are_named_with_their_lines(tmp_path: Path) -> None:
    test = "#!/bin/bash\n# curl\necho curl\n  apt-get update\nsudo curl x | sh\nuvx pytest\n"
    task = read_task(write_task(tmp_path, **{"tests__test.sh": test}))
    assert task.downloads == (
        "tests/test.sh:4: apt-get", "tests/test.sh:5: curl", "tests/test.sh:6: uvx",
    )  # fmt: skip


TOML, DOCKER = "task.toml", "environment__Dockerfile"
LACKS = "which a box does not have"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({TOML: None}, ["task.toml:1 task.toml can't be used: No such file or directory"]),
        ({TOML: "[agent]\ntimeout_sec = \n"}, ["task.toml:2 it is no TOML: "]),
        ({TOML: "[agent\n"}, ["task.toml:1 it is no TOML: "]),
        ({TOML: "[agent]\n\ntimeout_sec = 'x'\n"}, ["task.toml:3 agent.timeout_sec: Expected "]),
        ({TOML: "[agent]\ntimeout_sec = -1\n"}, ["task.toml:2 agent.timeout_sec is -1"]),
        ({TOML: "agent = 3\n"}, ["task.toml:1 agent.: Expected `object`, got `int`"]),
        ({TOML: "schema_version = '2.0'\n"},
         [f"task.toml:1 it asks for schema 2.0 (1.x is known), {LACKS}"]),
        ({TOML: "[environment]\ngpus = 1\n"}, [f"task.toml:2 it asks for GPUs, {LACKS}"]),
        ({TOML: "[environment]\nos = 'Windows'\n"}, [f"task.toml:2 it asks for Windows, {LACKS}"]),
        ({TOML: "[environment]\nenv = {KEY = '${KEY}'}\n"},
         [f"task.toml:1 it asks for a variable of the host (KEY), {LACKS}"]),
        ({TOML: "[environment.env]\nA = 'x'\nKEY = '${KEY}'\n"},
         [f"task.toml:3 it asks for a variable of the host (KEY), {LACKS}"]),
        ({TOML: "[verifier]\nenvironment_mode = 'separate'\n[[steps]]\nname = 'a'\n"},
         [f"task.toml:3 it asks for several steps, {LACKS}",
          f"task.toml:2 it asks for a container for the tests alone, {LACKS}"]),
        ({TOML: "[agent]\nuser = 'agent'\nnetwork_mode = 'public'\n"},
         [f"task.toml:3 it asks for a network, {LACKS}",
          f"task.toml:2 it asks for a second user, {LACKS}"]),
        ({TOML: "[environment.healthcheck]\ncommand = 'x'\n"},
         [f"task.toml:1 it asks for a service that outlives a command, {LACKS}"]),
        ({TOML: "[environment]\ndocker_image = 'x:1'\n", DOCKER: None},
         [f"task.toml:2 it asks for the image x:1, of which there is no file and no Dockerfile, {LACKS}"]),
        ({"instruction.md": " \n", "tests__test.sh": None},
         ["instruction.md:1 instruction.md can't be used: it is empty",
          "tests/test.sh:1 tests/test.sh can't be used: No such file or directory"]),
        ({"environment__docker-compose.yaml": "x", "trajectory.json": "{}"},
         [f"environment/docker-compose.yaml:1 it asks for containers beside the task's own, {LACKS}",
          f"trajectory.json:1 it asks for an agent's earlier turns, {LACKS}"]),
        ({DOCKER: "FROM a\nCOPY poem.txt .\nCOPY *.csv /app/\n"},
         ["environment/Dockerfile:2 there is no poem.txt in environment/",
          "environment/Dockerfile:3 there is no *.csv in environment/"]),
        ({DOCKER: "FROM a\nCOPY x /y\n", "environment__x": ""},
         ["environment/Dockerfile:2 /y is a file in the root folder"]),
        ({"tests__test.sh": "#!/bin/bash\r\necho 1\r\n"},
         ["tests/test.sh:1 tests/test.sh has CRLF line ends, with which bash can't run it"]),
        ({DOCKER: "FROM a\nRUN pip install -r needs.txt\n"},
         ["environment/Dockerfile:2 there is no needs.txt in environment/"]),
    ],
)  # fmt: skip
def test_what_is_wrong_is_found_with_its_line(
    tmp_path: Path, changes: dict[str, str | None], expected: list[str]
) -> None:
    found = faults(write_task(tmp_path, **changes))
    assert len(found) == len(expected), found
    assert all(map(str.startswith, found, expected)), found


@pytest.mark.parametrize("name", ["tests", "solution", "environment", "tests/test.sh"])
def test_links_that_lead_out_of_a_folder_are_refused(tmp_path: Path, name: str) -> None:
    task = write_task(tmp_path / "task")
    (task / name).rename(tmp_path / "elsewhere")
    (task / name).symlink_to(tmp_path / "elsewhere")
    (found,) = faults(task)
    golden.check(found)


def test_links_within_a_folder_are_as_files(tmp_path: Path) -> None:
    task = write_task(tmp_path / "task")
    (task / "tests/test.sh").rename(task / "tests/run.sh")
    (task / "tests/test.sh").symlink_to("run.sh")
    (tmp_path / "other").symlink_to(task)
    assert faults(task) == faults(tmp_path / "other") == []


def test_a_file_that_is_no_text(tmp_path: Path) -> None:
    (write_task(tmp_path) / "instruction.md").write_bytes(b"\xff\xfe")
    golden.check(faults(tmp_path))


def test_an_image_that_is_at_hand_needs_no_dockerfile_that_a_box_can_do(tmp_path: Path) -> None:
    docker = "FROM a\nWORKDIR /usr/src\nCOPY --from=b x y\n"
    config = "[environment]\ndocker_image = 'some/image:1'\n"
    path = write_task(tmp_path / "one", **{TOML: config, DOCKER: docker})
    assert len(faults(path)) == 2
    for name in ("some/image:1", "one"):
        task = read_task(path, ["other=/y.sif", f"{name}=/x.sif"])
        assert (task.sif, task.workdir, task.build.steps) == ("/x.sif", "/usr/src", [])


def test_task_directories_of_a_folder(tmp_path: Path) -> None:
    for name in ("b", "a"):
        write_task(tmp_path / "tasks" / name)
    (tmp_path / "tasks/docs").mkdir()
    write_task(tmp_path / "tasks/forgotten", **{TOML: None})
    found = [path.name for path in task_paths(tmp_path / "tasks")]
    assert found == ["a", "b", "forgotten"]
    assert task_paths(tmp_path / "tasks/a") == [tmp_path / "tasks/a"]
    for path in (tmp_path / "tasks/docs", tmp_path / "nothing"):
        with golden.raises(DataError):
            task_paths(path)


# ---- Dockerfiles ------------------------------------------------------------------------------


def run(line: int, text: str, workdir: str = "/app", **env: str) -> RunStep:
    return RunStep(line=line, text=text, workdir=workdir, env=env)


def test_a_dockerfile_becomes_steps() -> None:
    text = r"""# a comment
ARG VERSION=24.04
FROM ubuntu:${VERSION} AS base
ENV PATH="/opt/x/bin:$PATH" A=1 B="two words"
ENV OLD some text
WORKDIR /srv/data
workdir inner
RUN --mount=type=cache,target=/x apt-get update && \
    # in between
    apt-get install -y \
      git=1:2 make

RUN ["make", "a b"]
COPY a.txt b.txt ./
COPY --chown=me:me src /srv/src
ADD ["one file", "/srv/data/inner/file"]
COPY c.txt /srv/data
USER root
CMD ["sleep"]
"""
    plan = read_dockerfile(text, {})
    assert plan.problems == []
    assert (plan.image, plan.workdir) == ("ubuntu:24.04", "/srv/data/inner")
    env = {
        "HOME": "/root",
        "PATH": "/opt/x/bin:$PATH",
        "A": "1",
        "B": "two words",
        "OLD": "some text",
    }
    assert plan.env == env
    given, inner = {"VERSION": "24.04", **env}, "/srv/data/inner"
    apt = "apt-get update &&     apt-get install -y       git=1:2 make"
    assert plan.steps == [
        run(6, "mkdir -p /srv/data", "/"),
        run(7, "mkdir -p /srv/data/inner", "/"),
        run(8, apt, inner, **given),
        run(13, "make 'a b'", inner, **given),
        CopyStep(line=14, sources=("a.txt", "b.txt"), target=inner, into=True),
        CopyStep(line=15, sources=("src",), target="/srv/src", into=False),
        CopyStep(line=16, sources=("one file",), target=f"{inner}/file", into=False),
        CopyStep(line=17, sources=("c.txt",), target="/srv/data", into=True),
    ]
    assert plan.packages == [PackageNeed(False, "git", 8), PackageNeed(False, "make", 8)]


@pytest.mark.parametrize(
    ("command", "system", "pip"),
    [
        ("apt-get install -y -o A=b -t stable --no-install-recommends g++ lib-dev=1.0", "g++ lib-dev",
         ""),
        ("DEBIAN_FRONTEND=noninteractive sudo apt install curl; apk add --no-cache bash", "curl bash", ""),
        ("pip install --no-cache-dir -i http://x numpy==2.0 'uvicorn[standard]>=0.3' PyYAML", "",
         "numpy uvicorn PyYAML"),
        ("python3 -m pip install -r /tmp/requirements.txt pytest", "", "torch einops pytest"),
        ("uv pip install --system rich || echo 'pip install not_this'", "", "rich"),
        ("if true; then pip install six; fi", "", ""),
        ("echo apt-get install x", "", ""),
    ],
)  # fmt: skip
def test_packages_of_run_lines(command: str, system: str, pip: str) -> None:
    files = {"requirements.txt": "# all\ntorch>=2  # x\n\n--index-url x\neinops\n"}
    plan = read_dockerfile(f"FROM a\nRUN {command}", files)
    assert [need.name for need in plan.packages if not need.by_pip] == system.split()
    assert [need.name for need in plan.packages if need.by_pip] == pip.split()
    assert plan.problems == []


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("FROM b", "stages before the last are not built"),
        ("COPY --from=b /x /app/x", "it copies from another image"),
        ("COPY x", "it copies from another image"),
        (
            "ADD https://x/y /app/y",
            "https://x/y is an address, an archive or outside of environment/",
        ),
        ("ADD a.tar.gz /app", "a.tar.gz is an address, an archive or outside of environment/"),
        ("COPY ../x /app", "../x is an address, an archive or outside of environment/"),
        ("COPY x /usr/local/bin/x", "/usr/local/bin/x is in a folder of the box's own"),
        ("WORKDIR /usr/src/app", "/usr/src/app is in a folder of the box's own"),
        ("RUN <<EOF", "here-documents are not read"),
        ("RUN cat <<'END' > x", "here-documents are not read"),
        (
            "RUN pip install git+https://x/y",
            "it installs git+https://x/y, which is no package's name",
        ),
        ("RUN pip install .", "it installs ., which is no package's name"),
        ("RUNN x", "there is no instruction RUNN"),
    ],
)
def test_what_a_box_can_not_do_is_refused(line: str, what: str) -> None:
    (problem,) = read_dockerfile(f"FROM a\n\n{line}\n", {}).problems
    assert (problem.line, problem.what) == (3, what)


def test_what_a_box_can_do() -> None:
    lines = ["RUN cat <<< text", "COPY a /tmp/a", "EXPOSE 80", "RUN apt-get clean", "ENV A"]
    for line in lines:
        assert read_dockerfile(f"FROM a\n{line}", {}).problems == [], line
    assert read_dockerfile("", {}) == BuildPlan()


def test_folders_that_texts_name() -> None:
    text = "Put /data/in.txt and `/out` (not and/or, a/b, http://x/y, //c, ~/z, $A/b, /usr/x) into '/work'."
    assert named_folders(text, "/data/other /tmp/x /5") == ["/data", "/out", "/work"]
    assert len(named_folders(" ".join(f"/f{n}" for n in range(100)))) == 32


# ---- what a node has --------------------------------------------------------------------------


def test_packages_that_a_node_lacks_are_named_with_those_who_need_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    docker = (
        "FROM a\nRUN apt-get install tool library gone && pip install msgspec no-such-package\n"
    )
    tasks = [read_task(write_task(tmp_path / name, **{DOCKER: docker})) for name in "abcd"]
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, text in {
        "tool": "#!/bin/sh\n",
        "dpkg-query": "#!/bin/sh\necho library installed\necho gone config-files\n",
    }.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setenv("PATH", str(programs), prepend=":")
    found = lacking_packages(tasks)
    assert found == "gone (a:2, b:2, c:2, …); no-such-package (a:2, b:2, c:2, …)"
    assert lacking_packages(tasks[:1], ["gone"]) == "no-such-package (a:2)"
    assert lacking_packages(tasks, ["gone", "no-such-package"]) == ""
    monkeypatch.setattr(node_packages.shutil, "which", lambda name, path=None: None)
    assert lacking_packages(tasks[:1], ["no-such-package"]) == (
        "gone (a:2); library (a:2); tool (a:2)"  # another distribution: by programs alone
    )
