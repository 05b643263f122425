"""At the start of each Python of a trial of trials.py: a worker with a GPU has the host as its GPU."""

import os

if "HOST_AS_CUDA" in os.environ:
    if os.environ.get("CUDA_VISIBLE_DEVICES", "") in ("0", "1"):
        import host_as_cuda

        host_as_cuda.stand_in()
    else:  # the command line, the supervisor, workers without a GPU
        import realsys.worker.machine_gpus as gpus

        gpus.gpu_entries = lambda *_, **__: ("0", "1")
        gpus.machine_gpus = lambda *_, **__: 2
