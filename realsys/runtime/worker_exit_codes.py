"""Exit codes of worker processes, as the supervisor interprets them."""

DONE = 0
FAILED = 1
STOPPED = 75  # after a stop request: the last step is complete and checkpointed
FENCED = 77  # the worker's lease could not be renewed, or a newer attempt took over
ORPHANED = 78  # the workers that this one depends on are gone
NOT_STARTED = 79  # not returned by a process: the worker's step could not be started
