"""Agents that are programs: each episode gets a URL and a key, and the conversation is recorded there.

``endpoint_agent.py`` is what they share; ``command_agent.py`` starts a program an episode,
``hosted_agent.py`` runs functions in a process that stays, ``external_agent.py`` waits for clients
from outside, ``nemo_gym_agent.py`` has NeMo Gym run episodes. ``chat_agent.py`` is no program: it holds
the conversation itself, without HTTP. The programs in ``hosts/`` run in any interpreter and import
nothing of ours.
"""
