"""Whole trials "on a GPU", on a machine without one: does any line mix tensors of two devices? By hand.

    python tests/by_hand/gpu/pretended/trials.py [NAME …]    a minute each, on two cores

Builds host_as_cuda.cpp against the torch that is installed (g++, half a minute), checks that a mixed
operation raises, and launches TRIALS with ``scheduling.model_worker.gpu=1`` and the like. What depends on
time, streams, NCCL, CUDA's memory and kernels can't be seen so. Prints a line for each; exit code 1 if one
failed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[3]
sys.path[:0] = [str(HERE.parent), str(ROOT)]

LIMIT_S = 600.0
GPU = "scheduling.model_worker.gpu=1"
HALF = "scheduling.model_worker.gpu=0.5"
TWO = (GPU, "placement.n_model_workers=2")
TRIALS = {
    "grpo": ("grpo-math", GPU),
    "async": ("grpo-math-async", HALF, "scheduling.generation_server.gpu=0.5"),
    "ppo": ("ppo-math", GPU, "critic.path={policy}"),
    "kept sets": (
        *("grpo-math", GPU, "gen.top_p=0.9", "gen.top_k=20"),
        *("actor.recompute=true", "algorithm.recompute_logprob=true"),
    ),
    "lora": ("grpo-math", GPU, "actor.lora.rank=4"),
    "cpu_offload": ("grpo-math", GPU, "actor.cpu_offload=true"),
    "float32": ("grpo-math", GPU, "actor.dtype=float32"),
    "megatron": ("grpo-math", GPU, "actor.backend=megatron"),
    "fsdp of two": ("grpo-math", *TWO),
    "split": (
        *("grpo-math", GPU, "placement.pools.left=1", "placement.pools.right=1"),
        "placement.allocation="
        "actor_train:d1@left,actor_gen:d1@right,ref_inf:d1@left,rew_inf:d1@left",
    ),
    "megatron tensor": (
        *("grpo-math", *TWO, "actor.backend=megatron"),
        "placement.allocation=actor_train:d1t2,actor_gen:d2",
    ),
    "megatron pipeline": ("grpo-math", *TWO, "actor.backend=megatron", "actor.parallel=d1t1p2"),
    "evaluator": (
        *("grpo-math", HALF, "scheduling.evaluator.gpu=0.5", "auto_eval=true"),
        "exp_ctrl.save_freq_steps=1",
    ),
}
# In a Python of its own: a mixed sum, and sums that are right.
SELF_CHECK = """
import host_as_cuda, torch
host_as_cuda.stand_in()
x = torch.randn(4, 6, device="cuda")
y = torch.randn(6, 3, device="cuda", requires_grad=True)
(x @ y).softmax(-1).sum().backward()
assert y.grad.is_cuda and torch.equal(x.t()[1:, ::2].cpu(), x.cpu().t()[1:, ::2])
assert torch.equal(torch.cat([x, x]).view(-1, 3).cpu(), torch.cat([x.cpu()] * 2).view(-1, 3))
try:
    x + torch.ones(4, 6)
except RuntimeError as error:
    assert "two devices" in str(error), error
else:
    raise SystemExit("a sum of tensors on two devices did not raise")
"""


def build(folder: Path) -> Path:
    """Compiles the device for the torch that is installed; gives the library."""
    import torch

    of_torch, library = Path(torch.__file__).parent, folder / "libhost_as_cuda.so"
    command = ["g++", "-O0", "-std=c++20", "-fPIC", "-shared", f"-I{of_torch / 'include'}"]
    command += [str(HERE / "host_as_cuda.cpp"), "-o", str(library), f"-L{of_torch / 'lib'}"]
    command += ["-ltorch_cpu", "-lc10", f"-Wl,-rpath,{of_torch / 'lib'}"]
    subprocess.run(command, check=True)
    return library


def launched(words: tuple[str, ...], policy: Path, root: Path, library: Path) -> str:
    """Runs a trial of two steps; empty if it completed, else its last words."""
    own = [
        f"actor.path={policy}",
        f"task.path={policy}/questions.jsonl",
        f"task.eval_path={policy}/held_out.jsonl",
        *("task.eval_size=8", "train_bs_n_seqs=8", "gen.max_new_tokens=16"),
        "exp_ctrl.benchmark_steps=2",
    ]
    environment = environment_with(library) | {"REALSYS_FILE_ROOT": str(root)}
    command = [sys.executable, "-W", "ignore", "-m", "launcher.cli.entry", "launch"]
    command += [word.format(policy=policy) for word in words] + own
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        try:
            said, _ = process.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            process.kill()  # all of its processes end with it
            said, _ = process.communicate()
            return f"not done after {LIMIT_S:g} s: {said[-600:]}"
    return said[-1200:] if process.returncode else ""


def environment_with(library: Path) -> dict[str, str]:
    """Of a process in which the device is pretended where it is given a GPU."""
    path = os.pathsep.join([str(HERE), str(ROOT)])
    return {**os.environ, "PYTHONPATH": path, "HOST_AS_CUDA": str(library)}


def main() -> int:
    """Runs the trials that are asked for, or all."""
    with tempfile.TemporaryDirectory(prefix="pretended-") as folder:
        library = build(Path(folder))
        checked = {**environment_with(library), "CUDA_VISIBLE_DEVICES": "none"}
        subprocess.run([sys.executable, "-c", SELF_CHECK], env=checked, check=True)

        from device import Device
        from runs import policy

        made, failed = policy(Path(folder, "policy"), Device("cpu")), []
        for number, name in enumerate(sys.argv[1:] or TRIALS):
            begin = time.monotonic()
            problem = launched(TRIALS[name], made, Path(folder, f"root-{number}"), library)
            failed += [name] * bool(problem)
            seconds = time.monotonic() - begin
            sys.stdout.write(f"{name}: {problem or 'completed'}  ({seconds:.0f} s)\n")
            sys.stdout.flush()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
