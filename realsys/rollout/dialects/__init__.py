"""The HTTP APIs that agents speak, read and written as JSON (pure): OpenAI's two, and Anthropic's.

Enter at dialect.py: what each of them offers, and which path belongs to which. All of them speak in the
values of ``realsys.rollout.conversation.chat_messages``. No file here opens a socket: the endpoint does.
"""
