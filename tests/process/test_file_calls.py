"""What a trial at rest asks of the file system that its folder is on: little, since thousands share it.

Two real trials whose first call takes an hour: one on a file system of this host, one on what seems to be
NFS with each process on another host, where nobody is told of anything. Calls are counted in the processes
(file_calls.py).
"""

from __future__ import annotations

import time
from pathlib import Path

from file_calls import CountedTrials, since, total
from real_trials import wait_until

from launcher.trials.trial_view import TrialView

PLUGIN = Path(__file__).parents[1] / "support" / "cost_plugin.py"
CALLS_PER_S, FILES_PER_S = 20.0, 1.0  # of docs/reliability.md
OF_A_PROCESS_PER_S = 8.0  # so that a poll is found: the supervisor makes 5
SETTLED_S = 15.0  # without a change, by when pauses have grown
COUNTED_S = 10.0


def is_generating(view: TrialView) -> bool:
    return any(w.mfc == "actor_gen" for w in view.workers)


def test_a_trial_at_rest_asks_little_of_a_shared_file_system(tmp_path: Path) -> None:
    places = {
        name: CountedTrials(tmp_path / name, as_nfs=name == "nfs") for name in ("local", "nfs")
    }
    try:
        files = {
            name: trials.launch(
                "cost-ppo",
                name,
                *("--import", str(PLUGIN)),
                "costs.actor_gen=3600",
                "task.train_size=96",
                "train_bs_n_seqs=8",
                "group_size=2",
                "exp_ctrl.eval_freq_steps=none",
                "scheduling.model_worker.cpu=1",
            )
            for name, trials in places.items()
        }
        for trial in files.values():
            wait_until(trial, is_generating, timeout_s=200, every_s=0.2)
        time.sleep(SETTLED_S)
        before = {name: trials.calls.by_process() for name, trials in places.items()}
        began_s = time.monotonic()
        time.sleep(COUNTED_S)
        after = {name: trials.calls.by_process() for name, trials in places.items()}
        took_s = time.monotonic() - began_s
        for name, trials in places.items():
            by_process = since(before[name], after[name])
            told = {trials.calls.program(p)[-60:]: c for p, c in by_process.items() if c.calls}
            assert total(by_process).writes > 0, "no lease was renewed: was anything counted?"
            assert total(by_process).calls / took_s <= CALLS_PER_S, (name, told)
            assert total(by_process).new_files / took_s <= FILES_PER_S, (name, told)
            most = max(counts.calls for counts in by_process.values())
            assert most / took_s <= OF_A_PROCESS_PER_S, (name, told)
    finally:
        for trials in places.values():
            trials.end_all()
