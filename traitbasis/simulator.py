"""The user simulator: conversation + traits -> the customer's next message, or tool call.

Everything flows down from here: messages become a prompt (``chat.py``), traits become additions (``basis.py``), an
engine generates, guards judge the result. No HTTP. One simulator serves many callers at once: it holds no conversation.

Not everything a harness asks of its user's model is a user's turn. Judge prompts and requested JSON are answered by the
plain model: as its assistant, unsteered, and with no guards but those against text that may never go out (contract 10).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, fields, replace
from functools import partial
from importlib.metadata import version
from math import floor, inf, log10
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from traitbasis.basis import MAX_DOSE, Basis, find_basis
from traitbasis.chat import (
    As,
    Turn,
    check_characters,
    check_choice,
    read_messages,
    render_prompt,
    reply_header,
    tokenize,
)
from traitbasis.context import fit
from traitbasis.engines.base import (
    Engine,
    Failure,
    Guide,
    Positions,
    Request,
    Sampling,
    Ticket,
    as_engine_error,
)
from traitbasis.engines.transformers import TransformersEngine
from traitbasis.errors import OverLimitError, RequestError, TraitSpecError
from traitbasis.grammar import json_grammar
from traitbasis.guards import GUARDS, Conversation, Guard, named_stop_tokens
from traitbasis.model import LanguageModel, load_model
from traitbasis.prompts import asked_json, is_turn_schema, judge_prompt, without_directions
from traitbasis.reactive.reactor import CustomerState, Reaction, Reactive, react
from traitbasis.spec import Traits, format_traits
from traitbasis.tools import read_tools, tool_format
from traitbasis.tries import PreparedTurn, Said, Tries, TurnListener, UserTurn, digest_seed
from traitbasis.users import DEFAULT_USER, ServedUser

# Stands in for a harness's instruction when a conversation has no system message.
DEFAULT_INSTRUCTION = "You are a customer talking to a support agent. Write the customer's next message."
# A level that was calibrated to stand at the limit must not be refused for the rounding of float32.
_FULL = 1 + 1e-5


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

    def reply(
        self,
        messages: Sequence[Mapping[str, Any]],
        traits: Traits = None,
        *,
        seed: int | None = None,
        trial: int | str = 0,
        **options: Any,
    ) -> UserTurn:
        """The user's next message. `options` as for ``prepare``.

        messages: the conversation as a harness sends it, ``assistant`` being the simulated user and ``user`` the agent.
        traits: a spec (``"impatience-high+skeptical-0.5"``) or a mapping; none means the served user's own, which the
        default user has none of, and ``{}`` unsteered. seed: the same request with the same seed gets the same reply;
        by default one is derived from the request, and `trial` varies that.
        Raises RequestError, TraitSpecError, ChatTemplateError for what was asked, EngineError for what went wrong.
        """
        *_, turn = self._events(self.prepare(messages, traits, seed=seed, trial=trial, **options))
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
        user: ServedUser = DEFAULT_USER,
        seed: int | None = None,
        trial: int | str = 0,
        choice: int = 0,
        positions: Positions = "generated",
        force: bool | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: Any = None,
        response_format: Mapping[str, Any] | None = None,
        reactive: Reactive | None = None,
        state: CustomerState | None = None,
        tool_results: Sequence[str] = (),
        **sampling: Any,
    ) -> PreparedTurn:
        """Check a request and render its prompt, without generating. Other arguments and errors as for ``reply``.

        user: whose turn it is. choice: which of several replies to one request and seed this is. positions:
        ``generated`` keeps the past clean, ``all`` steers the prompt too, as the paper's plain form. force: serve
        traits beyond their damage limit and those that are not steerable on this model (OverLimitError otherwise);
        None means as the served user says, whose default is no. It changes nothing else, not even the seed. tools,
        tool_choice: in OpenAI's form, the user's own tools; the turn is then text or a call. response_format: in
        OpenAI's form; ``json_object`` and ``json_schema`` get JSON of that schema. reactive, state, tool_results: how
        the customer feels and reacts, by default as the served user does; see ``reactive/reactor.py``. sampling: fields
        of ``Sampling`` that differ from the user's and the simulator's.
        """
        known_tools = read_tools(tools, tool_choice)
        schema, structured = _schema(response_format)
        if known_tools and structured:
            raise RequestError("tools and a JSON response_format cannot be had in one request; leave one out")
        turns = without_directions(read_messages(messages, tools=known_tools is not None))
        judge = judge_prompt(turns)
        plain = f"judge prompt of {judge}" if judge else "response_format" if structured else None
        if not structured and not known_tools and (schema := asked_json(turns)):
            structured, plain = True, plain or "JSON asked for in the prompt"
        asked = user.traits if traits is None else traits
        intensities = self.basis.parse({} if judge or (structured and not is_turn_schema(schema)) else asked)
        self.basis.parse(asked)  # a misspelt trait is told even where it is not used
        forced = user.force if force is None else force
        reaction = None
        if plain is None and (how := reactive or user.reactive):
            reaction = react(turns, how, state, tool_results=tool_results)
            intensities = self._felt(intensities, reaction, forced)
        load = self._load(intensities, forced)
        drawn = _changed(_changed(self.sampling, user.sampling), sampling)
        if plain is None:
            turns = _instructed(turns, user, reaction)
        spoken = [[turn.speaker, turn.text, *([call.name, call.arguments] for call in turn.calls)] for turn in turns]
        check_choice("positions", positions, Positions)
        more = [tools, tool_choice] if known_tools else [response_format] if structured else []
        seed = self._seed(seed, trial, [intensities, spoken, drawn, positions, *more])
        if structured or (known_tools and known_tools.must_call):
            drawn = replace(drawn, stop=())  # which would cut it in the middle; it ends by itself
        as_: As = "assistant"
        if plain is None:
            as_ = reply_header(self.lm.tokenizer, self.as_, known_tools.declared) if known_tools else self.as_
        declared = known_tools.declared if known_tools else ()

        def prompt(kept: Sequence[Turn]) -> tuple[int, ...]:
            return tuple(tokenize(self.lm.tokenizer, render_prompt(self.lm.tokenizer, kept, as_, declared)))

        limit = self.engine.stats().max_context if user.context == "truncate" else None
        prompt_ids, dropped = fit(turns, prompt, limit, drawn.max_tokens)
        stop_ids = self.lm.stop_ids(as_)
        guide: Callable[[], Guide] | None = None
        shown, reader = frozenset[int](), None
        if structured:
            guide = partial(json_grammar(self.lm.tokenizer, schema).guide, stop_ids, silent=not intensities)
        if known_tools:
            form = tool_format(self.lm.tokenizer)
            guide, shown = form.guide(self.lm.tokenizer, known_tools), form.shown_ids(self.lm.tokenizer)
            reader = partial(form.parse, tools=known_tools)
        request = Request(
            prompt_ids=prompt_ids,
            # Harnesses send one seed with every turn of an episode; turns that draw alike would repeat each other.
            seed=digest_seed([seed, spoken, choice] if choice else [seed, spoken]),
            sampling=drawn,
            stop_ids=stop_ids,
            additions=self.basis.additions(intensities),
            positions=positions,
            guide=guide,
            shown_ids=shown,
        )
        return PreparedTurn(
            request,
            intensities,
            seed=seed,
            **load,
            guards=self._guards_for(user, plain, structured),
            conversation=_conversation(turns, user),
            read=reader,
            user=user.name,
            plain=plain,
            as_=as_,
            dropped=dropped,
            json=structured,
            must_call=bool(known_tools and known_tools.must_call),
            reaction=reaction,
        )

    def prepare_text(
        self,
        prompt: str | Sequence[int],
        traits: Traits = None,
        *,
        user: ServedUser = DEFAULT_USER,
        seed: int | None = None,
        trial: int | str = 0,
        choice: int = 0,
        positions: Positions = "generated",
        force: bool | None = None,
        prompt_logprobs: int | None = None,
        **sampling: Any,
    ) -> PreparedTurn:
        """A text to go on with, as it stands or as token ids: no chat template, no guards. Otherwise as ``prepare``."""
        if isinstance(prompt, str):
            check_characters("prompt", prompt)
        ids = list(self.lm.tokenizer(prompt)["input_ids"]) if isinstance(prompt, str) else list(prompt)
        intensities = self.basis.parse(user.traits if traits is None else traits)
        load = self._load(intensities, user.force if force is None else force)
        drawn = _changed(_changed(self.sampling, user.sampling), sampling)
        seed = self._seed(seed, trial, [intensities, ids, drawn, positions])
        request = Request(
            prompt_ids=tuple(ids),
            seed=digest_seed([seed, ids, choice] if choice else [seed, ids]),
            sampling=drawn,
            stop_ids=self.lm.stop_ids(self.as_),
            additions=self.basis.additions(intensities),
            positions=positions,
            prompt_logprobs=prompt_logprobs,
        )
        return PreparedTurn(request, intensities, seed=seed, user=user.name, plain="completion", verbatim=True, **load)

    def _seed(self, seed: int | None, trial: int | str, what: list[Any]) -> int:
        if not isinstance(trial, int | str):
            raise RequestError(f"trial must be a whole number or a text, not {trial!r}")
        if seed is None:
            intensities, said, drawn, positions, *more = what
            how = {name: value for name, value in asdict(drawn).items() if name != "logprobs"}  # reports, draws nothing
            return digest_seed(
                [self.lm.fingerprint, self.basis.fingerprint, intensities, said, how, positions, trial, *more]
            )
        if not isinstance(seed, int):
            raise RequestError(f"seed must be a whole number, not {seed!r}")
        return seed

    def _load(self, intensities: Mapping[str, float], force: bool) -> dict[str, Any]:
        """Fields of a turn that say how much is added. Raises TraitSpecError when that is too much."""
        if not isinstance(force, bool):
            raise RequestError(f"force is {force!r:.200}; it must be true or false")
        dose = self.basis.dose(intensities)
        if not dose <= MAX_DOSE:
            raise TraitSpecError(
                f"{format_traits(intensities)} adds {dose:.3g} times the size of a hidden state; at most {MAX_DOSE:g} "
                "is taken, and text falls apart long before that"
            )
        problem = self._over_limit(intensities)
        if problem and not force:
            raise OverLimitError(problem)
        return {"dose": dose, "share": self.basis.known_share(intensities), "forced": bool(problem)}

    def _felt(self, intensities: Mapping[str, float], reaction: Reaction, forced: bool) -> dict[str, float]:
        """Intensities as the customer's state has them; what is scaled up stays within the damage limit."""
        felt = dict(intensities)
        for trait, intensity in self.basis.parse(reaction.traits).items():
            felt[trait] = felt.get(trait, 0.0) + intensity
        scale = reaction.scale
        share = self.basis.known_share(felt)
        if scale > 1 and share and not forced:
            scale = max(1.0, min(scale, 1 / share))
        return {trait: intensity * scale for trait, intensity in felt.items() if intensity * scale}

    def _over_limit(self, intensities: Mapping[str, float]) -> str | None:
        """Why these traits are served only when forced, if they are."""
        spec, way_out = format_traits(intensities), "`force: true` serves it all the same"
        if stiff := [c.trait for c in self.basis.columns if not c.steerable and intensities.get(c.trait)]:
            return (
                f"{spec} asks for what is not steerable on {self.lm.name}, by its screening: {', '.join(stiff)}; "
                f"leave it out, or {way_out}"
            )
        share = self.basis.load_share(intensities)
        if share <= _FULL:
            return None
        loads = self.basis.loads(intensities)
        digits = _digits_apart((share, 1.0), *((load.dose, load.limit) for load in loads))
        doses = " and ".join(
            f"{load.dose:.{digits}g} at layer {load.layer} "
            f"({f'limit {load.limit:.{digits}g}' if load.limit < inf else 'no limit'})"
            for load in loads
        )
        return (
            f"{spec} is a dose of {doses}: {share:.{digits}g} times what {self.lm.name} was found to bear before its "
            f"text is damaged; multiply each intensity by {_rounded_down(1 / share):.3g} at most, or {way_out}"
        )

    def _guards_for(self, user: ServedUser, plain: str | None, structured: bool) -> tuple[Guard, ...]:
        if structured:  # the grammar says what may be sent, and half of it would not parse
            return ()
        return self.guards_of(user) if plain is None else tuple(guard for guard in self.guards if not guard.sendable)

    def guards_of(self, user: ServedUser) -> tuple[Guard, ...]:
        """The guards that judge a served user's turns, worst harm first."""
        chosen = {guard.name: guard for guard in self.guards}
        known = {guard.name: guard for guard in GUARDS}
        for name, on in user.guards.items():
            if on:
                chosen.setdefault(name, known[name])
            else:
                chosen.pop(name, None)
        order = [*known, *chosen]
        return tuple(sorted(chosen.values(), key=lambda guard: order.index(guard.name)))

    def submit(self, prepared: PreparedTurn, listener: TurnListener) -> Ticket:
        """Generate a prepared turn; `listener` gets pieces of text and at last a UserTurn or a Failure.

        The listener is called from the engine's thread and must not block. Raises EngineBusyError, EngineError.
        """
        if prepared.says is not None:
            return Said(prepared, listener)
        return Tries(self.engine, prepared, listener)

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


def _digits_apart(*pairs: tuple[float, float]) -> int:
    """How many digits, 3 to 8, show that the numbers of each pair are not the same."""
    return next((n for n in range(3, 8) if all(f"{a:.{n}g}" != f"{b:.{n}g}" for a, b in pairs)), 8)


def _rounded_down(value: float) -> float:
    """To three digits."""
    unit = 10.0 ** (floor(log10(value)) - 2)
    return floor(value / unit) * unit


def _changed(sampling: Sampling, changes: Mapping[str, Any]) -> Sampling:
    known = [field.name for field in fields(Sampling)]
    for name in changes:
        if name not in known:
            raise RequestError(f"unknown sampling field {name!r}; known: {', '.join(known)}")
    return replace(sampling, **changes)


def _schema(response_format: Mapping[str, Any] | None) -> tuple[Mapping[str, Any] | None, bool]:
    """JSON schema of the reply (None: any object), and whether it must be JSON at all."""
    if not isinstance(response_format, Mapping | None):
        raise RequestError(f"response_format must be an object with a type, not {response_format!r:.200}")
    kind = (response_format or {}).get("type", "text")
    if response_format is None or kind == "text":
        return None, False
    if kind == "json_object":
        return None, True
    if kind != "json_schema":
        raise RequestError(f"response_format.type is {kind!r}; known: text, json_object, json_schema")
    inner = response_format.get("json_schema")
    schema = inner.get("schema") if isinstance(inner, Mapping) else None
    if not isinstance(schema, Mapping):
        raise RequestError("response_format.json_schema must be an object whose `schema` is a JSON schema")
    return schema, True


def _instructed(turns: list[Turn], user: ServedUser, reaction: Reaction | None) -> list[Turn]:
    """The conversation under its instruction, or the default one, with the user's persona and what it feels."""
    first, rest = (turns[0].text, turns[1:]) if turns and turns[0].speaker == "system" else (DEFAULT_INSTRUCTION, turns)
    if reaction and reaction.whole and rest is turns:
        first = ""  # the default one would only stand beside a better one
    parts = (first, user.about, reaction.instruction if reaction else "")
    return [Turn("system", "\n\n".join(part for part in parts if part)), *rest]


def _conversation(turns: Sequence[Turn], user: ServedUser) -> Conversation:
    system = "\n".join(turn.text for turn in turns if turn.speaker == "system")
    tokens = named_stop_tokens(system) if user.stop_tokens is None else tuple(user.stop_tokens)
    conversation = Conversation(tuple(turns), tokens)
    conversation.prepare()  # here, and not in the engine's thread
    return conversation
