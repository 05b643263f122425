"""How models are computed: engines around modules.

``fsdp.py`` and ``inference.py`` are backends over Hugging Face modules, megatron/ the one over
Megatron-Core.
"""
