"""Tokenizers for the families of the package ``renderers``: ours, with the marks that each family asks for.

One family is missing: gpt-oss brings a vocabulary of its own, from the network. The marks of others than
``OF_TEMPLATES`` are names of tokens only; what such a model's own template writes is not known here.
"""

from __future__ import annotations

from dataclasses import replace

from chat_families import FAMILIES, ChatFamily

_TAGS = "<think> </think> <tool_call> </tool_call>"
_QWEN = f"<|im_start|> {_TAGS} <tool_response> </tool_response>"
_QWEN_SEES = f"{_QWEN} <|vision_start|> <|vision_end|> <|image_pad|> <|video_pad|>"
_GLM = (
    f"[gMASK] <sop> <|system|> <|assistant|> {_TAGS} <tool_response> </tool_response> "
    "<arg_key> </arg_key> <arg_value> </arg_value>"
)
_KIMI = (
    "<think> </think> <|im_user|> <|im_assistant|> <|im_system|> <|im_middle|> "
    "<|tool_calls_section_begin|> <|tool_calls_section_end|> <|tool_call_begin|> "
    "<|tool_call_argument_begin|> <|tool_call_end|>"
)
_HY3 = " ".join(
    [
        *(f"<｜hy_{name}:opensource｜>" for name in ("begin_of_sentence", "User", "Assistant")),
        "<｜reasoning_mode:opensource｜> <tool_sep:opensource>",
        *(
            f"<{name}:opensource> </{name}:opensource>"
            for name in ("think", "tool_calls", "tool_call")
        ),
        *(f"<{name}:opensource> </{name}:opensource>" for name in ("arg_key", "arg_value")),
        *(
            f"<{name}:opensource> </{name}:opensource>"
            for name in ("tool_responses", "tool_response")
        ),
    ]
)
_INKLING = " ".join(
    [
        "<think> </think> <|end_message|> <|audio_end|> <|unused_200054|> <|unused_200053|>",
        *(f"<|message_{name}|>" for name in ("user", "model", "system", "tool")),
        *(f"<|content_{name}|>" for name in ("text", "thinking", "image", "audio_input", "xml")),
        *(f"<|content_invoke_tool_{name}|>" for name in ("json", "text")),
    ]
)
_GEMMA = (
    "<bos> <|turn> <|channel> <channel|> <|think|> <|tool_call> <tool_call|> <tool_response|> <|tool> "
    '<tool|> <|"|> <|image|> <|audio|> <|video|> <|image> <image|> <|audio> <audio|>'
)
_LAGUNA = f"<assistant> {_TAGS}"
_V4 = "latest_reminder action query authority domain title read_url".split()
_DEEPSEEK_V4 = (
    "<｜begin▁of▁sentence｜> <｜User｜> <｜Assistant｜> <think> </think> ｜DSML｜ "
    + " ".join(f"<｜{name}｜>" for name in _V4)
)
# Family → the tokens that end an answer, and its other marks.
_MARKS = {
    "prime-qwen3": ("<|im_end|> <|endoftext|>", _QWEN),
    "qwen3.5": ("<|im_end|> <|endoftext|>", _QWEN_SEES),
    "qwen3.6": ("<|im_end|> <|endoftext|>", _QWEN_SEES),
    "qwen3.8": ("<|im_end|> <|endoftext|>", _QWEN_SEES),
    "qwen3-vl": ("<|im_end|> <|endoftext|>", _QWEN_SEES),
    "gemma4": ("<turn|> <eos> <|tool_response>", _GEMMA),
    "glm-4.5": ("<|endoftext|> <|user|> <|observation|>", f"{_GLM} /nothink"),
    "glm-5": ("<|endoftext|> <|user|> <|observation|>", _GLM),
    "glm-5.1": ("<|endoftext|> <|user|> <|observation|>", _GLM),
    "glm-5.3": ("<|endoftext|> <|user|> <|observation|>", _GLM),
    "hy3": ("<｜hy_eos:opensource｜>", _HY3),
    "inkling": ("<|content_model_end_sampling|>", _INKLING),
    "kimi-k2": ("<|im_end|>", _KIMI),
    "kimi-k2.5": (
        "<|im_end|>",
        f"{_KIMI} <|media_begin|> <|media_content|> <|media_pad|> <|media_end|>",
    ),
    "laguna-xs.2": ("</assistant> 〈|EOS|〉", _LAGUNA),
    "laguna-m.1": ("</assistant> 〈|EOS|〉", _LAGUNA),
    "laguna-xs-2.1": ("</assistant> 〈|EOS|〉", _LAGUNA),
    "laguna-s-2.1": ("</assistant> 〈|EOS|〉", _LAGUNA),
    "minimax-m2": ("[e~[", "]~!b[ ]~b] <think> </think> <minimax:tool_call> </minimax:tool_call>"),
    "nemotron-3": ("<|im_end|> </s>", f"<s> {_QWEN}"),
    "nemotron-3-ultra": ("<|im_end|> </s>", f"<s> {_QWEN}"),
    "nemotron-3.5": ("<|im_end|> </s>", f"<s> {_QWEN}"),
    "deepseek-v4": ("<｜end▁of▁sentence｜>", _DEEPSEEK_V4),
}
OF_TEMPLATES = {
    "qwen3": replace(FAMILIES["qwen3"], marks=tuple(_QWEN.split())),
    "llama-3": FAMILIES["llama3"],
    "deepseek-v3": FAMILIES["deepseek"],
    "deepseek-r1": FAMILIES["deepseek"],
}
OF_PACKAGE = {
    **OF_TEMPLATES,
    **{
        name: ChatFamily(
            name, FAMILIES["qwen3"].template, tuple(ends.split()), tuple(marks.split()), thinks=True
        )
        for name, (ends, marks) in _MARKS.items()
    },
}
