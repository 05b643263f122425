"""Exit codes of worker processes, as the supervisor reads them."""

DONE = 0
FAILED = 1
STOPPED = 75  # a stop request was honoured: the last step is whole and checkpointed
FENCED = 77  # our own lease could not be renewed, or a newer attempt took over
ORPHANED = 78  # the workers we watch are gone
NOT_STARTED = 79  # no process ends with it: the worker's step could not be started
