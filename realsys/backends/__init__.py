"""Backends: engines that train models, run them forward and generate with them.

``fsdp.py`` and ``inference.py`` are backends over Hugging Face modules, megatron/ the one over
Megatron-Core.
"""
