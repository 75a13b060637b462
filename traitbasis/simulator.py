"""The user simulator: conversation + traits -> the customer's next message.

Everything flows down from here: messages become a prompt (``chat.py``), traits become additions (``basis.py``), an
engine generates, guards judge the result. No HTTP. One simulator serves many callers at once: it holds no conversation.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from importlib.metadata import version
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from traitbasis.basis import Basis, find_basis
from traitbasis.chat import As, Turn, check_choice, read_messages, render_prompt, tokenize
from traitbasis.engines.base import (
    Collector,
    Engine,
    Event,
    Failure,
    Finish,
    Generation,
    Positions,
    Request,
    Sampling,
    Ticket,
    TokenLogprob,
    as_engine_error,
)
from traitbasis.engines.transformers import TransformersEngine
from traitbasis.errors import EngineError, RequestError, TraitSpecError
from traitbasis.guards import GUARDS, Guard, failed_guard
from traitbasis.model import LanguageModel, load_model
from traitbasis.spec import Traits, format_traits

# Stands in for a harness's instruction when a conversation has no system message.
DEFAULT_INSTRUCTION = "You are a customer talking to a support agent. Write the customer's next message."
# What goes out, marked, when every try was rejected and none may be sent: a user who says nothing, never an empty text.
SILENCE = "..."
MAX_TRIES = 4
# Keeps arithmetic finite, no more: what a trait bears on a model is a matter of calibration.
MAX_DOSE = 10.0
_RETRY_TEMPERATURE = 0.7  # a rejected greedy turn would only be drawn again


@dataclass(frozen=True)
class UserTurn:
    """One message of the simulated user, and what made it (contract 11).

    intensities: what was asked for, off traits left out. dose: of the composed addition. seed: with it the same request
    gets this turn again. sampling: as this text was drawn; after a rejection a greedy draw gets a temperature.
    tries: generations it took.
    rejected: how many were rejected, by guard. failed_guard: set when tries ran out and the text fails that guard.
    token_ids: as generated, the one that ended the turn included. logprobs: one a token, where asked for.
    """

    text: str
    finish: Finish
    intensities: dict[str, float]
    dose: float
    seed: int
    sampling: Sampling
    prompt_tokens: int
    completion_tokens: int
    tries: int = 1
    rejected: dict[str, int] = field(default_factory=dict)
    failed_guard: str | None = None
    positions: Positions = "generated"
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, eq=False)
class PreparedTurn:
    """A checked request for one user turn, ready for the engine."""

    request: Request
    intensities: dict[str, float]
    dose: float
    seed: int


# Told, from the engine's thread: pieces of text, then the whole turn or a failure.
TurnListener = Callable[[str | UserTurn | Failure], None]


class UserSimulator:
    """Writes user turns with steered traits.

        user = UserSimulator("smollm2-135m-instruct")
        messages = [
            {"role": "system", "content": "You are a customer. Your order #W100 is late; you want a refund."},
            {"role": "user", "content": "Hi! How can I help you today?"},  # the agent speaks as "user"
        ]
        print(user.reply(messages, traits={"impatience": "high", "skeptical": 0.5}, seed=7))

    model: a LanguageModel or what ``load_model`` takes. basis: a Basis, a path, or None for the model's own.
    as_: header the customer's turns stand under; by default what the basis was extracted with.
    sampling: defaults of every turn. guards: see ``guards.py``; without any, text is passed on as it is generated.
    """

    def __init__(
        self,
        model: LanguageModel | str | Path,
        basis: Basis | str | Path | None = None,
        *,
        as_: As | None = None,
        engine: Engine | None = None,
        sampling: Sampling | None = None,
        guards: Sequence[Guard] = GUARDS,
    ) -> None:
        self.lm = model if isinstance(model, LanguageModel) else load_model(str(model))
        if isinstance(basis, Basis):
            basis.check_model(self.lm)
            self.basis = basis
        else:
            self.basis = find_basis(self.lm, basis)
        self.as_: As = self.basis.as_ if as_ is None else as_
        check_choice("as_", self.as_, As)
        self.sampling = sampling or Sampling()
        self.guards = tuple(guards)
        self.engine = engine or TransformersEngine(self.lm)
        self._stop_ids = self.lm.stop_ids(self.as_)

    def reply(
        self,
        messages: Sequence[Mapping[str, Any]],
        traits: Traits = None,
        *,
        seed: int | None = None,
        trial: int | str = 0,
        positions: Positions = "generated",
        **sampling: Any,
    ) -> UserTurn:
        """The user's next message.

        messages: the conversation as a harness sends it, ``assistant`` being the simulated user and ``user`` the agent.
        traits: a spec (``"impatience-high+skeptical-0.5"``) or a mapping; none means unsteered. seed: the same request
        with the same seed gets the same reply; by default one is derived from the request, and `trial` varies that.
        positions: ``generated`` keeps the past clean, ``all`` steers the prompt too, as the paper's plain form.
        sampling: fields of ``Sampling`` that differ from the simulator's defaults.
        Raises RequestError, TraitSpecError, ChatTemplateError for what was asked, EngineError for what went wrong.
        """
        *_, turn = self._events(self.prepare(messages, traits, seed=seed, trial=trial, positions=positions, **sampling))
        assert isinstance(turn, UserTurn)
        return turn

    def stream(self, messages: Sequence[Mapping[str, Any]], traits: Traits = None, **options: Any) -> Iterator[str]:
        """Like ``reply``, in pieces of text. With guards, the pieces come once the turn has passed them."""
        for piece in self._events(self.prepare(messages, traits, **options)):
            if isinstance(piece, str):
                yield piece

    def prepare(
        self,
        messages: Sequence[Mapping[str, Any]],
        traits: Traits = None,
        *,
        seed: int | None = None,
        trial: int | str = 0,
        choice: int = 0,
        positions: Positions = "generated",
        **sampling: Any,
    ) -> PreparedTurn:
        """Check a request and render its prompt, without generating. Arguments and errors as for ``reply``.

        choice: which of several replies to one request and seed this is.
        """
        if not isinstance(trial, int | str):
            raise RequestError(f"trial must be a whole number or a text, not {trial!r}")
        intensities = self.basis.parse(traits)
        drawn = _changed(self.sampling, sampling)
        turns = read_messages(messages)
        if not turns or turns[0].speaker != "system":
            turns.insert(0, Turn("system", DEFAULT_INSTRUCTION))
        spoken = [[turn.speaker, turn.text] for turn in turns]
        if seed is None:
            how = {name: value for name, value in asdict(drawn).items() if name != "logprobs"}  # reports, draws nothing
            what = [self.lm.fingerprint, self.basis.fingerprint, intensities, spoken, how, positions, trial]
            seed = _digest_seed(what)
        if not isinstance(seed, int):
            raise RequestError(f"seed must be a whole number, not {seed!r}")
        dose = self.basis.dose(intensities)
        if not dose <= MAX_DOSE:
            raise TraitSpecError(
                f"{format_traits(intensities)} adds {dose:.3g} times the size of a hidden state; at most {MAX_DOSE:g} "
                "is taken, and text falls apart long before that"
            )
        prompt = render_prompt(self.lm.tokenizer, turns, self.as_)
        request = Request(
            prompt_ids=tuple(tokenize(self.lm.tokenizer, prompt)),
            # Harnesses send one seed with every turn of an episode; turns that draw alike would repeat each other.
            seed=_digest_seed([seed, spoken, choice] if choice else [seed, spoken]),
            sampling=drawn,
            stop_ids=self._stop_ids,
            additions=self.basis.additions(intensities),
            positions=positions,
        )
        return PreparedTurn(request, intensities, dose, seed)

    def submit(self, prepared: PreparedTurn, listener: TurnListener) -> Ticket:
        """Generate a prepared turn; `listener` gets pieces of text and at last a UserTurn or a Failure.

        The listener is called from the engine's thread and must not block. Raises EngineBusyError, EngineError.
        """
        return _Tries(self.engine, self.guards, prepared, listener)

    @property
    def provenance(self) -> dict[str, Any]:
        """What every turn of this simulator was made with (contract 11)."""
        return {
            "model": self.lm.name,
            "model_fingerprint": self.lm.fingerprint,
            "basis": self.basis.fingerprint,
            "as": self.as_,
            "dtype": self.lm.dtype_name,
            "engine": type(self.engine).__name__,
            "versions": {name: version(name) for name in ("traitbasis", "transformers", "torch")},
        }

    def close(self) -> None:
        """Stop the engine."""
        self.engine.close()

    def __enter__(self) -> UserSimulator:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _events(self, prepared: PreparedTurn) -> Iterator[str | UserTurn]:
        queue: SimpleQueue[str | UserTurn | Failure] = SimpleQueue()
        ticket = self.submit(prepared, queue.put)
        try:
            while True:
                item = queue.get()
                if isinstance(item, Failure):
                    raise as_engine_error(item)
                yield item
                if isinstance(item, UserTurn):
                    return
        finally:
            ticket.cancel()  # nothing to cancel when it ended


class _Tries:
    """Generations of one user turn until the guards accept one or tries run out."""

    def __init__(self, engine: Engine, guards: Sequence[Guard], prepared: PreparedTurn, listener: TurnListener) -> None:
        self._engine = engine
        self._guards = guards
        self._prepared = prepared
        self._listener = listener
        self._cancelled = False
        self._tries = 0
        self._rejected: Counter[str] = Counter()
        self._best: tuple[Generation, str, Request] | None = None
        self._ticket: Ticket | None = None
        self._next_try()

    def cancel(self) -> None:
        self._cancelled = True
        if self._ticket:
            self._ticket.cancel()

    def _next_try(self) -> None:
        request = self._prepared.request
        if self._tries:
            seed = _digest_seed([request.seed, self._tries])
            hotter = max(request.sampling.temperature, _RETRY_TEMPERATURE)
            request = replace(request, seed=seed, sampling=replace(request.sampling, temperature=hotter))
        self._tries += 1
        self._request = request
        number = self._tries
        self._collector = Collector()
        self._live = LiveText() if not self._guards else None
        ticket = self._engine.submit(request, self._on_event)
        if number == self._tries:  # else it has ended already, and the next try has set its own
            self._ticket = ticket
            if self._cancelled:  # while this try was being queued
                ticket.cancel()

    def _on_event(self, event: Event | Failure) -> None:
        if isinstance(event, Failure):
            self._listener(event)
            return
        if self._live and (piece := self._live.push(event.text)):
            self._listener(piece)
        generation = self._collector.add(event)
        if generation is None:
            return
        try:
            guard = failed_guard(generation.text.strip(), self._guards)
        except Exception as error:  # a guard's own mistake must not leave the caller waiting
            self._listener(Failure(error))
            return
        if guard is None:
            self._deliver(generation, None)
            return
        if generation.finish == "cancelled":
            self._deliver(replace(generation, text=SILENCE), guard.name)
            return
        self._rejected[guard.name] += 1
        if guard.sendable and self._best is None:
            self._best = generation, guard.name, self._request
        if self._tries < MAX_TRIES and not self._cancelled:
            try:
                self._next_try()
                return
            except EngineError as error:  # no room either: what is sent must not depend on the load (contract 9)
                self._listener(Failure(error))
                return
        best, name, self._request = self._best or (replace(generation, text=SILENCE), guard.name, self._request)
        self._deliver(best, name)

    def _deliver(self, generation: Generation, failed: str | None) -> None:
        text = generation.text.strip()
        if not self._live:
            for piece in re.findall(r"\s*\S+", text):
                self._listener(piece)
        self._listener(
            UserTurn(
                text=text,
                finish=generation.finish,
                intensities=self._prepared.intensities,
                dose=self._prepared.dose,
                seed=self._prepared.seed,
                sampling=self._request.sampling,
                prompt_tokens=len(self._prepared.request.prompt_ids),
                completion_tokens=len(generation.token_ids),
                tries=self._tries,
                rejected=dict(self._rejected),
                failed_guard=failed,
                positions=self._request.positions,
                token_ids=generation.token_ids,
                logprobs=generation.logprobs,
            )
        )


class LiveText:
    """Text passed on as it comes, without the white space around the whole."""

    def __init__(self) -> None:
        self._held = ""
        self._begun = False

    def push(self, text: str) -> str:
        """What can be passed on now."""
        text = self._held + text
        if not self._begun:
            text = text.lstrip()
            self._begun = bool(text)
        ready = text.rstrip()
        self._held = text[len(ready) :]
        return ready


def _changed(sampling: Sampling, changes: Mapping[str, Any]) -> Sampling:
    known = [field.name for field in fields(Sampling)]
    for name in changes:
        if name not in known:
            raise RequestError(f"unknown sampling field {name!r}; known: {', '.join(known)}")
    return replace(sampling, **changes)


def _digest_seed(what: Any) -> int:
    """A seed below 2**63 from any JSON value."""
    digest = hashlib.sha256(json.dumps(what, sort_keys=True, ensure_ascii=True, default=list).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
