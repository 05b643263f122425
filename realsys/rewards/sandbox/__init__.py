"""Runs untrusted code on a Slurm node without root or Docker; docs/sandbox.md.

Begin with sandbox.py (what a caller uses) and box_limits.py (what is given and what comes back).

    sandbox.py ── socket ──▶ fork_server.py (pid 1 of its own namespaces, root folder: box_root.py)
         ▲                        │ clones, one box each
         │                        ▼
         └───── result ───── box_init.py (pid 1 of the box; watches, kills, reports)
                                  │ forks
                                  ▼
                             box_program.py (limits, then the untrusted program)
                                  │ or, for a test's code on a program,
                                  ▼
                             separate_tests/ (the test, which forks the program)
"""
