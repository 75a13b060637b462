"""Chat templates of the kinds that are in use, in our own words, and a byte-level tokenizer that knows their tokens."""

from __future__ import annotations

from tiny import CHATML, tiny_tokenizer
from transformers import PreTrainedTokenizerBase

_SPLIT = (
    "{% if messages[0].role == 'system' %}{% set system = messages[0].content %}{% set rest = messages[1:] %}"
    "{% else %}{% set system = '' %}{% set rest = messages %}{% endif %}"
)
_ALTERNATE = (
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Roles must alternate user/assistant/user/...') }}{% endif %}"
)
# Trims, starts with a BOS token, prints a date.
LLAMA3 = (
    "{{ bos_token }}" + _SPLIT + "<|start_header_id|>system<|end_header_id|>\n\nKnowledge ends in 2023.\nToday is "
    "{% if date_string is defined %}{{ date_string }}{% else %}{{ strftime_now('%d %b %Y') }}{% endif %}\n\n"
    "{{ system | trim }}<|eot_id|>{% for m in rest %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{{ m.content | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
# No system role, strict alternation, no generation prompt.
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}" + _ALTERNATE + "{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% else %}{{ m.content }}</s>{% endif %}{% endfor %}"
)
# Refuses a system turn by name; the assistant is called "model".
GEMMA = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}" + _ALTERNATE + "<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{{ m.content | trim }}<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
# Puts the system text in front of the last user turn.
SYSTEM_LATE = (
    _SPLIT
    + "{% set at = namespace(last=-1) %}{% for m in rest %}{% if m.role == 'user' %}{% set at.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in rest %}<|im_start|>{{ m.role }}\n"
    "{% if loop.index0 == at.last and system %}{{ system }}\n\n{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Leaves a system turn out without a word.
DROPS_SYSTEM = (
    "{% for m in messages %}{% if m.role != 'system' %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# A reasoning model: opens a thought in the generation prompt unless told not to think.
QWEN3 = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n"
    "{% else %}<think>\n{% endif %}{% endif %}"
)
# Name -> (template, whether a system text has to go into the first user turn).
TEMPLATES = {
    "chatml": (CHATML, False),
    "llama3": (LLAMA3, False),
    "mistral": (MISTRAL, True),
    "gemma": (GEMMA, True),
    "system late": (SYSTEM_LATE, False),
    "drops system": (DROPS_SYSTEM, True),
    "qwen3": (QWEN3, False),
}
_MORE_SPECIALS = [
    *("<s>", "</s>", "[INST]", "[/INST]", "<start_of_turn>", "<end_of_turn>"),
    *("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
]


def template_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """The byte-level tokenizer with one of ``TEMPLATES`` and the special tokens of all; its BOS token is ``<s>``."""
    tokenizer = tiny_tokenizer(TEMPLATES[name][0])
    tokenizer.add_tokens(_MORE_SPECIALS, special_tokens=True)
    tokenizer.bos_token = "<s>"
    return tokenizer


# --- templates that know tools ----------------------------------------------------------------------------------------

_CHATML_REPLY = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
_CHATML_TOOLS = (
    _SPLIT + "<|im_start|>system\n{{ system }}{% if tools %}\n\nYou may call these functions.\n<tools>"
    "{% for tool in tools %}{{ '\n' }}{{ tool | tojson }}{% endfor %}{{ '\n' }}</tools>{% endif %}<|im_end|>\n"
    "{% for m in rest %}{% if m.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ m.content }}\n</tool_response>"
    "<|im_end|>\n{% elif m.tool_calls %}<|im_start|>assistant{% for call in m.tool_calls %}{{ '\n' }}CALL"
    "{% endfor %}<|im_end|>\n{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
) + _CHATML_REPLY
HERMES_TOOLS = _CHATML_TOOLS.replace(
    "CALL",
    '<tool_call>\n{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n'
    "</tool_call>",
)
# No JSON, so none of the formats that we read.
XML_TOOLS = _CHATML_TOOLS.replace(
    "CALL",
    "<tool_call>\n<function={{ call.function.name }}>{% for name, value in call.function.arguments.items() %}"
    "<parameter={{ name }}>{{ value }}</parameter>{% endfor %}</function>\n</tool_call>",
)
# Shows earlier calls and results, but says nothing of the tools there are.
SILENT_TOOLS = HERMES_TOOLS.replace("{% if tools %}", "{% if false %}")
# Puts tools into the first turn unless told not to, takes one call a turn, writes results as JSON strings.
LLAMA_TOOLS = (
    "{% set late = tools and (tools_in_user_message is not defined or tools_in_user_message) %}"
    "{{ bos_token }}" + _SPLIT + "<|start_header_id|>system<|end_header_id|>\n\n{% if tools and not late %}"
    "{% for tool in tools %}{{ tool | tojson(indent=4) }}\n\n{% endfor %}{% endif %}{{ system | trim }}<|eot_id|>"
    "{% if late %}<|start_header_id|>user<|end_header_id|>\n\n{% for tool in tools %}{{ tool | tojson(indent=4) }}\n\n"
    "{% endfor %}{{ rest[0].content | trim }}<|eot_id|>{% set rest = rest[1:] %}{% endif %}"
    "{% for m in rest %}{% if 'tool_calls' in m %}{% if m.tool_calls | length != 1 %}"
    "{{ raise_exception('one call at a time') }}{% endif %}{% set call = m.tool_calls[0].function %}"
    '<|start_header_id|>assistant<|end_header_id|>\n\n{"name": "{{ call.name }}", "parameters": '
    "{{ call.arguments | tojson }}}<|eot_id|>{% elif m.role == 'tool' %}<|start_header_id|>ipython<|end_header_id|>\n\n"
    "{{ m.content | tojson }}<|eot_id|>{% else %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{{ m.content | trim }}<|eot_id|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
LLAMA_TAG_TOOLS = LLAMA_TOOLS.replace('{"name": "{{', '<|python_tag|>{"name": "{{')
# Insists on ids of nine letters, and on alternation where no tools are involved; the system text comes last.
_MISTRAL_TOOLS = (
    "{{ bos_token }}" + _SPLIT + "{% set at = namespace(count=0, last=-1) %}"
    "{% for m in rest %}{% if m.role == 'user' %}{% set at.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in rest %}{% if m.role == 'tool' %}{% if m.tool_call_id | length != 9 %}"
    "{{ raise_exception('ids have nine letters') }}{% endif %}"
    '[TOOL_RESULTS] {"content": {{ m.content }}, "call_id": "{{ m.tool_call_id }}"}[/TOOL_RESULTS]'
    "{% elif m.tool_calls is defined %}{% for call in m.tool_calls %}{% if call.id | length != 9 %}"
    "{{ raise_exception('ids have nine letters') }}{% endif %}CALL{% endfor %}</s>"
    "{% else %}{% if (m.role == 'user') != (at.count % 2 == 0) %}{{ raise_exception('must alternate') }}{% endif %}"
    "{% set at.count = at.count + 1 %}{% if m.role == 'user' %}{% if tools and loop.index0 == at.last %}"
    "[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}[INST] "
    "{% if system and loop.index0 == at.last %}{{ system }}\n\n{% endif %}{{ m.content }}[/INST]"
    "{% else %} {{ m.content | trim }}</s>{% endif %}{% endif %}{% endfor %}"
)
MISTRAL_TOOLS = _MISTRAL_TOOLS.replace(
    "CALL", '[TOOL_CALLS] [{{ (call.function | tojson)[:-1] }}, "id": "{{ call.id }}"}]'
)
MISTRAL_ARGS_TOOLS = _MISTRAL_TOOLS.replace(
    "CALL", "[TOOL_CALLS]{{ call.function.name }}[CALL_ID]{{ call.id }}[ARGS]{{ call.function.arguments | tojson }}"
)
# Name -> (template, tokens of its own that are special, tokens of its own that are not).
_LLAMA_SPECIALS = ["<s>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|python_tag|>"]
_MISTRAL_SPECIALS = [
    *("<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
    *("[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
]
TOOL_TEMPLATES: dict[str, tuple[str, list[str], list[str]]] = {
    "hermes": (HERMES_TOOLS, [], ["<tool_call>", "</tool_call>"]),
    "hermes spelled": (HERMES_TOOLS, [], []),
    "llama": (LLAMA_TOOLS, _LLAMA_SPECIALS, []),
    "llama tag": (LLAMA_TAG_TOOLS, _LLAMA_SPECIALS, []),
    "mistral": (MISTRAL_TOOLS, _MISTRAL_SPECIALS, []),
    "mistral args": (MISTRAL_ARGS_TOOLS, _MISTRAL_SPECIALS, []),
    # From here on they get our own text.
    "chatml": (CHATML, [], []),
    "gemma": (GEMMA, ["<s>", "<start_of_turn>", "<end_of_turn>"], []),
    "xml": (XML_TOOLS, [], ["<tool_call>", "</tool_call>"]),
    "silent": (SILENT_TOOLS, [], []),
}
NATIVE = list(TOOL_TEMPLATES)[:6]


def tool_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """The byte-level tokenizer with one of ``TOOL_TEMPLATES`` and that model's tokens; fits the tiny models."""
    template, special, ordinary = TOOL_TEMPLATES[name]
    tokenizer = tiny_tokenizer(template)
    tokenizer.add_tokens(special, special_tokens=True)
    tokenizer.add_tokens(ordinary)
    if "<s>" in special:
        tokenizer.bos_token = "<s>"
    return tokenizer
