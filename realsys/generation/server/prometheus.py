"""Formats a server's metrics in Prometheus's text format (pure)."""

from __future__ import annotations

from realsys.generation.http.served_engine import Counters
from realsys.transport.generation_messages import ServerInfo


def prometheus_text(info: ServerInfo, counters: Counters) -> str:
    """Formats all metrics, each with its help and type (exposition format 0.0.4)."""
    rows = [
        ("num_running_requests", "gauge", "Requests that are being decoded.", info.num_running),
        ("num_waiting_requests", "gauge", "Requests that wait for room.", info.num_waiting),
        ("num_used_tokens", "gauge", "Tokens of all requests.", info.num_tokens),
        ("max_running_requests", "gauge", "Most requests decoded together.", info.max_running),
        ("paused", "gauge", "1 while generation is paused.", int(info.paused)),
        ("weight_version", "gauge", "Training steps behind the weights.", info.weight_version),
        ("prompt_tokens_total", "counter", "Prompt tokens.", counters.prompt_tokens),
        ("cached_tokens_total", "counter", "Prompt tokens not computed.", counters.cached_tokens),
        ("generated_tokens_total", "counter", "Tokens made.", counters.generated_tokens),
        ("requests_total", "counter", "Requests that ended.", counters.finished),
        ("aborted_requests_total", "counter", "Requests that were aborted.", counters.aborted),
        ("weight_updates_total", "counter", "Changes of weights.", counters.weight_updates),
        ("weight_update_seconds_total", "counter", "Time they took.", counters.update_s),
        (
            "weight_update_paused_seconds_total",
            "counter",
            "Time that decoding stood still for them.",
            counters.update_paused_s,
        ),
    ]
    lines = []
    for name, kind, text, value in rows:
        full = f"realsys_{name}"
        labels = f'engine="{info.engine}"'
        lines += [
            f"# HELP {full} {text}",
            f"# TYPE {full} {kind}",
            f"{full}{{{labels}}} {value}",
        ]
    return "\n".join(lines) + "\n"
