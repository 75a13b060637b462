"""An agent against a user in an emotion condition that may leave unsatisfied (τ-Emotion-Bench, arXiv 2610.19560).

traitbasis serve &
python examples/emotion_condition.py
"""

import os

from openai import OpenAI

user = OpenAI(base_url=os.environ.get("TRAITBASIS_URL", "http://127.0.0.1:8000/v1"), api_key="none")
task = (
    "You are Ana Ruiz, a customer of a shoe shop. Order #W1042 came in the wrong size; you want size 10 in its place. "
    "When that is done, say ###STOP### and nothing else."
)
messages = [{"role": "system", "content": task}]  # as the user sees it: the agent is "user" here
feels = {"condition": "frustration.cold.high.skeptical", "unsatisfied": True}


def agent(said: list[str]) -> str:  # your agent goes here
    return "Hi! How can I help you today?" if not said else "Could you tell me your order number, please?"


said: list[str] = []
for _ in range(20):
    messages.append({"role": "user", "content": agent(said)})
    reply = user.chat.completions.create(
        model="steered-user@impatience-medium", messages=messages, extra_body={"traitbasis": feels}
    )
    said.append(reply.choices[0].message.content or "")
    messages.append({"role": "assistant", "content": said[-1]})
    told = reply.traitbasis  # type: ignore[attr-defined]
    feels = {"state": told["state"]}
    print(f"agent: {messages[-2]['content']}\nuser:  {said[-1]}   {told['reaction']['dissatisfaction']}")
    if "###" in said[-1]:
        break
