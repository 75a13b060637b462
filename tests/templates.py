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
