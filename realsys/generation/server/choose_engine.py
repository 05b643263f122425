"""Makes the engine that a ``GenerationServer`` configures: embedded, SGLang or vLLM."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from realsys.api.errors import ConfigError, did_you_mean
from realsys.api.worker_configs import GenerationServer
from realsys.devices.cuda_settings import apply, settings_for
from realsys.generation.embedded_settings import EmbeddedSettings
from realsys.generation.http.served_engine import Fetch, ServedEngine
from realsys.generation.served_engines.child_guard import guarded
from realsys.generation.served_engines.embedded import EmbeddedEngine
from realsys.generation.served_engines.sglang import SGLangEngine
from realsys.generation.served_engines.vllm import VLLMEngine
from realsys.worker.device import compute_device

BACKENDS = ("embedded", "sglang", "vllm")


def make_engine(
    config: GenerationServer,
    *,
    name: str,
    log: Path,
    scratch: Path,
    fetch: Fetch,
    gpus: float = 0.0,
    deterministic: bool | None = None,
) -> ServedEngine:
    """Makes the engine, not started; an embedded one has its first weights.

    Args:
        name: name of the worker, for errors.
        log: log file of a child process.
        scratch: an existing private folder.
        fetch: fetches new weights from trainers.
        gpus: GPUs of the worker's task; with one, an embedded engine uses it unless its settings differ.
        deterministic: an embedded engine gives equal answers to equal requests; None: on the CPU only.
    Raises:
        ConfigError: an unknown backend or setting. CheckpointError: ``model_path`` is not whole.
    """
    makers: dict[str, Callable[[], ServedEngine]] = {
        "embedded": lambda: _embedded(
            config, fetch, name=name, gpus=gpus, deterministic=deterministic
        ),
        "sglang": lambda: SGLangEngine(scratch=scratch, **child),
        "vllm": lambda: VLLMEngine(**child),
    }
    if config.backend_type not in makers:
        raise ConfigError(
            f"no generation backend {config.backend_type!r}",
            where=f"{name}, backend_type",
            fix=did_you_mean(config.backend_type, BACKENDS),
        )
    child: dict[str, Any] = {
        "model_path": config.model_path,
        "backend_args": config.backend_args,
        "base_seed": config.base_seed,
        "tp_size": config.tp_size,
        "name": name,
        "log": log,
        "guard": guarded,
        "fetch": fetch,
    }
    return makers[config.backend_type]()


def _embedded(
    config: GenerationServer, fetch: Fetch, *, name: str, gpus: float, deterministic: bool | None
) -> EmbeddedEngine:
    import torch

    from realsys.models.hf import end_token_ids, load_causal_lm, load_tokenizer

    if config.tp_size != 1:
        raise ConfigError(
            f"tp_size is {config.tp_size}", where="embedded generation server", fix="use 1"
        )
    args = dict(config.backend_args)
    if "device" not in args:
        sees_gpu = torch.cuda.is_available()
        args["device"] = compute_device(gpus, sees_gpu=sees_gpu, worker=name, environ=os.environ)
    if str(args["device"]).startswith("cuda"):
        args.setdefault("dtype", "bfloat16")  # float32 is a tenth as fast there
    settings = EmbeddedSettings.from_args(args)
    if settings.num_threads is not None:
        torch.set_num_threads(settings.num_threads)
    # As a model worker does: the same kernels, the same bits.
    apply(settings_for(settings.device, deterministic=deterministic, gpus=gpus))
    module = load_causal_lm(config.model_path, dtype=settings.dtype, device=settings.device)
    tokenizer = load_tokenizer(config.model_path)
    return EmbeddedEngine(
        module,
        eos_token_ids=end_token_ids(tokenizer, getattr(module, "generation_config", None)),
        pad_token_id=tokenizer.pad_token_id,
        tokenizer=tokenizer,
        model_path=config.model_path,
        base_seed=config.base_seed,
        settings=settings,
        fetch=fetch,
    )
