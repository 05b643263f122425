"""The files of a tokenizer, as they were read: a checkpoint has them byte for byte.

A tokenizer that transformers saves is another one than it loaded: with the padding token that realsys gives
it, with where it was loaded from, its vocabulary written by another release. No torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
    "tekken.json",
    "tiktoken.model",
    "tokenizer.model.*",
    "tokenizer.*.json",
    "additional_chat_templates/*.jinja",
)


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """What a tokenizer was loaded from.

    Attributes:
        contents: by name, relative to the model's directory.
        size, template: of the tokenizer as it was loaded.
    """

    contents: Mapping[str, bytes]
    size: int
    template: Any

    @classmethod
    def read(cls, folder: Path, tokenizer: Any) -> TokenizerFiles:
        """Reads the files of a tokenizer of transformers that was loaded from ``folder``."""
        names = [name for name in tokenizer.vocab_files_names.values() if name]
        found = {file for pattern in {*_NAMES, *names} for file in folder.glob(pattern)}
        contents = {
            str(f.relative_to(folder)): f.read_bytes() for f in sorted(found) if f.is_file()
        }
        return cls(contents, len(tokenizer), tokenizer.chat_template)

    def are_of(self, tokenizer: Any) -> bool:
        """Returns whether the tokenizer has no other tokens and template since."""
        return (self.size, self.template) == (len(tokenizer), tokenizer.chat_template)

    def write(self, folder: Path) -> None:
        """Writes them to ``folder``, which is there."""
        for name, content in self.contents.items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(content)
