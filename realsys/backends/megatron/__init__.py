"""Tensor, pipeline and data parallel engines over Megatron-Core.

Megatron's modules are imported here first, because several of them warn at import of missing extensions
(Transformer Engine, Apex) that this package does not need; other warnings are not affected.
"""

import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import megatron.core.distributed
    import megatron.core.models.gpt
    import megatron.core.models.gpt.gpt_layer_specs
    import megatron.core.optimizer
    import megatron.core.pipeline_parallel
    import megatron.core.tensor_parallel  # noqa: F401
