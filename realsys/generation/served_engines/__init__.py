"""Engines behind a generation server: embedded in this process, SGLang or vLLM as child processes."""
