"""The files of a tokenizer, as they were read: a checkpoint has them byte for byte.

A tokenizer that transformers saves is another one than it loaded: with the padding token that realsys gives
it, with where it was loaded from, its vocabulary written by another release. No torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

_NAMES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
    "*.tiktoken",
    "additional_chat_templates/*.jinja",
)


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """Contents by name, relative to the model's directory."""

    contents: Mapping[str, bytes]

    @classmethod
    def read(cls, folder: Path, names: Iterable[str] = ()) -> TokenizerFiles:
        """Reads a tokenizer's files.

        Args:
            names: of files of its class, besides those that all have.
        """
        found = {file for pattern in {*_NAMES, *names} for file in folder.glob(pattern)}
        return cls(
            {str(f.relative_to(folder)): f.read_bytes() for f in sorted(found) if f.is_file()}
        )

    def write(self, folder: Path) -> None:
        """Writes them to ``folder``, which is there."""
        for name, content in self.contents.items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(content)
