"""Loads a Hugging Face directory into an embedded engine, with all that its conversations need."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from realsys.api.errors import ConfigError, InternalError
from realsys.generation.embedded_settings import EmbeddedSettings
from realsys.generation.http.served_engine import FetchedWeights
from realsys.generation.served_engines.embedded import EmbeddedEngine
from realsys.models.hf import end_token_ids, load_causal_lm, load_tokenizer
from realsys.models.prompt_lengths import check_conversations
from realsys.rollout.conversation.chat_messages import Unserved
from realsys.rollout.conversation.form_choice import choose_form
from realsys.rollout.conversation.renderer_choice import TEMPLATE, check_renderer, make_renderer
from realsys.rollout.conversation.reply_grammar import special_tokens
from realsys.rollout.conversation.session_settings import SchemaUse, SessionSettings
from realsys.transport.generation_messages import WeightSource


@dataclass(frozen=True, kw_only=True)
class LoadedPolicy:
    """A model that is ready to be served."""

    engine: EmbeddedEngine
    settings: SessionSettings
    dtype: str
    device: str


def load_policy(
    path: Path,
    *,
    name: str,
    dtype: str,
    device: str,
    template: Path | None = None,
    renderer: str = TEMPLATE,
    unserved: str = Unserved.REFUSE,
) -> LoadedPolicy:
    """Loads the model in ``path``; its engine is not started.

    Args:
        name: that replies carry.
        dtype: torch name.
        template: a file with a chat template in place of the tokenizer's.
        renderer: ``template``, or a family of the package renderers.
        unserved: what becomes of tools and pictures that it can't take: ``refuse`` or ``drop``.
    Raises:
        CheckpointError: the directory is not whole, or its chat template does not end.
        ConfigError: a setting is wrong.
    """
    check_renderer(renderer, template=template is not None, where="--renderer")
    settings = EmbeddedSettings.from_args({"device": device, "dtype": dtype})
    given = None if template is None else _text_of(template)
    check_conversations(path, template=given)  # from here on it is filled without limits
    tokenizer = load_tokenizer(path)
    module = load_causal_lm(path, dtype=settings.dtype, device=device)
    end_ids = end_token_ids(tokenizer, getattr(module, "generation_config", None))
    rendering = make_renderer(
        renderer,
        tokenizer,
        end_ids=end_ids,
        template=given,
    )
    engine = EmbeddedEngine(
        module,
        eos_token_ids=end_ids,
        pad_token_id=tokenizer.pad_token_id,
        tokenizer=tokenizer,
        model_path=str(path),
        settings=settings,
        fetch=_no_other_weights,
    )

    def decode(tokens: Sequence[int]) -> str:
        return str(tokenizer.decode(list(tokens), skip_special_tokens=False))

    return LoadedPolicy(
        engine=engine,
        settings=SessionSettings(
            renderer=rendering,
            form=choose_form("", tokenizer, renderer=renderer, template=rendering.template),
            decode=decode,
            encode=lambda text: list(tokenizer(text).input_ids),
            end_ids=frozenset(end_ids),
            model=name,
            schemas=SchemaUse.ENFORCE,
            special=special_tokens(tokenizer),
            unserved=Unserved(unserved),
        ),
        dtype=settings.dtype,
        device=device,
    )


def _text_of(template: Path) -> str:
    try:
        return template.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{template} can't be read: {error}", where="--template", fix="name a Jinja template"
        ) from error


def _no_other_weights(source: WeightSource) -> FetchedWeights:
    raise InternalError("a served model keeps its weights", where="realsys serve")
