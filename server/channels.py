"""Who is asked for, and with which traits: the channels that a harness may have to say so (item 1.5.9).

A model id is ``NAME[@TRAITS][=TRIAL]``, such as ``steered-user@impatience-high+skeptical-0.5=2``. Traits are taken from
the first of: the body (``traits``, ``trait_dict``, ``trait``, also inside ``extra_body``), the header ``X-Traits``, the
path ``/u/<traits or NAME[@TRAITS]>/v1/…``, the model id; else they are the served user's own. The path's user wins over
the model id's, whose name may then be anything: some harnesses do not let one choose it.

Whether they are served beyond their limits (``force``) is taken from the body, the header ``X-TraitBasis-Force``, the
served user; not from names, which are written down once and then forgotten.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import Depends, Path, Request

from traitbasis.errors import RequestError, TraitBasisError, TraitSpecError, UsersError
from traitbasis.simulator import UserSimulator
from traitbasis.spec import Traits, parse_traits
from traitbasis.users import DEFAULT_USER, ServedUser, check_users

from .errors import UnknownModelError
from .schemas import Steerable


def _spec(spec: Annotated[str, Path(description="traits, or a user's name", examples=["impatience-high"])]) -> None:
    pass


# Of a route under ``/u/{spec}``: declares the parameter for the OpenAPI document; ``Directory.asked`` reads it.
IN_PATH = [Depends(_spec)]


@dataclass(frozen=True)
class Asked:
    """traits, force: None means the user's own. trial: as the request gave it, 0 when it did not."""

    user: ServedUser
    traits: Traits
    trial: int | str
    force: bool | None


class Directory:
    """The users of one server, by name. The default user is there unless a user of that name takes its place.

    Raises UsersError for users that cannot be told apart, or of whom no turn can be had from this simulator.
    """

    def __init__(self, simulator: UserSimulator, users: Sequence[ServedUser] = ()) -> None:
        self._traits = simulator.basis.traits
        self._steerable = [column.trait for column in simulator.basis.columns if column.steerable]
        self._aliases = {alias: column.trait for column in simulator.basis.columns for alias in column.aliases}
        check_users(users, self._traits, self._aliases)
        for user in users:
            _check_turn(simulator, user)
        self.users = {user.name: user for user in (DEFAULT_USER, *users)}

    @property
    def ids(self) -> list[str]:
        """Model ids to choose from."""
        examples = [f"{DEFAULT_USER.name}@{trait}-medium" for trait in self._steerable]
        return [DEFAULT_USER.name, *examples, *(name for name in self.users if name != DEFAULT_USER.name)]

    def find(self, model: str) -> tuple[ServedUser, Traits, str | None]:
        """User, traits and trial of a model id. Raises UnknownModelError."""
        rest, _, trial = model.partition("=")
        name, at, spec = rest.partition("@")
        if name not in self.users:
            raise UnknownModelError(
                f"model {model!r} is not served here; use {', '.join(map(repr, self.users))}, or add traits: "
                f"{DEFAULT_USER.name}@impatience-high+skeptical-0.5"
            )
        return self.users[name], spec if at else None, trial or None

    def asked(self, body: Steerable, request: Request, model: str | None = None) -> Asked:
        """What a request asks for. model: its id; None where the protocol has none."""
        path = request.path_params.get("spec")
        user, of_model, trial = self._of_model(model, anything=path is not None)
        of_path: Traits = None
        if path is not None:
            if path.partition("@")[0].partition("=")[0] in self.users:
                user, of_path, trial_of_path = self.find(path)
            else:
                spec, _, trial_of_path = path.partition("=")
                of_path = self._as_traits(spec)
            trial = trial_of_path or trial
        channels = (*body.traits_of_body(), _header(request), of_path, of_model)
        traits = next((said for said in channels if said is not None), None)
        force = next((said for said in (*body.force_of_body(), _force(request)) if said is not None), None)
        return Asked(
            user, traits, next((t for t in (body.trial, request.headers.get("x-trial"), trial) if t), 0), force
        )

    def _as_traits(self, segment: str) -> str:
        try:
            parse_traits(segment, self._traits, self._aliases)
        except TraitSpecError as error:
            users = ", ".join(map(repr, self.users))
            raise TraitSpecError(f"/u/{segment}/ names no user ({users}) and no traits: {error}") from error
        return segment

    def _of_model(self, model: str | None, anything: bool) -> tuple[ServedUser, Traits, str | None]:
        default = self.users[DEFAULT_USER.name], None, None
        if model is None:
            return default
        try:
            return self.find(model)
        except UnknownModelError:
            if anything:
                return default
            raise


def _check_turn(simulator: UserSimulator, user: ServedUser) -> None:
    """Raises UsersError when every turn of this user would be refused."""
    try:
        request = simulator.prepare([{"role": "user", "content": "Hi!"}], user=user).request
    except TraitBasisError as error:
        raise UsersError(f"user {user.name!r}: {error}") from error
    # What the engine would refuse.
    tokens, most = len(request.prompt_ids), simulator.engine.stats().max_context
    if most is not None and tokens >= most:
        raise UsersError(f"user {user.name!r}: with the persona a prompt has {tokens} tokens; the context is {most}")
    if bad := [token for token in request.sampling.logit_bias if token >= simulator.lm.vocabulary]:
        known = f"ids are 0 to {simulator.lm.vocabulary - 1}"
        raise UsersError(f"user {user.name!r}, field 'sampling': logit_bias has token {bad[0]}; {known}")


def _header(request: Request) -> Traits:
    value = request.headers.get("x-traits")
    if value is None or not value.strip():  # templates and proxies send it empty
        return None
    if not value.lstrip().startswith("{"):
        return value
    try:
        mapping: Any = json.loads(value)
    except (ValueError, RecursionError) as error:
        raise TraitSpecError(f"X-Traits is neither a trait spec nor a JSON object: {value!r:.200}") from error
    return dict(mapping)


def _force(request: Request) -> bool | None:
    value = request.headers.get("x-traitbasis-force", "").strip().casefold()
    if value not in ("", "true", "false"):
        raise RequestError(f"X-TraitBasis-Force is {value!r:.200}; it must be true or false")
    return value == "true" if value else None
