"""Backends: engines that train models, run them forward and generate with them.

``fsdp.py`` and ``inference.py`` are backends over Hugging Face modules, ``megatron_backend.py`` is the one
over Megatron-Core. ``backend_arguments.py`` has what each is given.
"""
