"""What families of chat templates have a policy write (pure): thoughts and tool calls, one file a family.

Enter at ../answer_forms.py. answer_scan.py walks through a text; a family says how its calls are written
(call_syntax.py) and reads one of them.
"""
