"""Requests that schemathesis makes of the server's own description: ones that fit it and ones that do not.

What comes back must be what the description says. Refusing all that does not fit is not asked for, nor taking all that
does: fields we do not know are ignored (1.5.1), and values are checked by the library, which says more of them than a
JSON schema can. Half of the bodies get some of those values from ``bodies.py``: a made-up model gets no further.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import bodies
import conversations
import pytest
import schemathesis
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import events, is_stream
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from served import SECONDS, Wire

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]
MORE = {
    "model": bodies.models,
    "messages": conversations.messages,
    **dict.fromkeys(("traits", "trait_dict", "trait"), bodies.trait_maps),
    **dict.fromkeys(("tools", "tool_choice", "functions", "function_call", "stop", "logit_bias"), st.none()),
    **dict.fromkeys(("temperature", "top_p", "min_p", "repetition_penalty"), st.floats(0.1, 1)),
    **dict.fromkeys(("top_k", "max_tokens", "max_completion_tokens", "top_logprobs", "n"), st.integers(1, 5)),
    **dict.fromkeys(("presence_penalty", "frequency_penalty", "suffix", "best_of"), st.none()),
    "response_format": conversations.formats,
}


@pytest.mark.parametrize("mode", list(GenerationMode), ids=str)
def test_what_the_description_leads_to_is_what_it_says(wires: Mapping[str, Wire], mode: GenerationMode) -> None:
    wire = wires["hermes"]
    document = wire.send("openapi.json", "GET", f"{wire.url}/openapi.json").json()
    operations = [found.ok() for found in schemathesis.openapi.from_dict(document).get_all_operations()]
    assert sum(bool(operation.body) for operation in operations) > 6
    for operation in operations:

        @settings(max_examples=settings.default.max_examples // 3 if operation.body else 20)
        @given(case=operation.as_strategy(generation_mode=mode), more=st.none() | st.fixed_dictionaries(MORE))
        def fuzz(case: schemathesis.Case, more: dict[str, Any] | None) -> None:
            for body in case.body if isinstance(case.body, list) else [case.body]:
                if more and isinstance(body, dict):
                    body |= {name: value for name, value in more.items() if name in body}
            asked = case.as_transport_kwargs(base_url=wire.url)
            asked["headers"] = {**asked.get("headers", {}), "Connection": "close"}
            reply = wire.send(f"openapi.json, {mode}", asked.pop("method"), **asked)
            assert reply.seconds < SECONDS
            case.validate_response(reply.response, checks=CHECKS)
            if is_stream(reply):
                assert events(reply)[-1].get("error", {}).get("type") != "server_error", reply.text

        if mode is GenerationMode.POSITIVE or operation.body:  # no path and no query can fail to fit
            fuzz()
