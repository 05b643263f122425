"""Conversations of an agent with the policy, token by token (pure): messages, rendering, parsing, the tree.

Enter at session.py. Every dialect of the endpoint speaks in the values of chat_messages.py.
"""
