"""The command line: verbs, options, help and Tab completion.

``entry.main`` is the console command; ``command_line.py`` lists the verbs. A verb parses its words, calls
one function of another room and prints the result. No decision is made here.
"""
