"""Customers that react: the ``traitbasis`` field of a request, and their state between two requests.

The state goes out as a signed token that the client echoes, or is kept under the name of a session.

The server keeps nothing that it needs: a state is a fold over the conversation, so a client that sends neither gets a
customer that reacts all the same. What a token adds is what the messages do not show, such as results of the agent's
tools, and that nothing is folded twice. A client can read a token (it is base64), and cannot change one.
"""

from __future__ import annotations

import json
import os
import secrets
import tempfile
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

from itsdangerous import BadSignature, URLSafeSerializer

from traitbasis.embedded import cache_folder
from traitbasis.errors import ReactionError, RequestError
from traitbasis.reactive.reactor import CustomerState, Reaction, Reactive
from traitbasis.users import ServedUser

KEY_VARIABLE = "TRAITBASIS_STATE_KEY"
MAX_TOKEN = 200_000  # characters
_LONGEST_NAME = 200


# What a client may send that only says how its state travels.
_TRAVELS = ("state", "session", "tool_results")
# Of the field in our replies, which a client may echo whole.
_OF_REPLIES = frozenset(
    """user traits spec dose share_of_limit forced seed sampling tries rejected failed_guard plain dropped positions
    model model_fingerprint basis as dtype engine versions reaction choices""".split()  # noqa: SIM905
)


@dataclass(frozen=True)
class Felt:
    """What a request's ``traitbasis`` field asks for. options: of ``UserSimulator.prepare``. session: its name."""

    options: Mapping[str, Any]
    session: tuple[str, str] | None = None


class States:
    """Tokens signed with `key`, and the states of named sessions, the least recently used of which are forgotten."""

    def __init__(self, key: str, sessions: int = 10_000) -> None:
        self._signer = URLSafeSerializer(key, salt="traitbasis.state/1")
        self._most = sessions
        self._sessions: OrderedDict[tuple[str, str], str] = OrderedDict()
        self._lock = Lock()

    def asked(self, field: Any, user: ServedUser, client: str = "") -> Felt:
        """What a request's ``traitbasis`` field asks for, of a served user.

        Fields of ``Reactive`` hold over those of the token, and these over the user's own. client: who asks, so that
        two of them may call a session alike. Raises RequestError that names the field.
        """
        if field is None:
            return Felt({})
        if not isinstance(field, Mapping):
            raise RequestError(
                f"traitbasis is {field!r:.80}; it must be an object, such as {{'condition': 'frustration'}}"
            )
        name = field.get("session")
        session = None if name is None else (client, _name(name))
        known = self._read(field.get("state"), session)
        sent = {key: value for key, value in field.items() if key not in _TRAVELS and key not in _OF_REPLIES}
        own = user.reactive.model_dump(exclude_unset=True) if user.reactive else {}
        try:
            asked = {**own, **known.get("how", {}), **{key: value for key, value in sent.items() if value is not None}}
            how = Reactive.read(asked) if asked else None
            state = CustomerState.from_record(known["state"]) if known.get("state") else None
        except ReactionError as error:
            raise RequestError(f"traitbasis.{error}") from error
        return Felt({"reactive": how, "state": state, "tool_results": _texts(field.get("tool_results"))}, session)

    def _read(self, token: Any, session: tuple[str, str] | None) -> dict[str, Any]:
        """The record in a token, else of a session; empty where there is none (yet)."""
        if token is None and session is not None:
            with self._lock:
                token = self._sessions.get(session)
        if token is None:
            return {}
        if not isinstance(token, str) or len(token) > MAX_TOKEN:
            raise RequestError(
                f"traitbasis.state is no state token: {token!r:.80}; send the last reply's, or leave it out"
            )
        try:
            record: dict[str, Any] = self._signer.loads(token)
        except BadSignature as error:
            raise RequestError(
                "traitbasis.state was changed, or signed with another key; send the last reply's as it came, or leave "
                f"it out (servers that share an endpoint need one {KEY_VARIABLE})"
            ) from error
        return record

    def told(self, reaction: Reaction | None, felt: Felt) -> dict[str, str]:
        """What a reply says for the next request; the session keeps it, too, where there is one."""
        if reaction is None:
            return {}
        how = reaction.how.model_dump(mode="json", exclude_unset=True)
        token = self._signer.dumps({"how": how, "state": reaction.state.record})
        text = token if isinstance(token, str) else token.decode()
        if felt.session is not None:
            with self._lock:
                self._sessions[felt.session] = text
                self._sessions.move_to_end(felt.session)
                while len(self._sessions) > self._most:
                    self._sessions.popitem(last=False)
        return {"state": text}


def state_key(environment: Mapping[str, str] = os.environ) -> str:
    """What tokens are signed with: the variable's, else one of this machine's own, so that restarts end no episode."""
    if given := environment.get(KEY_VARIABLE):
        return given
    path = cache_folder() / "state.key"
    with suppress(OSError):
        return path.read_text(encoding="ascii")
    return _new_key(path)


def _new_key(path: Path) -> str:
    key = secrets.token_urlsafe(32)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, encoding="ascii") as part:  # nobody else may read it
            part.write(key)
            part.flush()
            with suppress(FileExistsError):  # of two servers that start together one makes it, and both have its key
                os.link(part.name, path)
        return path.read_text(encoding="ascii")
    except OSError:  # a file system that cannot be written to: the key lives as long as the server
        return key


def _name(session: Any) -> str:
    if not isinstance(session, str) or not 0 < len(session) <= _LONGEST_NAME:
        raise RequestError(
            f"traitbasis.session is {session!r:.80}; it must be a name of at most {_LONGEST_NAME} characters"
        )
    return session


def _texts(results: Any) -> Sequence[str]:
    """Results of tools, which some clients have as objects."""
    if results is None:
        return ()
    if not isinstance(results, list):
        raise RequestError(f"traitbasis.tool_results is {results!r:.80}; it must be a list of texts or objects")
    return [result if isinstance(result, str) else json.dumps(result, ensure_ascii=False) for result in results]
