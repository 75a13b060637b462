"""Served users: a name under which a persona, its traits and its manners are kept, written in a YAML file.

    users:
      - name: hurried-anna
        traits: impatience-high+skeptical-0.5
        persona: {age: 34, occupation: nurse, "way of writing": short sentences}
        sampling: {temperature: 0.8, max_tokens: 60}
        guards: {role_flip: false}
        stop_tokens: ["###STOP###"]
        context: refuse
        force: true
        reactive: {condition: frustration.cold.high.skeptical, unsatisfied: true}

Everything but the name may be left out.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from traitbasis.chat import check_characters
from traitbasis.engines.base import Sampling
from traitbasis.errors import ReactionError, RequestError, TraitSpecError, UsersError
from traitbasis.guards import choose_guards
from traitbasis.reactive.reactor import Reactive
from traitbasis.spec import parse_traits

Context = Literal["truncate", "refuse"]

# Harnesses write the model's name into file names, and "@" and "=" set off traits and trial in it.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_QUOTE = 'put in quotes what begins with #, such as "###STOP###"'


class ServedUser(BaseModel):
    """One simulated user, as a harness names it.

    traits: what is steered when a request says nothing. persona: attributes that are told to the model with the
    instruction; true and false become yes and no, a list its words with commas. sampling: fields of ``Sampling`` that
    differ from the simulator's, but for logprobs. guards: switches, by name.
    stop_tokens: the tokens this user may end a conversation with; by default those that the system prompt names.
    context: what happens to a conversation that is too long: its oldest agent turns are left out, or it is refused.
    force: traits beyond their limit and traits that are not steerable are served, where a request does not say no.
    reactive: how it feels and reacts; by default it does neither.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    traits: str | dict[str, float | str] = ""
    persona: dict[str, str | int | float] = Field(default_factory=dict)
    sampling: dict[str, Any] = Field(default_factory=dict)
    guards: dict[str, bool] = Field(default_factory=dict)
    stop_tokens: list[str] | None = None
    context: Context = "truncate"
    force: bool = False
    reactive: Reactive | None = None

    @field_validator("name")
    @classmethod
    def _name_is_fit_for_file_names(cls, name: str) -> str:
        if not _NAME.fullmatch(name):
            raise ValueError(f"{name!r} must be letters, digits, '.', '_' and '-', beginning with a letter or digit")
        return name

    @field_validator("traits", mode="before")
    @classmethod
    def _traits_are_a_spec(cls, traits: Any) -> Any:
        if traits is False:  # YAML's word for off
            return "off"
        if isinstance(traits, Mapping):
            levels = {trait: "off" if level is False else level for trait, level in traits.items()}
            if all(isinstance(trait, str) and _is_word_or_number(level) for trait, level in levels.items()):
                return levels
        elif isinstance(traits, str):
            return traits
        raise ValueError(f"{traits!r}: write impatience-high+skeptical-0.5, or {{impatience: high, skeptical: 0.5}}")

    @field_validator("persona", mode="before")
    @classmethod
    def _persona_can_be_told(cls, persona: Any) -> dict[str, Any]:
        if not isinstance(persona, Mapping):
            raise ValueError(f"{persona!r} must be attributes, such as {{age: 34, occupation: nurse}}")
        return {_word(name): _told(name, value) for name, value in persona.items()}

    @field_validator("sampling")
    @classmethod
    def _sampling_is_known(cls, sampling: dict[str, Any]) -> dict[str, Any]:
        if "logprobs" in sampling:
            raise ValueError("logprobs is no user's; a request asks for it")
        if isinstance(stop := sampling.get("stop"), str):
            sampling = {**sampling, "stop": (stop,)}
        try:
            Sampling(**sampling)
        except (RequestError, TypeError) as error:
            raise ValueError(str(error).replace("Sampling.__init__() got an", "it has an")) from error
        return sampling

    @field_validator("stop_tokens", mode="before")
    @classmethod
    def _stop_tokens_are_words(cls, tokens: Any) -> Any:
        if not isinstance(tokens, list | None) or any(not isinstance(token, str) for token in tokens or ()):
            raise ValueError(f"{tokens!r} must be a list of words; {_QUOTE}")
        _check_text(*tokens or ())
        if bad := [token for token in tokens or () if not token or token.split() != [token]]:
            raise ValueError(f"{bad[0]!r} must be one word, such as ###STOP###")
        return tokens

    @field_validator("reactive", mode="before")
    @classmethod
    def _reactive_is_known(cls, reactive: Any) -> Any:
        try:
            return None if reactive is None else Reactive.read(reactive)
        except ReactionError as error:
            raise ValueError(str(error)) from error

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
        written = yaml.load(Path(path).read_text(encoding="utf-8"), _Loader)
    except (OSError, UnicodeDecodeError) as error:
        raise UsersError(f"cannot read users from {path}: {error}") from error
    except UsersError as error:
        raise UsersError(f"{path}, {error}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UsersError(f"{path} is no YAML: {error}; {_QUOTE}") from error
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


def _is_word_or_number(value: Any) -> bool:
    return isinstance(value, str | int | float) and not isinstance(value, bool)


def _check_text(*texts: str) -> None:
    try:
        check_characters(", ".join(map(repr, texts)), *texts)
    except RequestError as error:
        raise ValueError(str(error)) from error


def _word(name: Any) -> str:
    if not isinstance(name, str):
        raise ValueError(f"{name!r} must be a word; put it in quotes")
    _check_text(name)
    return name


def _told(name: Any, value: Any) -> str | int | float:
    """An attribute's value as the model is told it."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple) and not any(isinstance(item, list | tuple) for item in value):
        return ", ".join(str(_told(name, item)) for item in value)
    if isinstance(value, str):
        _check_text(value)
        return value
    if isinstance(value, int) or (isinstance(value, float) and math.isfinite(value)):
        return value
    raise ValueError(f"{name!r} is {value!r}; write words, a number, yes or no, a list of these, or leave it out")


def _user(path: str | Path, number: int, entry: Any) -> ServedUser:
    name = entry.get("name", f"number {number + 1}") if isinstance(entry, Mapping) else f"number {number + 1}"
    if isinstance(entry, Mapping) and (empty := [field for field, value in entry.items() if value is None]):
        raise UsersError(f"{path}: user {name!r}, field {empty[0]!r}: it is empty; leave it out, or {_QUOTE}")
    try:
        return ServedUser.model_validate(entry)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        known = f"; known fields: {', '.join(ServedUser.model_fields)}" if first["type"] == "extra_forbidden" else ""
        message = first["msg"].removeprefix("Value error, ")
        raise UsersError(f"{path}: user {name!r}{f', field {where!r}' if where else ''}: {message}{known}") from error


class _Loader(yaml.SafeLoader):
    """YAML in which words stay words (no, off, 12:30, 0123, 2026-05-01), and a key that is there twice is refused."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        lines: dict[tuple[str, str], int] = {}
        for key, _ in node.value:
            line = key.start_mark.line + 1
            if isinstance(key, yaml.ScalarNode):
                if before := lines.get((key.tag, key.value)):
                    raise UsersError(f"line {line}: {key.value!r} is there already, in line {before}; keep one")
                lines[key.tag, key.value] = line
        return node

    def compose_scalar_node(self, anchor: Any) -> yaml.ScalarNode:
        node = super().compose_scalar_node(anchor)
        try:
            _check_text(node.value)
        except ValueError as error:
            raise UsersError(f"line {node.start_mark.line + 1}: {error}") from error
        return node


_Loader.yaml_implicit_resolvers = {}
for _tag, _form, _first in (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"-?(0|[1-9][0-9]*)", list("-0123456789")),
    ("float", r"-?(0|[1-9][0-9]*)?\.[0-9]+([eE][-+]?[0-9]+)?|-?\.(inf|nan)", list("-.0123456789")),
    ("merge", r"<<", ["<"]),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(rf"(?:{_form})\Z"), _first)
