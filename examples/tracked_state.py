"""An agent against a user whose emotion and relation are tracked (EIBench), scored as the paper does.

traitbasis serve &
python examples/tracked_state.py
"""

import os

from openai import OpenAI

from traitbasis.reactive.affect import State, outcome, process_rewards
from traitbasis.reactive.scenarios import read_scenarios

user = OpenAI(base_url=os.environ.get("TRAITBASIS_URL", "http://127.0.0.1:8000/v1"), api_key="none")
scenario = next(one for one in read_scenarios() if one.scene == "Defense")
feels = {"scenario": scenario.id, "coupling": 0.5}  # a rising emotion raises the dose of the user's traits
messages: list[dict[str, str]] = []


def agent(said: str) -> str:  # your agent goes here; scenario.prompt is its system prompt
    return (
        "I hear how frustrating this is, and I am sorry. Here is what I can do: I have added a credit to your account."
    )


line = "Hello, how can I help?"
while True:
    messages.append({"role": "user", "content": line})
    reply = user.chat.completions.create(
        model="steered-user@impatience-low", messages=messages, extra_body={"traitbasis": feels}
    )
    said = reply.choices[0].message.content or ""
    messages.append({"role": "assistant", "content": said})
    told = reply.traitbasis  # type: ignore[attr-defined]
    feels = {"state": told["state"]}
    print(f"agent: {line}\nuser:  {said}   {told['reaction']['reason']}")
    if told["reaction"]["ending"]:
        break
    line = agent(said)
states = [State(a, t) for a, t in told["reaction"]["states"]]
print(f"r_out {outcome(states[-1], scenario.anchors):+.2f}, by turn {process_rewards(states)}")
