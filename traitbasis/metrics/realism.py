"""Is this the customer speaking? The commonest failure of small user simulators is a role flip: a turn that a support
agent would write.

A rule on the text alone: phrases that offer service, speak for the company, or ask the customer for their data. It
finds turns in the agent's *words*; a turn that speaks from the agent's side in the customer's words, or about something
else altogether, passes (README, "What the default dose does").
"""

from __future__ import annotations

import re

_AGENT_PHRASES = re.compile(
    r"""
    how\s+(?:can|may)\s+(?:i|we)\s+(?:help|assist)
  | (?:i'm|i\s+am|we're|we\s+are|i'd\s+be|i\s+would\s+be|i'll\s+be)\s+(?:here|glad|happy|able)\s+to\s+(?:help|assist)
  | (?:can|could|let)\s+(?:i|me)\s+(?:help|assist)\s+you
  | i\s+can\s+(?:help|assist)\s+you
  | thank\s+you\s+for\s+(?:contacting|reaching|calling|your\s+(?:patience|inquiry|interest|order|business|purchase))
  | (?:glad|happy)\s+(?:that\s+)?you\s+(?:reached|contacted|called|asked)
  | \b(?:our|my)\s+(?:team|support|customer\s+(?:service|support)|representatives?|agents?)\b
  | \bour\s+(?:policy|system|records)\b
  | (?:could|can|would)\s+you\s+(?:please\s+)?(?:provide|share|give|confirm|tell)\s+(?:me\s+|us\s+)?(?:with\s+)?your\b
  | (?:provide|confirm|share)\s+(?:me\s+|us\s+)?(?:with\s+)?your\s+
    (?:name|order|account|email|phone|address|booking|full)
  | (?:we|i)\s+(?:apologi[sz]e|are\s+sorry)\s+for\s+(?:the|any)\s+inconvenience
  | you\s+are\s+(?:a|the)\s+customer
  | is\s+there\s+anything\s+else\s+(?:i|we)\s+can
  | as\s+an?\s+(?:ai|language\s+model|assistant)
  | customer\s+service\s+representative\s+at
    """,
    re.IGNORECASE | re.VERBOSE,
)


def is_role_flip(text: str) -> bool:
    """Whether a turn speaks as the agent, or repeats the instruction's "you are a customer"."""
    return bool(_AGENT_PHRASES.search(text.replace("’", "'")))
