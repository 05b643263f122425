"""A saved model behind the agents' endpoint, for programs and people: ``realsys serve``.

Enter at serve_model.py, the program. It trains nothing and knows no trial: each request is a conversation
of its own (open_sessions.py), sampled as its client asks (client_policy.py) by the embedded engine.
"""
