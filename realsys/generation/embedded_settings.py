"""Settings of an embedded generation server (``backend_args``). No torch: checked before anything
starts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, Self

from realsys.api.errors import ConfigError, did_you_mean

_CHOICES = {
    "dtype": ("float32", "bfloat16", "float16", "float64"),
    "kv_on_update": ("recompute", "keep"),
    "quantize": ("none", "int8", "fp8"),
    "staging": ("auto", "gpu", "host"),
}
# Number of longest answers that a GPU should hold beside two copies of the weights.
_WORTH = 8


def stages_on_gpu(beside: int, longest: int) -> bool:
    """True if new weights fit beside those in use on a GPU whose cache then holds ``beside`` tokens.

    Otherwise they wait in host memory and are copied while decoding pauses: a second or two per 30 GB.
    """
    return beside >= _WORTH * longest


@dataclass(frozen=True, kw_only=True)
class EmbeddedSettings:
    """Decoding settings of the embedded engine.

    Attributes:
        max_running: maximum number of requests decoded together.
        max_tokens: limit of their cache (rows times tokens of the longest) and of one request (prompt and
            answer); None: on a GPU what its free memory holds, on a CPU no limit.
        dtype: torch name of the weights' dtype.
        kv_on_update: whether caches of running requests are recomputed or kept when weights change.
        quantize: 8-bit weights in linear layers.
        num_threads: threads of a decoding step; None: torch's default.
        staging: where verified new weights wait for the switch: on the GPU beside those in use, or in host
            memory; auto: on the GPU if eight of the longest answers still fit.
        least_tokens: tokens of the longest prompt and answer; a GPU without space for them is rejected.
        prefix_bytes: size limit of the prefix cache; 0: none.
        read_tokens: tokens prefilled per step, for new requests or after a weight update; a longer text is
            read in pieces between the steps. None: 1024 on a CPU, 8192 on a GPU.
    """

    max_running: int = 64
    max_tokens: int | None = None
    dtype: str = "float32"
    kv_on_update: Literal["recompute", "keep"] = "recompute"
    quantize: Literal["none", "int8", "fp8"] = "none"
    device: str = "cpu"
    num_threads: int | None = None
    staging: Literal["auto", "gpu", "host"] = "auto"
    least_tokens: int = 1024
    prefix_bytes: int = 1 << 28
    read_tokens: int | None = None

    @classmethod
    def from_args(cls, args: Mapping[str, Any]) -> Self:
        """Parses the arguments. Raises ConfigError for an unknown name or an invalid value."""
        known = [f.name for f in fields(cls)]
        for name in args:
            if name not in known:
                raise ConfigError(
                    f"an embedded generation server has no setting {name!r}",
                    where="backend_args",
                    fix=did_you_mean(name, known),
                )
        return cls(**args)

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                _refuse(name, getattr(self, name), did_you_mean(str(getattr(self, name)), choices))
        if type(self.prefix_bytes) is not int or self.prefix_bytes < 0:
            _refuse("prefix_bytes", self.prefix_bytes, "use a whole number, 0 or more")
        for name in ("max_running", "read_tokens", "least_tokens", "max_tokens", "num_threads"):
            value = getattr(self, name)
            optional = name in ("max_tokens", "num_threads", "read_tokens")
            if not (value is None and optional) and not (type(value) is int and value >= 1):
                _refuse(name, value, "use a whole number, 1 or more")


def _refuse(name: str, value: Any, fix: str) -> None:
    raise ConfigError(f"{name} is {value!r}", where=f"backend_args.{name}", fix=fix)
