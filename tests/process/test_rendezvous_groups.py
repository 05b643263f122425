"""Process groups of two workers that meet at the first one's store: real processes, real gloo."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]

WORKER = """
import sys
import torch
import torch.distributed as dist
from pathlib import Path
from realsys.api.model import ModelName, ModelShardID, ProcessTopology
from realsys.model_worker.process_groups import make_process_groups
from realsys.model_worker.rendezvous import Rendezvous

by, worker, folder, endpoint = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4]
meeting = Rendezvous(
    by, worker=worker, num_workers=2, folder=folder, host="127.0.0.1", ports=None, timeout_s=60
)
if worker == 0:
    print(meeting.endpoint, flush=True)
meeting.connect_to(endpoint)
topo = ProcessTopology(data=2)
shards = [
    (ModelShardID(model_name=ModelName("actor"), topo=topo, parallelism_rank=i), i) for i in range(2)
]
groups = make_process_groups(
    shards, worker=worker, num_workers=2, open_store=lambda: meeting.store("main"), device="cpu",
    timeout_s=60,
)
x = torch.tensor([float(worker + 1)])
dist.all_reduce(x, group=groups[ModelName("actor")].data)
print("sum", x.item(), flush=True)
link = meeting.store("main.weights")
link.set(f"done/{worker}", "1")
link.wait([f"done/{i}" for i in range(2)])
if worker == 0:
    link.wait(["left"])  # the store is here: others may be in the middle of a word with it
else:
    link.set("left", "1")
import os
os._exit(0)
"""


@pytest.mark.parametrize("by", ["file", "tcp"])
def test_two_workers_form_their_groups(by: str, tmp_path: Path) -> None:
    def start(worker: int, endpoint: str) -> subprocess.Popen[str]:
        argv = [sys.executable, "-c", WORKER, by, str(worker), str(tmp_path / "meet"), endpoint]
        return subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    first = start(0, "")
    assert first.stdout is not None
    said: list[str] = []
    for line in first.stdout:  # warnings of libraries may come before it
        said.append(line)
        if line.startswith("127.0.0.1:") or (by == "file" and line == "\n"):
            break
    second = start(1, said[-1].strip())
    texts = [worker.communicate(timeout=100)[0] for worker in (first, second)]
    assert [worker.returncode for worker in (first, second)] == [0, 0], said + texts
    assert all("sum 3.0" in text for text in texts), said + texts
