"""Arguments of the built-in model factories, typed: what ``ModelAbstraction.args`` are read into. No torch.

The factories (factories.py) have the same names and defaults; a plan is checked against these classes
(realsys.api.registry).
"""

from __future__ import annotations

from dataclasses import dataclass

from realsys.api.basics.option_fields import option
from realsys.api.model import DatasetAbstraction
from realsys.models.shape import DTYPE_BYTES, ModelShape


@dataclass(frozen=True, kw_only=True)
class TokenizerArguments:
    """Arguments of ``tokenizer_only``: a Hugging Face directory."""

    path: str


@dataclass(frozen=True, kw_only=True)
class HFModelArguments:
    """Arguments of ``hf_causal_lm`` and ``hf_critic``: a Hugging Face directory, and the compute dtype."""

    path: str
    dtype: str = option("float32", "compute dtype", choices=tuple(DTYPE_BYTES))


@dataclass(frozen=True, kw_only=True)
class TinyLlamaOptions:
    """Sizes of the built-in model, which is made from scratch."""

    hidden_size: int = option(128, "width", ge=8, le=1 << 20)
    num_layers: int = option(3, "layers", ge=1, le=2_000)
    num_heads: int = option(4, "attention heads", ge=1, le=1 << 16)
    num_kv_heads: int = option(2, "key-value heads", ge=1, le=1 << 16)
    vocab_size: int = option(512, "tokens of the byte-level BPE tokenizer", ge=300, le=1 << 26)

    def shape(self) -> ModelShape:
        """Returns the sizes of the model, as tiny_llama.py makes it."""
        return ModelShape(
            family="llama",
            hidden_size=self.hidden_size,
            intermediate_size=3 * self.hidden_size,
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.hidden_size // self.num_heads,
            vocab_size=self.vocab_size,
            max_positions=256,
        )


@dataclass(frozen=True, kw_only=True)
class TinyLlamaArguments(TinyLlamaOptions):
    """Arguments of ``tiny_llama``: sizes, compute dtype, seed of the weights.

    Attributes:
        corpus: data set of fine-tuning on whose texts the tokenizer is trained; None: on arithmetic.
    """

    dtype: str = option("float32", "compute dtype", choices=tuple(DTYPE_BYTES))
    seed: int = 1
    corpus: DatasetAbstraction | None = None
