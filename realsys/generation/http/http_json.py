"""Conversion of requests between JSON and values, with SGLang's field names and shapes (pure).

Strict on input: a field that SGLang doesn't have is rejected with the nearest known name; one that is not
supported here is accepted at its neutral value and rejected at any other. Our extensions are ``position``,
``return_kept`` and ``grammar`` in ``sampling_params``, and the body of /update_weights_from_stream. Answers
are in http_answers.py.
"""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Mapping
from typing import Any, NoReturn, TypeVar

import msgspec

from realsys.api.errors import DataError, did_you_mean
from realsys.transport.generation_messages import GenerateRequest, Sampling

MAX_ANSWERS = 4096  # limit of one HTTP request
ANY = object()  # the field has no effect here, whatever its value

# Fields of SGLang that are not supported → their neutral values.
_UNSERVED: Mapping[str, tuple[Any, ...]] = {
    "text": (None,),
    "input_embeds": (None,),
    "image_data": (None,),
    "logprob_start_len": (None, -1),
    "top_logprobs_num": (None, 0),
    "token_ids_logprob": (None,),
    "return_text_in_logprobs": (ANY,),
    "return_hidden_states": (None, False),
    "return_prompt_token_ids": (None, False),
    "return_routed_experts": (None, False),
    "lora_path": (None,),
    "priority": (None, 0),
    "routing_key": (ANY,),
    "session_id": (None,),
    "session_params": (None,),
    "log_metrics": (ANY,),
}
_UNSERVED_SAMPLING: Mapping[str, tuple[Any, ...]] = {
    "min_p": (None, 0),
    "frequency_penalty": (None, 0),
    "presence_penalty": (None, 0),
    "repetition_penalty": (None, 1),
    "skip_special_tokens": (ANY,),
    "spaces_between_special_tokens": (ANY,),
    "no_stop_trim": (ANY,),
    "stop_regex": (None,),
    "json_schema": (None,),
    "regex": (None,),
    "ebnf": (None,),
    "structural_tag": (None,),
    "logit_bias": (None,),
    "stream_interval": (None, 1),
    "custom_params": (None,),
}


class _SamplingBody(msgspec.Struct, kw_only=True):
    max_new_tokens: int | None = None
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    stop: str | tuple[str, ...] | None = None
    stop_token_ids: tuple[int, ...] | None = None
    ignore_eos: bool = False
    n: int = 1
    sampling_seed: int | None = None
    position: int = 0
    return_kept: bool = False
    grammar: str = ""


class _GenerateBody(msgspec.Struct, kw_only=True):
    input_ids: tuple[int | tuple[int, ...], ...]  # one prompt, or several
    rid: str | tuple[str, ...] | None = None
    sampling_params: dict[str, Any] | tuple[dict[str, Any], ...] | None = None
    stream: bool = False
    return_logprob: bool | tuple[bool, ...] | None = None


class GenerateCall(msgspec.Struct, frozen=True, kw_only=True):
    """One HTTP request: several answers (``batch``: the response is a list) or one."""

    requests: tuple[GenerateRequest, ...]
    batch: bool
    stream: bool


T = TypeVar("T", bound=msgspec.Struct)


def read_body(data: bytes, kind: type[T], *, where: str) -> T:
    """Parses ``data`` as a Struct with exactly its fields.

    Raises:
        DataError: no JSON, an unknown field (with the nearest known one), or a wrong type.
    """
    return _convert(_object(data, where), kind, {}, where)


def read_generate(data: bytes) -> GenerateCall:
    """Parses the body of /generate.

    Raises:
        DataError: names the field, its value and the allowed ones.
    """
    where = "/generate"
    body = _convert(_object(data, where), _GenerateBody, _UNSERVED, where)
    many = bool(body.input_ids) and isinstance(body.input_ids[0], tuple)
    prompts = _prompts(body.input_ids, many, where)
    params = _each(body.sampling_params, len(prompts), "sampling_params", where)
    samplings = [_sampling(p or {}, f"{where}, sampling_params") for p in params]
    count = sum(n for _, n in samplings)
    if count > MAX_ANSWERS:
        _refuse("n", count, f"at most {MAX_ANSWERS} answers a request", where)
    rids = _rids(body.rid, len(prompts), where)
    requests = [
        GenerateRequest(
            rid=rid if n == 1 else f"{rid}-{i}", input_ids=prompt, sampling=_nth(sampling, i)
        )
        for prompt, rid, (sampling, n) in zip(prompts, rids, samplings, strict=True)
        for i in range(n)
    ]
    if len({r.rid for r in requests}) < len(requests):
        raise DataError("two requests have one rid", where=where, fix="give each a rid of its own")
    return GenerateCall(
        requests=tuple(requests), batch=many or len(requests) > 1, stream=body.stream
    )


def _prompts(
    ids: tuple[int | tuple[int, ...], ...], many: bool, where: str
) -> list[tuple[int, ...]]:
    prompts: list[Any] = list(ids) if many else [ids]
    for prompt in prompts:
        if not isinstance(prompt, tuple) or any(isinstance(i, tuple) for i in prompt):
            what = "input_ids mixes tokens and prompts"
        elif not prompt:
            what = "input_ids holds no token"
        elif min(prompt) < 0:
            what = f"input_ids holds the negative token {min(prompt)}"
        else:
            continue
        fix = "give token ids, at least one a prompt: [1, 2] or [[1, 2], [3]]"
        raise DataError(what, where=where, fix=fix)
    return prompts


def _nth(sampling: Sampling, i: int) -> Sampling:
    """Returns the i-th of ``n`` answers' settings: seed + i, since equal seeds would give equal answers."""
    if sampling.sampling_seed is None or i == 0:
        return sampling
    seed = (sampling.sampling_seed + i + (1 << 63)) % (1 << 64) - (1 << 63)
    return msgspec.structs.replace(sampling, sampling_seed=seed)


def _sampling(params: dict[str, Any], where: str) -> tuple[Sampling, int]:
    read = _convert(params, _SamplingBody, _UNSERVED_SAMPLING, where)
    max_new = 128 if read.max_new_tokens is None else read.max_new_tokens
    checks = {
        "max_new_tokens": (max_new >= 1, "1 or more"),
        "min_new_tokens": (0 <= read.min_new_tokens <= max_new, f"0 … {max_new}"),
        "temperature": (0 <= read.temperature < float("inf"), "0 (greedy) or more"),
        "top_p": (0 < read.top_p <= 1, "a number in (0, 1]"),
        "top_k": (read.top_k == -1 or read.top_k >= 1, "-1 (off), or 1 or more"),
        "n": (1 <= read.n <= MAX_ANSWERS, f"1 … {MAX_ANSWERS}"),
        "position": (0 <= read.position < 1 << 31, "0 or more"),
        "sampling_seed": (
            read.sampling_seed is None or -(1 << 63) <= read.sampling_seed < 1 << 63,
            "a number of 64 bits, with sign",
        ),
    }
    for name, (good, rule) in checks.items():
        if not good:
            _refuse(name, getattr(read, name), rule, where)
    stop = (read.stop,) if isinstance(read.stop, str) else read.stop or ()
    sampling = Sampling(
        max_new_tokens=max_new,
        min_new_tokens=read.min_new_tokens,
        temperature=read.temperature,
        top_p=read.top_p,
        top_k=read.top_k,
        stop=tuple(text for text in stop if text),
        stop_token_ids=read.stop_token_ids or (),
        ignore_eos=read.ignore_eos,
        sampling_seed=read.sampling_seed,
        position=read.position,
        return_kept=read.return_kept,
        grammar=read.grammar,
    )
    return sampling, read.n


def _rids(rid: str | tuple[str, ...] | None, count: int, where: str) -> list[str]:
    if rid is None:
        return [uuid.uuid4().hex for _ in range(count)]
    if isinstance(rid, str) and count > 1:
        return [f"{rid}_{i}" for i in range(count)]
    return _each(rid, count, "rid", where)


def _each(value: Any, count: int, name: str, where: str) -> list[Any]:
    """Expands a field to one value per prompt: given one by one, or one for all."""
    if not isinstance(value, tuple):
        return [value] * count
    if len(value) != count:
        _refuse(name, f"a list of {len(value)}", f"one for each of {count} prompts", where)
    return list(value)


def seed_of_piece(sampling: Sampling, redrawn: int = 0) -> int | None:
    """Computes the seed of one request for an engine that does not know ``position`` (63 bits).

    With one seed, the pieces of an answer would each be sampled with the same random numbers. The first
    piece has the answer's own seed; that of a later one is a function of it and ``position``, so that a
    request that is sent again draws what it drew before. ``redrawn``: how often the answer was cut so far,
    after which others are drawn at the same position (redrawn_answer.py).
    """
    seed = sampling.sampling_seed
    if seed is None or not (sampling.position or redrawn):
        return seed
    text = f"{seed}:{sampling.position}" + (f":{redrawn}" if redrawn else "")
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def generate_body(
    request: GenerateRequest, *, stream: bool = False, extended: bool = True
) -> dict[str, Any]:
    """Builds the request body, with extensions only if used and ``extended``: SGLang rejects them."""
    sampling = msgspec.structs.asdict(request.sampling)
    if not extended:
        sampling["sampling_seed"] = seed_of_piece(request.sampling)
    for name in ("position", "return_kept", "grammar"):
        if not sampling[name] or not extended:
            del sampling[name]
    return {
        "rid": request.rid,
        "input_ids": request.input_ids,
        "sampling_params": sampling,
        "return_logprob": True,
        "stream": stream,
    }


# ---- strict reading -----------------------------------------------------------------------------


def _object(data: bytes, where: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(data or b"{}", type=dict[str, Any])
    except msgspec.MsgspecError as error:
        fix = "send a JSON object"
        raise DataError(f"the body can't be read: {error}", where=where, fix=fix) from None


def _convert(
    fields: dict[str, Any], kind: type[T], unserved: Mapping[str, tuple[Any, ...]], where: str
) -> T:
    known = kind.__struct_fields__
    for name in fields:
        if name in known:
            continue
        if name not in unserved:
            fix = did_you_mean(name, (*known, *unserved))
            raise DataError(f"unknown field {name!r}", where=where, fix=fix)
        if ANY not in unserved[name] and fields[name] not in unserved[name]:
            rule = f"{' or '.join(map(repr, unserved[name]))}: this server can't do more"
            _refuse(name, fields[name], rule, where)
    try:
        return msgspec.convert({k: v for k, v in fields.items() if k in known}, kind)
    except msgspec.ValidationError as error:
        raise DataError(str(error), where=where, fix="see docs/generation_servers.md") from None


def _refuse(name: str, value: Any, rule: str, where: str) -> NoReturn:
    raise DataError(f"{name} is {value!r}", where=where, fix=f"use {rule}")
