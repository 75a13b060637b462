"""An agent with tools against somebody who seeks support and doubts what is made up (TEA-Bench, arXiv 2601.18700).

traitbasis serve &
python examples/support_seeker.py
"""

import os

from openai import OpenAI

user = OpenAI(base_url=os.environ.get("TRAITBASIS_URL", "http://127.0.0.1:8000/v1"), api_key="none")
feels: dict[str, object] = {"support": "cancelled-flight", "user_type": "action-oriented"}
messages: list[dict[str, str]] = []


def agent(said: str) -> tuple[str, list[str]]:  # your agent goes here: its reply, and what its tools have told it
    weather = "light rain until 18:00, 11 degrees"
    return "That sounds like a hard day. It is raining until 18:00; would a walk after that help?", [weather]


line, results = "Hi, I'm here. What is on your mind?", list[str]()
for _ in range(15):
    messages.append({"role": "user", "content": line})
    reply = user.chat.completions.create(
        model="steered-user", messages=messages, extra_body={"traitbasis": {**feels, "tool_results": results}}
    )
    said = reply.choices[0].message.content or ""
    messages.append({"role": "assistant", "content": said})
    told = reply.traitbasis  # type: ignore[attr-defined]
    feels = {"state": told["state"]}
    print(f"agent: {line}\nuser:  {said}   {told['reaction']['grounding']}")
    if "###STOP###" in said:
        break
    line, results = agent(said)
