"""The worker that serves generation requests over HTTPS; ``build.py`` wires it together."""
