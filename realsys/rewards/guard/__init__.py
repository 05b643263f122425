"""The guard of reward rules: each answer is scored in a fork of its own, behind walls; docs/rewards.md.

Begin with guarded.py, what a caller uses.

    guarded.py ── answers ──▶ guard_host.py: clean environment, the rule made once
         ▲                          │ forks, one for each call
         │                          ▼
         └────── results ───── the fork: limits and walls (rule_walls.py, rule_filter.py), then the rule

``async`` rules keep one process for all answers behind the same walls: service_host.py.
"""
