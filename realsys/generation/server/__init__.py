"""Worker that serves generation requests over HTTPS; ``build.py`` assembles it."""
