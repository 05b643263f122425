"""Performance figures of GPUs, as far as predictions need them (pure).

Peaks are those of the makers' data sheets: dense bfloat16, float32 outside of the tensor cores (torch
rounds no float32 product to TF32 unless told to), memory, NVLink one way, and one 400 Gb/s (A100:
200 Gb/s) adapter a GPU. What a run gets of them is ``Efficiency``: rough, and the same for all.

Sources: NVIDIA's data sheets of A100 80GB SXM, H100 SXM, H200 SXM (the H100's chip) and HGX B200 (one GPU).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from realsys.api.errors import ConfigError, did_you_mean

GiB = 1 << 30


@dataclass(frozen=True, kw_only=True)
class Device:
    """One GPU, or a model worker's share of a CPU.

    Attributes:
        peak_flops: multiplications and additions a second, of half precision.
        peak_flops_float32: of float32; float64, which the planner is not asked about, counts so too.
        memory_bandwidth, link_bandwidth, network_bandwidth: bytes a second; of its memory, to a
            neighbour in the node, to another node.
        host_bandwidth: bytes a second to the memory of the node.
        latency_s: of one message. launch_s: of one layer's kernels, however little they do.
        memory_bytes: 0: not known.
    """

    name: str
    peak_flops: float
    peak_flops_float32: float
    memory_bandwidth: float
    link_bandwidth: float
    network_bandwidth: float
    host_bandwidth: float = 25e9
    latency_s: float = 2e-5
    launch_s: float = 2e-4
    memory_bytes: float = 0.0

    def flops(self, dtype: str) -> float:
        """Peak rate of products in ``dtype``."""
        return self.peak_flops if dtype.endswith("float16") else self.peak_flops_float32


@dataclass(frozen=True, kw_only=True)
class Efficiency:
    """Fractions of the peak rates that a run achieves."""

    matmul: float = 0.45
    memory: float = 0.6
    network: float = 0.7


_H100 = Device(
    name="h100",
    peak_flops=989e12,
    peak_flops_float32=67e12,
    memory_bandwidth=3.35e12,
    link_bandwidth=450e9,
    network_bandwidth=50e9,
    memory_bytes=80 * GiB,
)
DEVICES = {
    device.name: device
    for device in (
        Device(
            name="a100",
            peak_flops=312e12,
            peak_flops_float32=19.5e12,
            memory_bandwidth=2.0e12,
            link_bandwidth=300e9,
            network_bandwidth=25e9,
            memory_bytes=80 * GiB,
        ),
        _H100,
        replace(_H100, name="h200", memory_bandwidth=4.8e12, memory_bytes=141e9),
        Device(
            name="b200",
            peak_flops=2250e12,
            peak_flops_float32=75e12,
            memory_bandwidth=8e12,
            link_bandwidth=900e9,
            network_bandwidth=50e9,
            memory_bytes=180e9,
        ),
        # A core or two of a server: only good for comparing plans, not for their seconds.
        Device(
            name="cpu",
            peak_flops=50e9,
            peak_flops_float32=50e9,
            memory_bandwidth=10e9,
            link_bandwidth=2e9,
            network_bandwidth=1e9,
            host_bandwidth=10e9,
            latency_s=2e-4,
            launch_s=1e-3,
        ),
    )
}


def device_of(name: str, *, where: str = "--device") -> Device:
    """Returns the device called ``name`` (a GPU type as in Slurm's GRES; only its beginning counts).

    Raises:
        ConfigError: its figures are not known.
    """
    lower = name.lower().removeprefix("nvidia_")
    for known, device in DEVICES.items():
        if lower.startswith(known):
            return device
    raise ConfigError(
        f"device {name!r} is unknown",
        where=where,
        fix=did_you_mean(lower, DEVICES),
    )
