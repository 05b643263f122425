"""Engines behind a generation server: ours in this process, SGLang or vLLM as child processes."""
