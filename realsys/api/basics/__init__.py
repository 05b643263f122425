"""What the vocabulary is built from: fields and choices of settings, the table of plug-ins, bounded reading
of files, long lists said as changes.
"""
