"""Where the answers of a request stand in an episode's conversation, and what they are held to."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from realsys.api.basics.thoughts import THINK
from realsys.api.errors import ConfigError, DataError
from realsys.generation.engine.token_grammar import grammar_fault
from realsys.rollout.conversation.answer_reading import opens_thoughts
from realsys.rollout.conversation.answer_tree import AnswerNode, AnswerTree
from realsys.rollout.conversation.chat_messages import ChatMessage, ChatRequest
from realsys.rollout.conversation.chat_rendering import RenderedChat, request_args
from realsys.rollout.conversation.continued_answer import check_continued
from realsys.rollout.conversation.given_prompts import continued_answer, prompt_tokens
from realsys.rollout.conversation.large_texts import beside_loop, size_of
from realsys.rollout.conversation.message_matching import path_keys
from realsys.rollout.conversation.pending_call import CallPlace
from realsys.rollout.conversation.reply_grammar import reply_grammar
from realsys.rollout.conversation.session_settings import SchemaUse, SessionSettings


@dataclass(frozen=True, kw_only=True)
class RequestPlaces:
    """Finds what requests continue, and renders what is new of them."""

    settings: SessionSettings

    async def places(self, request: ChatRequest, tree: AnswerTree) -> tuple[CallPlace, ...]:
        """Finds where each reply stands, which is behind the conversation, or behind its prompt.

        Raises:
            DataError: the request can't be answered.
        """
        self._check_held(request)
        if not request.prompts:
            return (await self._place(request, tree),) * request.n
        settings, grammar = self.settings, ""
        if request.has_form and settings.schemas is SchemaUse.ENFORCE:
            grammar = await asyncio.to_thread(self._grammar, request, thinking=False)
        places = []
        for prompt in request.prompts:
            tokens = await prompt_tokens(prompt, settings.encode, num_ids=settings.num_ids)
            parent = continued_answer(tree, tokens)
            new = tokens[len(parent.tokens) if parent is not None else 0 :]
            rendered = RenderedChat(tokens=new, thinking=False)
            place = CallPlace(request=request, parent=parent, prompt=rendered, grammar=grammar)
            places += [place] * request.n
        return tuple(places)

    async def _place(self, request: ChatRequest, tree: AnswerTree) -> CallPlace:
        """Finds where in the conversation the answers stand, and what they are held to."""
        args = request_args(request, self.settings.renderer)
        size = size_of(request)
        keys = await beside_loop(
            lambda: path_keys(request.messages, request.tools, self.settings.match, args), size=size
        )
        found = tree.longest(keys, request.messages)
        answered = 0 if found is None else found[1]
        found = tree.shortened(keys, request.messages, answered) or found
        before = None if found is None else (found[0].prompt, found[0].answer.tokens)
        parent, prompt = await beside_loop(
            lambda: self._prompt(request, found, before, args), size=size
        )
        opened = opens_thoughts(self.settings.form, prompt.tokens, self.settings.decode)
        prompt = replace(prompt, thinking=prompt.thinking or opened)
        grammar, cut = "", _cut_answer(request, parent)
        if request.continues:
            written = "" if cut is None else self.settings.text(cut.answer.tokens)
            check_continued(
                request,
                request.messages[-1].content + written,
                self.settings.form,
                is_held=self.settings.schemas is SchemaUse.ENFORCE,
            )
        may_be_held = request.has_form or bool(request.tools)
        if may_be_held and self.settings.schemas is SchemaUse.ENFORCE:  # reading may take seconds
            grammar = await asyncio.to_thread(self._grammar, request, thinking=prompt.thinking)
        return CallPlace(
            request=request, parent=parent, prompt=prompt, cut=cut, keys=keys, grammar=grammar
        )

    def _check_held(self, request: ChatRequest) -> None:
        """Raises DataError if the request wants to be held to what answers are not held to here."""
        use = self.settings.schemas
        if use is SchemaUse.ENFORCE or (use is SchemaUse.IGNORE and not request.must_hold):
            return
        if request.has_form:
            raise DataError(
                "answers are not held to JSON schemas here",
                where=request.schema_field,
                fix="leave it out; a training run takes it with task.agent_args.schema=enforce",
            )
        if request.allowed_tools:
            raise DataError(
                "answers are not held to some of the tools here",
                where="tool_choice",
                fix="offer only these as tools; or run with task.agent_args.schema=enforce",
            )

    def _prompt(
        self,
        request: ChatRequest,
        found: tuple[AnswerNode, int] | None,
        before: tuple[Sequence[int], Sequence[int]] | None,
        args: Mapping[str, Any],
    ) -> tuple[AnswerNode | None, RenderedChat]:
        """Renders what is new behind the answer that was found, if the request continues it.

        Args:
            before: the answer's prompt and tokens, read when it was found: it may be split meanwhile.
        """
        renderer, continues = self.settings.renderer, request.continues
        if found is not None and before is not None:
            node, answered = found
            is_cut = answered == len(request.messages) and (
                node.was_left or not node.answer.stopped
            )
            if continues and is_cut and node.message.content == request.messages[-1].content:
                return node, RenderedChat(tokens=(), thinking=self._is_thinking(node))
            if answered < len(request.messages):
                messages = _with_thoughts(request.messages, node)
                rendered = renderer.behind(
                    messages,
                    answered,
                    request.tools,
                    prompt=before[0],
                    sampled=before[1],
                    args=args,
                    continues=continues,
                )
                if rendered is not None:
                    return node, rendered
        whole = renderer.whole(request.messages, request.tools, args=args, continues=continues)
        return None, whole

    def _is_thinking(self, node: AnswerNode) -> bool:
        """Returns whether an answer that was cut ends within its thoughts."""
        message = node.message
        is_open = bool(message.reasoning) and not message.content and not message.tool_calls
        text = self.settings.text(node.whole_answer.tokens)
        marks = self.settings.form.thought_marks or (THINK,)
        return is_open and not any(closing in text for _, closing in marks)

    def _grammar(self, request: ChatRequest, *, thinking: bool) -> str:
        """Returns what the reply is held to; raises DataError if that can't be."""
        where = request.schema_field if request.has_form else "tools"
        try:
            grammar = reply_grammar(
                request,
                self.settings.form_of(request),
                thinking=thinking,
                template="" if request.prompts else self.settings.renderer.template,
                special=self.settings.special,
            )
            fault = grammar_fault(grammar) if grammar else ""
        except ConfigError as error:  # here it is the request that asks for what is missing
            raise DataError(error.what, where=where, fix=error.fix) from error
        except RecursionError:
            raise DataError(
                "the schema is nested too deeply", where=where, fix="send a flatter one"
            ) from None
        if fault:
            raise DataError(
                f"the schema can't be used: {fault}",
                where=where,
                fix="leave out what is named, or all of the schema",
            )
        return grammar


def _with_thoughts(messages: Sequence[ChatMessage], node: AnswerNode) -> list[ChatMessage]:
    """Gives the continued answers their thoughts, which most clients don't send back."""
    made = list(messages)
    for answered in node.line:
        place = answered.num_messages - 1
        made[place] = replace(made[place], reasoning=answered.message.reasoning)
    return made


def _cut_answer(request: ChatRequest, parent: AnswerNode | None) -> AnswerNode | None:
    """Returns the answer of the policy with which the request goes on; None: it is not the policy's."""
    is_cut = parent is not None and parent.num_messages == len(request.messages)
    return parent if request.continues and is_cut else None
