"""Served users: a name under which a persona, its traits and its manners are kept, written in a YAML file.

    users:
      - name: hurried-anna
        traits: impatience-high+skeptical-0.5
        persona: {age: 34, occupation: nurse, "way of writing": short sentences}
        sampling: {temperature: 0.8, max_tokens: 60}
        guards: {role_flip: false}
        stop_tokens: ["###STOP###"]
        context: refuse

Everything but the name may be left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from traitbasis.engines.base import Sampling
from traitbasis.errors import RequestError, TraitSpecError, UsersError
from traitbasis.guards import choose_guards
from traitbasis.spec import parse_traits

Context = Literal["truncate", "refuse"]

# Harnesses write the model's name into file names, and "@" and "=" set off traits and trial in it.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


class ServedUser(BaseModel):
    """One simulated user, as a harness names it.

    traits: what is steered when a request says nothing. persona: attributes that are told to the model with the
    instruction. sampling: fields of ``Sampling`` that differ from the simulator's. guards: switches, by name.
    stop_tokens: the tokens this user may end a conversation with; by default those that the system prompt names.
    context: what happens to a conversation that is too long: its oldest agent turns are left out, or it is refused.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    traits: str | dict[str, float | str] = ""
    persona: dict[str, str | int | float] = Field(default_factory=dict)
    sampling: dict[str, Any] = Field(default_factory=dict)
    guards: dict[str, bool] = Field(default_factory=dict)
    stop_tokens: list[str] | None = None
    context: Context = "truncate"

    @field_validator("name")
    @classmethod
    def _name_is_fit_for_file_names(cls, name: str) -> str:
        if not _NAME.fullmatch(name):
            raise ValueError(f"{name!r} must be letters, digits, '.', '_' and '-', beginning with a letter or digit")
        return name

    @field_validator("sampling")
    @classmethod
    def _sampling_is_known(cls, sampling: dict[str, Any]) -> dict[str, Any]:
        if isinstance(stop := sampling.get("stop"), str):
            sampling = {**sampling, "stop": (stop,)}
        try:
            Sampling(**sampling)
        except (RequestError, TypeError) as error:
            raise ValueError(str(error).replace("Sampling.__init__() got an", "it has an")) from error
        return sampling

    @field_validator("stop_tokens")
    @classmethod
    def _stop_tokens_are_words(cls, tokens: list[str] | None) -> list[str] | None:
        if bad := [token for token in tokens or () if not token or token.split() != [token]]:
            raise ValueError(f"{bad[0]!r} must be one word, such as ###STOP###")
        return tokens

    @field_validator("guards")
    @classmethod
    def _guards_are_known(cls, guards: dict[str, bool]) -> dict[str, bool]:
        try:
            choose_guards(guards)
        except RequestError as error:
            raise ValueError(str(error)) from error
        return guards

    @property
    def about(self) -> str:
        """The persona as a sentence for the instruction, empty when there is none."""
        return describe_persona(self.persona)


DEFAULT_USER = ServedUser(name="steered-user")


def describe_persona(attributes: Mapping[str, Any]) -> str:
    """Attributes as text for an instruction: ``About you: age 34; occupation nurse.``"""
    told = [f"{name.replace('_', ' ')} {value}" for name, value in attributes.items() if str(value).strip()]
    return f"About you: {'; '.join(told)}." if told else ""


def read_users(path: str | Path) -> list[ServedUser]:
    """Users of a YAML file. Raises UsersError that names the file, the user and the field."""
    try:
        written = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise UsersError(f"cannot read users from {path}: {error}") from error
    except yaml.YAMLError as error:
        raise UsersError(f"{path} is no YAML: {error}") from error
    entries = written.get("users") if isinstance(written, Mapping) else None
    if not isinstance(entries, list) or not entries or set(written) != {"users"}:
        raise UsersError(f"{path} must hold one list, `users:`, with at least one entry that has a `name`")
    return [_user(path, number, entry) for number, entry in enumerate(entries)]


def check_users(users: Iterable[ServedUser], traits: Sequence[str], aliases: Mapping[str, str] | None = None) -> None:
    """Can users be served together, with a basis of these traits?

    Raises UsersError when two have one name, a name is a trait spec, or traits cannot be read.
    """
    seen: set[str] = set()
    for user in users:
        if user.name in seen:
            raise UsersError(f"two users have the name {user.name!r}; give each its own")
        seen.add(user.name)
        try:
            parse_traits(user.name, traits, aliases)
        except TraitSpecError:
            pass  # as it should be: /u/<name> and /u/<traits> must not be mistaken for each other
        else:
            raise UsersError(f"a user has the name {user.name!r}, which reads as a trait spec; choose another")
        try:
            parse_traits(user.traits, traits, aliases)
        except TraitSpecError as error:
            raise UsersError(f"user {user.name!r}, field 'traits': {error}") from error


def _user(path: str | Path, number: int, entry: Any) -> ServedUser:
    name = entry.get("name", f"number {number + 1}") if isinstance(entry, Mapping) else f"number {number + 1}"
    try:
        return ServedUser.model_validate(entry)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        known = f"; known fields: {', '.join(ServedUser.model_fields)}" if first["type"] == "extra_forbidden" else ""
        message = first["msg"].removeprefix("Value error, ")
        raise UsersError(f"{path}: user {name!r}{f', field {where!r}' if where else ''}: {message}{known}") from error
