"""Tensor, pipeline and data parallel engines over Megatron-Core.

Its modules are imported here first because several of them warn, at import, of extensions that this
package does without (Transformer Engine, Apex); nothing else about warnings is changed.
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
