"""The address that agents are given: OpenAI's and Anthropic's APIs over HTTP, one session an episode.

Enter at endpoint_app.py (HTTP) and session_registry.py (who has which key). What a request means is
decided in conversation/; how it is written, in dialects/.
"""
