"""Six families of chat models as tests need them: a template, its marks, and a tokenizer that merges.

The templates are ours and behave as the families' own do where that matters to a conversation in tokens:
which marks surround what, what is dropped from old turns, what is refused, what moves when the conversation
grows.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from realsys.rollout.conversation.chat_rendering import PLAIN_TEMPLATE

# Words and what stands between them, so that there are merges that cross the borders of random pieces.
CORPUS = [
    "the answer is 42, and the other answers are 17 and 4.5",
    'search the weather in Paris; {"name": "search", "arguments": {"query": "weather", "limit": 3}}',
    "think about it, then the answer: x = 3 + 4\n\nso the result is 7.\n",
    "user: assistant: system: tool: function observation result\n",
    "über naïve café 日本語 😀 the stop here STOP END\n\n",
    '{"result": "ok", "items": [1, 2, 3], "text": "the weather in Paris is fine"}',
] * 4

_HERMES_HEAD = """\
{%- if messages[0].role == 'system' -%}
{%- set head = messages[0].content -%}{%- set rest = messages[1:] -%}
{%- else -%}{%- set head = DEFAULT -%}{%- set rest = messages -%}{%- endif -%}
{%- if tools -%}
{{- '<|im_start|>system\\n' + (head + '\\n\\n' if head else '') + 'Tools:\\n<tools>' -}}
{%- for tool in tools -%}{{- '\\n' + (tool | tojson) -}}{%- endfor -%}
{{- '\\n</tools>\\nCall one by <tool_call>{"name": NAME, "arguments": OBJECT}</tool_call>.<|im_end|>\\n' -}}
{%- elif head -%}{{- '<|im_start|>system\\n' + head + '<|im_end|>\\n' -}}{%- endif -%}
"""
_HERMES_CALLS = """\
{%- for call in m.tool_calls or [] -%}
{%- if not (loop.first and not said) -%}{{- '\\n' -}}{%- endif -%}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' -}}
{{- call.function.arguments if call.function.arguments is string else call.function.arguments | tojson -}}
{{- '}\\n</tool_call>' -}}
{%- endfor -%}
"""
_HERMES_TOOL = """\
{%- if loop.first or rest[loop.index0 - 1].role != 'tool' -%}{{- '<|im_start|>user' -}}{%- endif -%}
{{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' -}}
{%- if loop.last or rest[loop.index0 + 1].role != 'tool' -%}{{- '<|im_end|>\\n' -}}{%- endif -%}
"""

# Qwen2.5: a system turn of its own where none is given; results of tools are a user's turn.
CHATML = (
    _HERMES_HEAD.replace("DEFAULT", "'You are a helpful assistant.'")
    + "{%- for m in rest -%}{%- if m.role == 'tool' -%}"
    + _HERMES_TOOL
    + "{%- elif m.role == 'assistant' -%}{%- set said = m.content -%}"
    "{{- '<|im_start|>assistant\\n' + said -}}" + _HERMES_CALLS + "{{- '<|im_end|>\\n' -}}"
    "{%- else -%}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' -}}"
    "{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)

# Qwen3: thoughts stay behind the last question of the user and are dropped before it.
QWEN3 = (
    _HERMES_HEAD.replace("DEFAULT", "''")
    + """\
{%- set ns = namespace(last=-1) -%}
{%- for m in rest -%}{%- if m.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}{%- endfor -%}
{%- for m in rest -%}{%- if m.role == 'tool' -%}"""
    + _HERMES_TOOL
    + """\
{%- elif m.role == 'assistant' -%}
{%- set thoughts = m.reasoning_content or '' -%}{%- set said = m.content -%}
{%- if not thoughts and '</think>' in said -%}
{%- set thoughts = said.split('</think>')[0].split('<think>')[-1].strip('\\n') -%}
{%- set said = said.split('</think>')[-1].lstrip('\\n') -%}
{%- endif -%}
{{- '<|im_start|>assistant\\n' -}}
{%- if loop.index0 > ns.last and (loop.last or thoughts) -%}
{{- '<think>\\n' + thoughts.strip('\\n') + '\\n</think>\\n\\n' + said.lstrip('\\n') -}}
{%- else -%}{{- said -}}{%- endif -%}
"""
    + _HERMES_CALLS
    + "{{- '<|im_end|>\\n' -}}"
    "{%- else -%}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' -}}"
    "{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}"
    "{%- if enable_thinking is defined and not enable_thinking -%}"
    "{{- '<think>\\n\\n</think>\\n\\n' -}}{%- endif -%}{%- endif -%}"
)

# Llama 3.1: a call is the whole turn, one at a time; tools in the first user's turn; results as JSON.
LLAMA3 = """\
{{- bos_token -}}
{%- if messages[0].role == 'system' -%}
{%- set head = messages[0].content | trim -%}{%- set rest = messages[1:] -%}
{%- else -%}{%- set head = '' -%}{%- set rest = messages -%}{%- endif -%}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\nToday: 1 Jan\\n\\n' + head + '<|eot_id|>' -}}
{%- if tools and (not rest or rest[0].role != 'user') -%}
{{- raise_exception('tools need a first user turn') -}}
{%- endif -%}
{%- for m in rest -%}
{%- if m.tool_calls -%}
{%- if m.tool_calls | length != 1 -%}{{- raise_exception('one call at a time') -}}{%- endif -%}
{%- set f = m.tool_calls[0].function -%}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + f.name + '", "parameters": ' -}}
{{- f.arguments | tojson -}}{{- '}<|eot_id|>' -}}
{%- elif m.role in ('tool', 'ipython') -%}
{{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + (m.content | tojson) + '<|eot_id|>' -}}
{%- else -%}
{{- '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' -}}
{%- if tools and loop.first -%}
{{- 'Functions, called by {"name": NAME, "parameters": OBJECT}:\\n\\n' -}}
{%- for tool in tools -%}{{- (tool | tojson) + '\\n\\n' -}}{%- endfor -%}
{%- endif -%}
{{- (m.content | trim) + '<|eot_id|>' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}{%- endif -%}
"""

# Mistral: turns alternate; system text and tools move to the last user's turn; ids of nine letters.
MISTRAL_TOOLS = """\
{{- bos_token -}}
{%- if messages[0].role == 'system' -%}
{%- set head = messages[0].content -%}{%- set rest = messages[1:] -%}
{%- else -%}{%- set head = '' -%}{%- set rest = messages -%}{%- endif -%}
{%- set ns = namespace(last=-1, turn=0) -%}
{%- for m in rest -%}
{%- if m.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}
{%- if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) -%}
{%- if (m.role == 'user') != (ns.turn % 2 == 0) -%}
{{- raise_exception('turns must alternate') -}}
{%- endif -%}
{%- set ns.turn = ns.turn + 1 -%}
{%- endif -%}
{%- endfor -%}
{%- for m in rest -%}
{%- if m.role == 'user' -%}
{%- if tools and loop.index0 == ns.last -%}
{{- '[AVAILABLE_TOOLS] ' + (tools | tojson) + '[/AVAILABLE_TOOLS]' -}}
{%- endif -%}
{{- '[INST] ' + (head + '\\n\\n' if head and loop.index0 == ns.last else '') + m.content + '[/INST]' -}}
{%- elif m.tool_calls -%}
{{- '[TOOL_CALLS] [' -}}
{%- for call in m.tool_calls -%}
{%- if call.id is not defined or call.id | length != 9 -%}
{{- raise_exception('ids have nine letters') -}}
{%- endif -%}
{{- (', ' if not loop.first else '') + '{"name": "' + call.function.name + '", "arguments": ' -}}
{{- call.function.arguments | tojson -}}{{- ', "id": "' + call.id + '"}' -}}
{%- endfor -%}
{{- ']' + eos_token -}}
{%- elif m.role == 'assistant' -%}{{- ' ' + m.content + eos_token -}}
{%- elif m.role == 'tool' -%}
{%- if m.tool_call_id is not defined or m.tool_call_id | length != 9 -%}
{{- raise_exception('ids have nine letters') -}}
{%- endif -%}
{{- '[TOOL_RESULTS] {"content": ' + (m.content | tojson) -}}
{{- ', "call_id": "' + m.tool_call_id + '"}[/TOOL_RESULTS]' -}}
{%- else -%}{{- raise_exception('only user, assistant and tool') -}}{%- endif -%}
{%- endfor -%}
"""

# DeepSeek R1: all system texts at the front, thoughts dropped, no prompt for an answer behind results.
DEEPSEEK = """\
{{- bos_token -}}
{%- set ns = namespace(out=false) -%}
{%- for m in messages -%}
{%- if m.role == 'system' -%}{{- m.content + '\\n\\n' -}}{%- endif -%}
{%- endfor -%}
{%- for tool in tools or [] -%}{{- (tool | tojson) + '\\n' -}}{%- endfor -%}
{%- for m in messages -%}
{%- if m.role == 'user' -%}{%- set ns.out = false -%}{{- '<｜User｜>' + m.content -}}
{%- elif m.role == 'assistant' -%}
{%- if not ns.out -%}{{- '<｜Assistant｜>' -}}{%- endif -%}{%- set ns.out = false -%}
{{- m.content.split('</think>')[-1] -}}
{%- if m.tool_calls -%}
{{- '<｜tool▁calls▁begin｜>' -}}
{%- for call in m.tool_calls -%}
{{- ('\\n' if not loop.first else '') + '<｜tool▁call▁begin｜>function<｜tool▁sep｜>' -}}
{{- call.function.name -}}
{{- '\\n```json\\n' + (call.function.arguments | tojson) + '\\n```<｜tool▁call▁end｜>' -}}
{%- endfor -%}
{{- '<｜tool▁calls▁end｜>' -}}
{%- endif -%}
{{- eos_token -}}
{%- elif m.role == 'tool' -%}
{%- if not ns.out -%}{{- '<｜tool▁outputs▁begin｜>' -}}{%- endif -%}{%- set ns.out = true -%}
{{- '<｜tool▁output▁begin｜>' + m.content + '<｜tool▁output▁end｜>' -}}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' -%}
{{- '<｜tool▁outputs▁end｜>' -}}
{%- endif -%}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt and not ns.out -%}{{- '<｜Assistant｜><think>\\n' -}}{%- endif -%}
"""


@dataclass(frozen=True)
class ChatFamily:
    """A family: its template, what its tokenizer knows as one token, and how its models write calls.

    Attributes:
        marks: tokens that no merge makes; ``ends`` are the first of them.
        ends: tokens that end an answer; the first is the tokenizer's.
    """

    name: str
    template: str
    ends: tuple[str, ...]
    marks: tuple[str, ...]
    thinks: bool = False

    def call_text(self, name: str, arguments: dict[str, Any], *, indent: bool = False) -> str:
        """Writes a call as the family's models do, or with white space that no client keeps."""
        value = json.dumps(arguments, ensure_ascii=False, indent=1 if indent else None)
        match self.name:
            case "llama3":
                return f'{{"name": "{name}", "parameters": {value}}}'
            case "mistral":
                return f'[TOOL_CALLS] [{{"name": "{name}", "arguments": {value}}}]'
            case "deepseek":
                return (
                    f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{value}"
                    "\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
                )
        return f'<tool_call>\n{{"name": "{name}", "arguments": {value}}}\n</tool_call>'

    @property
    def tokenizer(self) -> Any:
        return _tokenizer(self)

    @property
    def end_ids(self) -> frozenset[int]:
        return frozenset(self.tokenizer.convert_tokens_to_ids(list(self.ends)))


# Line ends stay together whatever follows, as today's tokenizers have them: else the end of each prompt
# would be other tokens as soon as an answer stands behind it.
_PIECE = Regex(r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s*\n+|\s+")
_TAGS = ("<tool_call>", "</tool_call>", "<think>", "</think>")
FAMILIES = {
    f.name: f
    for f in (
        ChatFamily("chatml", CHATML, ("<|im_end|>", "<|endoftext|>"), ("<|im_start|>", *_TAGS)),
        ChatFamily(
            "qwen3", QWEN3, ("<|im_end|>", "<|endoftext|>"), ("<|im_start|>", *_TAGS), thinks=True
        ),
        ChatFamily(
            "llama3",
            LLAMA3,
            ("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"),
            ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|python_tag|>"),
        ),
        ChatFamily(
            "mistral",
            MISTRAL_TOOLS,
            ("</s>",),
            (
                *("<s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
                *("[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
            ),
        ),
        ChatFamily(
            "deepseek",
            DEEPSEEK,
            ("<｜end▁of▁sentence｜>",),
            (
                *(
                    "<｜begin▁of▁sentence｜>",
                    "<｜User｜>",
                    "<｜Assistant｜>",
                    "<think>",
                    "</think>",
                ),
                *("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>"),
                *("<｜tool▁call▁end｜>", "<｜tool▁sep｜>", "<｜tool▁outputs▁begin｜>"),
                *("<｜tool▁outputs▁end｜>", "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>"),
            ),
            thinks=True,
        ),
        ChatFamily("plain", PLAIN_TEMPLATE, ("<eos>",), ("<bos>",)),
    )
}


class QuickTokenizer(PreTrainedTokenizerFast):
    """Does what transformers' does for one text, in a third of the time."""

    def __call__(self, text: str, **_: Any) -> Any:
        return SimpleNamespace(input_ids=self.encode(text))

    def encode(self, text: str, **_: Any) -> list[int]:
        made = self.backend_tokenizer.encode_batch_fast([text], add_special_tokens=False)
        return list(made[0].ids)

    def decode(self, tokens: Any, **_: Any) -> str:
        return str(self.backend_tokenizer.decode(list(tokens), skip_special_tokens=False))


@cache
def _tokenizer(family: ChatFamily) -> Any:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(_PIECE, behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
        max_token_length=8,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    marks = [
        AddedToken(m, special=m in family.ends, normalized=False)
        for m in (*family.ends, *family.marks)
    ]
    tokenizer.add_tokens(marks)
    return QuickTokenizer(
        tokenizer_object=tokenizer,
        bos_token=family.marks[0],
        eos_token=family.ends[0],
        chat_template=family.template,
        clean_up_tokenization_spaces=False,
    )
