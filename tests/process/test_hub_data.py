"""Data by their names on a hub, asked and fetched with huggingface_hub from a hub on this machine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_hub import FakeHub
from real_trials import Trials, explain, metrics_of, name_of

from launcher.hub import hub_data
from launcher.hub.hub_data import DataHub
from launcher.hub.hub_names import HubListing, HubName, files_of, parse_hub_name, pinned
from realsys.api.errors import ConfigError
from realsys.api.plan import LaunchPlan, read_plan
from realsys.observability.metrics import deterministic
from realsys.trial.records import TrialFiles
from realsys.trial.trial_state import State

TRAIN = "data/train-?????-of-00002.jsonl"
RUN = (
    *("task.eval_path=hf:lab/sums/data/test.jsonl", "task.eval_size=8", "gen.max_new_tokens=6"),
    *("train_bs_n_seqs=8", "group_size=2", "scheduling.model_worker.cpu=1"),
    *("actor.optimizer.lr_schedule=constant", "actor.optimizer.warmup_steps_proportion=0"),
    *("exp_ctrl.benchmark_steps=2", "exp_ctrl.ckpt_freq_steps=1"),
)


def sums(first: int, num: int) -> bytes:
    """Records of sums that begin with different numbers."""
    pairs = [(f"{n} + 1 =", f"{n + 1}") for n in range(first, first + num)]
    return "".join(json.dumps({"prompt": p, "answer": a}) + "\n" for p, a in pairs).encode()


def data_set(first: int) -> dict[str, bytes]:
    """The files of a data set with two splits, one of them in two shards."""
    shards = {f"data/train-0000{i}-of-00002.jsonl": sums(first + 50 * i, 40) for i in range(2)}
    return {"README.md": b"# sums", "set.py": b"raise", **shards, "data/test.jsonl": sums(7, 8)}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """A hub that this process and its commands ask."""
    with FakeHub() as running:
        for name, value in {**running.environment, "HF_HOME": str(tmp_path / "hf")}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.delenv("HF_TOKEN", raising=False)
        yield running


def paths_of(plan: LaunchPlan) -> set[str]:
    """Where workers read questions."""
    config = plan.phases[-1].config
    return {data.args["path"] for worker in config.model_worker for data in worker.datasets}


def pinned_names(plan: LaunchPlan) -> dict[str, str]:
    return {one.path: one.value for one in plan.chosen if one.path.endswith("path")}


def completed(trials: Trials, files: TrialFiles) -> list[dict[str, object]]:
    """Metrics of a trial's steps, once it is over."""
    view = trials.wait(files)
    assert view.state is State.COMPLETED, explain(files, view)
    return [deterministic(row) for row in metrics_of(files)]


def test_a_run_keeps_the_commit_that_it_began_with_and_repeats_without_the_hub(
    hub: FakeHub, trials: Trials, tiny_policy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("grpo-math", f"actor.path={tiny_policy}", "task.path=hf:lab/sums", *RUN)
    commit = hub.publish("lab/sums", data_set(0))
    names = {
        "task.path": f"hf:lab/sums@{commit}/{TRAIN}",
        "task.eval_path": f"hf:lab/sums@{commit}/data/test.jsonl",
    }

    planned = trials.run("plan", *words)  # lists, fetches nothing
    assert planned.returncode == 0, planned.stderr
    assert all(name in planned.stdout for name in names.values())
    assert "task.path: 2 files," in planned.stderr
    assert hub.requests == [("GET", "/api/datasets/lab/sums/revision/main")]

    files = trials.launch(*words[:1], "first", *words[1:])
    plan, fetched = read_plan(files.plan), trials.file_root / "cache/hf/lab/sums" / commit
    assert pinned_names(plan) == names
    assert paths_of(plan) == {str(fetched / TRAIN)}
    given = data_set(0)
    assert {str(p.relative_to(fetched)): p.read_bytes() for p in fetched.rglob("*.*")} == {
        name: given[name] for name in given if name.startswith("data/")
    }
    assert sorted(p.name for p in fetched.parent.iterdir()) == [commit, "revisions"]
    first = completed(trials, files)

    moved = hub.publish("lab/sums", data_set(100))
    asked = len(hub.requests)
    resumed = trials.run("resume", name_of(files), "--detach", "exp_ctrl.benchmark_steps=3")
    assert resumed.returncode == 0, resumed.stderr
    assert completed(trials, files)[: len(first) - 1] == first[:-1]
    assert paths_of(read_plan(files.plan)) == {str(fetched / TRAIN)}
    assert pinned_names(read_plan(files.plan)) == names
    assert len(hub.requests) == asked

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    again = trials.launch(*words[:1], "again", *words[1:])
    assert pinned_names(read_plan(again.plan)) == names
    assert completed(trials, again) == first
    by_commit = [word.replace("hf:lab/sums", f"hf:lab/sums@{commit}") for word in words]
    planned = trials.run("plan", *by_commit)
    assert (planned.returncode, "hub" in planned.stderr) == (0, False), planned.stderr

    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    planned = trials.run("plan", *words)
    assert f"hf:lab/sums@{moved}/{TRAIN}" in planned.stdout


def test_what_is_wrong_with_names_and_settings_is_told_at_once_and_nothing_starts(
    hub: FakeHub, trials: Trials, tiny_policy: Path
) -> None:
    hub.publish("lab/sums", data_set(0))
    words = (
        f"actor.path={tiny_policy}",
        *RUN[1:],
        "train_bs_n_seqs=0",
        "task.eval_path=hf:lab/sums/x",
    )
    done = trials.run("launch", "grpo-math", *words, "task.path=hf:lab/none", "--detach")
    assert done.returncode == 4
    assert "train_bs_n_seqs is 0" in done.stderr
    assert "this account (404)" in done.stderr
    assert "hf:lab/sums@main/x has no" in done.stderr
    assert "can't be read" not in done.stderr
    assert "Traceback" not in done.stderr
    assert not (trials.file_root / "runs").exists()


def test_a_mistake_is_told_before_anything_is_fetched(
    hub: FakeHub, trials: Trials, tiny_policy: Path
) -> None:
    hub.publish("lab/sums", data_set(0))
    words = (f"actor.path={tiny_policy}", *RUN, "actor.parallel=d3", "task.path=hf:lab/sums")
    done = trials.run("launch", "grpo-math", *words, "--detach")
    assert done.returncode == 4
    assert "train_bs_n_seqs" in done.stderr  # 8 do not divide over 3 ranks
    assert [path for _, path in hub.requests if "/resolve/" in path] == []


def test_data_show_fetches(hub: FakeHub, trials: Trials, tiny_policy: Path) -> None:
    hub.publish("lab/sums", data_set(0))
    words = (f"actor.path={tiny_policy}", "task.path=hf:lab/sums", *RUN)
    done = trials.run("data", "show", "grpo-math", *words, "--num", "1")
    assert done.returncode == 0, done.stderr
    assert "0 + 1" in done.stdout
    assert "fetching hf:lab/sums@" in done.stderr


class Asked:
    """What a launch asks of a hub for one setting, in this process."""

    def __init__(self, folder: Path, text: str = "hf:lab/sums") -> None:
        self.reports: list[str] = []
        self._hub = DataHub(folder / "kept", self.reports.append)
        self._name = parse_hub_name(text, where="task.path")

    @property
    def warnings(self) -> list[str]:
        return self._hub.warnings

    def listing(self) -> HubListing:
        return self._hub.listing(self._name, where="task.path")

    def fetch(self) -> dict[str, bytes]:
        """Content of each file that the name means. Raises ConfigError."""
        listing = self.listing()
        name: HubName = pinned(self._name, listing, "train", where="task.path")
        files = files_of(name, listing)
        if missing := self._hub.missing(name, files):
            self._hub.fetch(name, missing, listing, where="task.path")
        return {file: (self._hub.folder(name) / file).read_bytes() for file in files}

    def refusal(self) -> str:
        with pytest.raises(ConfigError) as caught:
            self.fetch()
        return caught.value.what


def test_a_private_data_set_needs_a_token(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.publish("lab/sums", data_set(0))
    hub.refusals["lab/sums"], hub.token = (401, "RepoNotFound"), "hf_of_anna"
    assert "this account (401)" in Asked(tmp_path).refusal()
    hub.refusals["lab/sums"] = (403, "GatedRepo")
    assert "lab/sums is gated," in Asked(tmp_path).refusal()
    monkeypatch.setenv("HF_TOKEN", "hf_of_anna")
    assert list(Asked(tmp_path).fetch()) == list(data_set(0))[2:4]


def test_a_revision_that_is_not_there(hub: FakeHub, tmp_path: Path) -> None:
    hub.publish("lab/sums", data_set(0), revision="refs/convert/parquet")
    assert "no revision 'main'" in Asked(tmp_path).refusal()
    for _ in range(2):
        assert len(Asked(tmp_path, "hf:lab/sums@refs/convert/parquet/data").fetch()) == 2


def test_files_are_asked_for_once(hub: FakeHub, tmp_path: Path) -> None:
    commit = hub.publish("lab/sums", data_set(0))
    assert Asked(tmp_path).fetch() == Asked(tmp_path, f"hf:lab/sums@{commit}").fetch()
    assert [path for method, path in hub.requests if method == "GET"] == [
        "/api/datasets/lab/sums/revision/main",
        *(f"/datasets/lab/sums/resolve/{commit}/{file}" for file in list(data_set(0))[2:4]),
    ]


def test_a_broken_connection_goes_on_where_it_broke(hub: FakeHub, tmp_path: Path) -> None:
    hub.publish("lab/sums", data_set(0))
    second = list(data_set(0))[3]
    hub.break_after[second] = (300, 1)
    assert Asked(tmp_path).fetch()[second] == data_set(0)[second]
    assert [path.endswith(second) for method, path in hub.requests if method == "GET"] == [
        *(False, False, True, True)
    ]


def test_a_connection_that_breaks_again_and_again_leaves_no_half_file(
    hub: FakeHub, tmp_path: Path
) -> None:
    commit = hub.publish("lab/sums", data_set(0))
    first, second = list(data_set(0))[2:4]
    hub.break_after[second] = (0, 1000)
    assert "asked for hf:lab/sums@" in Asked(tmp_path).refusal()
    kept = tmp_path / "kept/lab/sums"
    assert sorted(p.name for p in kept.iterdir()) == [commit, "revisions"]
    assert [p.name for p in (kept / commit).rglob("*.jsonl")] == [Path(first).name]
    hub.break_after.clear()
    before = len(hub.requests)
    assert Asked(tmp_path).fetch()[second] == data_set(0)[second]
    assert not any(path.endswith(first) for _, path in hub.requests[before:])


def test_a_hub_that_never_answers(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.is_silent = True
    monkeypatch.setattr(hub_data, "ANSWER_S", 0.5)
    assert "asked for hf:lab/sums@main:" in Asked(tmp_path).refusal()
    monkeypatch.setattr(hub_data, "ANSWER_S", 600.0)  # as a library that waits for ever
    monkeypatch.setattr(hub_data, "SILENCE_S", 2.0)
    assert "hf:lab/sums@main: nothing came" in Asked(tmp_path).refusal()


def test_a_hub_that_falls_silent_during_a_download(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.publish("lab/sums", data_set(0))
    asked = Asked(tmp_path)
    asked.listing()
    hub.is_silent = True
    monkeypatch.setattr(hub_data, "SILENCE_S", 3.0)
    monkeypatch.setattr(hub_data, "REPORT_S", 0.0)
    assert asked.refusal().endswith("for 3 s")
    assert asked.reports[0].startswith("fetching hf:lab/sums@")
    assert asked.reports[1:] == ["  0 KiB fetched"] * len(asked.reports[1:])
    (left,) = (tmp_path / "kept/lab/sums").iterdir()
    assert left.name == "revisions"


def test_without_a_network_the_last_known_commit_is_taken_and_said(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = hub.publish("lab/sums", data_set(0))
    before = Asked(tmp_path).fetch()
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    asked = Asked(tmp_path)
    assert asked.fetch() == before
    (warning,) = asked.warnings
    assert warning.startswith("the hub can't")
    assert warning.endswith(f"its files are those of commit {commit}, the last one known here")
    never = Asked(tmp_path, "hf:lab/sums@v2").refusal()
    assert never.startswith("the hub can't")


def test_a_file_whose_name_leads_out_of_the_folder_is_never_written(
    hub: FakeHub, tmp_path: Path
) -> None:
    hub.publish("lab/sums", {"train.jsonl": sums(0, 8), "../../../x.jsonl": b"{}"})
    assert "data set's folder" in Asked(tmp_path).refusal()
    assert not list(tmp_path.rglob("*.jsonl"))


def test_what_is_no_hub(hub: FakeHub, tmp_path: Path) -> None:
    hub.publish("lab/sums", {})
    hub.commits["lab/sums", "main"] = ("../../x", {"train.jsonl": b"{}"})
    assert "gives no commit" in Asked(tmp_path).refusal()
