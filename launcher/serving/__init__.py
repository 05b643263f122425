"""Saved models after a run: which directory is meant, a server of it, a chat with it, its evaluation.

Enter at saved_models.py; the verbs are in launcher/cli/verbs/model_verbs.py. The server itself is a program
of its own, realsys/policy_server/.
"""
