"""Launches, bytes and estimated seconds of an update and of decoding, without a GPU. By hand.

    python tests/by_hand/gpu/pretended/counts.py [0.5b|1.5b|7b …] [--recompute]    a minute for each

FSDP's engine and the embedded engine's decoder run on tensors of ``cuda:0`` that hold nothing; an operation
that mixes devices raises. The peak of an update stands beside the planner's. Seconds are estimates
(meter.py).
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parents[3])]


def main() -> int:
    """Builds the device, and counts in a Python that has it before torch."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sizes", nargs="*", default=["0.5b"])
    parser.add_argument("--recompute", action="store_true")
    asked = parser.parse_args()
    if "HOST_AS_CUDA" in os.environ:
        for size in asked.sizes:
            count(size, recompute=asked.recompute)
        return 0
    from trials import build, environment_with

    with tempfile.TemporaryDirectory(prefix="counts-") as folder:
        environment = environment_with(build(Path(folder))) | {"CUDA_VISIBLE_DEVICES": "none"}
        command = [sys.executable, "-W", "ignore", *sys.argv]
        return subprocess.run(command, env=environment, check=False).returncode


def count(size: str, *, recompute: bool) -> None:
    """Prints what an update and a decoding step of the model do."""
    import host_as_cuda

    host_as_cuda.stand_in_for_cuda()
    import torch
    import torch._subclasses.fake_tensor as fake
    from models import shape_of_qwen, shape_of_qwen_7b

    fake.init_gpu_context = lambda *_: None
    fake.FakeTensor.__float__ = lambda _: 1.0
    fake.FakeTensor.__bool__ = lambda _: True
    torch.Tensor.record_stream = lambda *_: None
    torch.nn.functional.scaled_dot_product_attention = attention
    shape = shape_of_qwen_7b() if size == "7b" else shape_of_qwen(size)
    mode = fake.FakeTensorMode(allow_non_fake_inputs=True)
    count_update(f"{size}{', recompute' * recompute}", shape, mode, recompute=recompute)
    count_decoding(size, shape, mode)


def attention(
    q: Any,
    k: Any,
    v: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """As torch chooses on a GPU without cuDNN's: flash without a mask, else the memory-efficient one."""
    import torch

    aten = torch.ops.aten
    if attn_mask is None and q.element_size() == 2:
        flash = aten._scaled_dot_product_flash_attention
        return flash(q, k, v, dropout_p, is_causal, scale=scale)[0]
    if enable_gqa:
        raise AssertionError("memory-efficient attention has no grouped heads")
    bias = None
    if attn_mask is not None:
        bias = torch.zeros(attn_mask.shape, dtype=q.dtype, device=q.device)
        bias = bias.masked_fill_(attn_mask.logical_not(), float("-inf"))
        bias = bias.expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    learns = torch.is_grad_enabled() and q.requires_grad
    efficient = aten._scaled_dot_product_efficient_attention
    return efficient(q, k, v, bias, learns, dropout_p, is_causal, scale=scale)[0]


def module_of(shape: Any, dtype: Any, *, grad: bool = False) -> Any:
    """A model whose weights are the mode's; nothing is drawn."""
    import torch
    from torch._subclasses.fake_tensor import unset_fake_temporarily
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from realsys.models.skeleton import skeleton

    with unset_fake_temporarily():
        module = skeleton(lambda: Qwen2ForCausalLM(Qwen2Config(**shape)))
    made: dict[int, Any] = {}
    for part in module.modules():
        for name, x in part._parameters.items():
            if x is not None and id(x) not in made:
                held = torch.empty(tuple(x.shape), dtype=dtype, device="cuda")
                made[id(x)] = torch.nn.Parameter(held, requires_grad=grad)
            part._parameters[name] = None if x is None else made[id(x)]
        for name, x in part._buffers.items():
            if x is not None:
                part._buffers[name] = torch.empty(tuple(x.shape), dtype=x.dtype, device="cuda")
    return module


def count_update(label: str, shape: Any, mode: Any, *, recompute: bool) -> None:
    """Forward, head, backward and the optimizer's step of a micro-batch of some 15,000 tokens, by FSDP."""
    import torch
    import torch.distributed as dist
    from device import Device, GiB
    from meter import Meter
    from models import SPEC, grouped_answers
    from planned import planned_step_bytes
    from torch._subclasses.fake_tensor import unset_fake_temporarily
    from torch.testing._internal.distributed.fake_pg import FakeStore

    import realsys.backends.fsdp as fsdp
    import realsys.backends.hf.engine as engines
    from realsys.api.model import Model, ModelName
    from realsys.api.options import OptimizerOptions
    from realsys.backends.hf.sharding import local_gradient
    from realsys.backends.kernels.packed_pieces import Pieces, Rectangle

    sample = grouped_answers(Device("cuda"), shape["vocab_size"])
    real, groups = sample.data["packed_input_ids"], sample.meta.seqlens["packed_input_ids"]
    pieces = Pieces.of(real, groups, to_the_end=False)
    lengths = [n for group in groups for n in group]
    prompt = int(sample.data["prompt_mask"][: lengths[0]].sum())
    planned = planned_step_bytes(
        shape, lengths, recompute=recompute, prompt=prompt, group=len(groups[0])
    )
    predicted = torch.nonzero(~sample.data["prompt_mask"])[:, 0] - 1

    def on_gpu(x: Any) -> Any:
        return None if x is None else mode.from_tensor(x).to("cuda")

    def pieces_of(*_: Any, **__: Any) -> Pieces:
        return Pieces(
            on_gpu(pieces.positions),
            on_gpu(pieces.kept),
            on_gpu(pieces.place),
            tuple(
                Rectangle(r.num, r.width, on_gpu(r.tokens), on_gpu(r.own))
                for r in pieces.rectangles
            ),
            on_gpu(pieces.back),
        )

    mesh_of = fsdp.mesh_of

    def real_mesh(*args: Any, **options: Any) -> Any:
        with unset_fake_temporarily():
            return mesh_of(*args, **options)

    Pieces.of = pieces_of
    fsdp.mesh_of = real_mesh
    engines.plain_copy = lambda _class, _module, _device, dtype: module_of(shape, dtype)
    if not dist.is_initialized():
        dist.init_process_group("fake", rank=0, world_size=1, store=FakeStore())
    meter = Meter()
    with mode, meter:
        model = Model(
            name=ModelName("actor"),
            module=module_of(shape, torch.float32, grad=True),
            tokenizer=None,
            device="cuda",
            dtype="bfloat16",
        )
        model.trains = True
        backend = fsdp.FSDPBackend(optimizer=OptimizerOptions(lr=1e-6), recompute=recompute)
        engine = backend.initialize(model, SPEC).module
        del model
        tokens, rows = on_gpu(real), on_gpu(predicted)
        for step in range(2):  # moments are there from the second on
            before = meter.live
            meter.begin()
            whole = type(
                "MicroBatch", (), {"data": {"packed_input_ids": tokens}, "meta": sample.meta}
            )
            predictions = engine.run_module(whole)
            told = [("forward", meter.gpu_ms)]
            logprobs, entropy = predictions.logprobs_and_entropy(tokens[rows + 1], rows)
            loss = torch.exp(logprobs - logprobs.detach()).mean() + 0 * entropy.mean()
            told.append(("head", meter.gpu_ms))
            loss.backward()
            told.append(("backward", meter.gpu_ms))
            del predictions, logprobs, entropy, loss
            for name, x in engine._shards.items():
                parameter = engine.parameters[name]
                x.grad, parameter.grad = local_gradient(parameter), None
            engine.optimizer.step()
            engine.optimizer.zero_grad()
            engine.trained()
            told.append(("optimizer", meter.gpu_ms))
            if step == 0:
                continue
            parts = [
                f"{name} {ms - earlier:.0f}"
                for (name, ms), (_, earlier) in zip(told, [("", 0.0), *told], strict=False)
            ]
            say(label, meter, f"update of {len(real)} tokens ({', '.join(parts)} ms)")
            peak = (meter.peak - before) / GiB
            sys.stdout.write(f"  peak of the step {peak:.1f} GiB, planned {planned / GiB:.1f}\n")


def count_decoding(size: str, shape: Any, mode: Any) -> None:
    """A step of the embedded engine's decoder with the sampling of its tokens."""
    import torch
    from meter import Meter

    from realsys.generation.decoding.decoder import FastForward
    from realsys.generation.decoding.length_buckets import LengthBucket
    from realsys.generation.engine.sampling import sample

    meter = Meter()
    with mode, torch.inference_mode(), meter:
        forward = FastForward(module_of(shape, torch.bfloat16))
        forward._rotation_of(4096)
        for rows in (8, 64, 256, 1024):
            cache = forward.cache(rows, 1024)
            tokens = torch.zeros(rows, 1, dtype=torch.int64, device="cuda")
            places = torch.zeros(rows, 1, dtype=torch.int64, device="cuda")
            draws = torch.zeros(rows, dtype=torch.float64, device="cuda")
            meter.begin()
            states = forward.run(tokens, places, cache, [LengthBucket(0, rows, 1024)])
            probabilities = torch.softmax(forward.logits(states).float(), dim=-1)
            probabilities.gather(1, sample(probabilities, draws)[:, None])
            rate = rows / max(meter.gpu_ms, meter.host_ms) * 1e3
            say(size, meter, f"step of {rows} rows of 1,024 positions, {rate:,.0f} tokens/s")
            del cache, states, probabilities


def say(label: str, meter: Any, what: str) -> None:
    """A line for what was counted since the meter began."""
    kinds = ", ".join(f"{kind} {s * 1e3:.1f}" for kind, s in meter.seconds.most_common())
    sys.stdout.write(
        f"{label}: {what}: {sum(meter.launches.values())} launches, host {meter.host_ms:.1f} ms, "
        f"GPU {meter.gpu_ms:.1f} ms ({kinds})\n"
    )
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
