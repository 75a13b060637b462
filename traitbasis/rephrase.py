"""A benchmark's fixed user turns, said by a user with traits; and whether the new turns still say everything.

A user who asks for a task in another manner must still ask for that task. So a rewritten turn is drawn again until no
rule of ``metrics/rewording.py`` objects: it names every entity of the original, invents none, and still asks for the
same as far as rules can tell. Where no draw passes, the original turn stays, marked; half-right text never goes out
(contract 8). `constrain` gives a small model a second chance: its text is then held to a pattern in which the entities
stand in their order and free text between them, and what it fills in is drawn under steering as before, and judged
by the same rules.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import as_completed
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache, partial
from importlib.metadata import version
from pathlib import Path
from queue import SimpleQueue
from threading import Event, Lock
from typing import Any, Literal, Protocol

from traitbasis.engines.base import Failure, as_engine_error
from traitbasis.errors import EvaluationError, RequestError
from traitbasis.files import alone, append_whole, write_whole
from traitbasis.grammar import Grammar, text_grammar
from traitbasis.guards import GUARDS
from traitbasis.metrics.entities import Entity, entities, invented, kept
from traitbasis.metrics.rewording import MEANING, actions, fault, same_actions
from traitbasis.prompts import GREETING
from traitbasis.remote import RemoteModel, Threads, without_password
from traitbasis.simulator import UserSimulator
from traitbasis.spec import Traits, format_traits
from traitbasis.static_turns import Record
from traitbasis.tries import SILENCE, UserTurn, digest_seed
from traitbasis.users import ServedUser

FORMAT = "traitbasis.rephrase/1"
TRIES = 12
NEXT = "Done. What next?"  # what the agent says between two turns, where the benchmark does not
Status = Literal["rephrased", "constrained", "kept_original", "empty"]

_INSTRUCTION = (
    "You are a customer who writes to an assistant. What you want to say now:\n\n{turn}\n\n"
    "Say it as the customer, in your own words, in one message. Ask for exactly the same, no more and no less.{names}"
)
_NAMES = " Write these exactly as they are: {names}."
_HISTORY = 3  # earlier turns that are shown
_LONGEST = 6000  # characters of a turn; nobody says more in one message, and few models could


# --- who writes -------------------------------------------------------------------------------------------------------


class Writer(Protocol):
    """Says something in its own words.

    spec: its traits. made_by: what it is (contract 11), the same for every draw. workers: how many may ask at once.
    can_constrain: whether it takes a pattern.
    """

    spec: str
    workers: int
    can_constrain: bool

    @property
    def made_by(self) -> Mapping[str, Any]: ...

    def write(self, messages: Sequence[Mapping[str, str]], seed: int, length: int, pattern: str | None) -> str | None:
        """The customer's next message. length: of the turn that is rewritten, in characters. pattern: a regular
        expression that the message matches. Empty where nothing usable was said, None where it came to no end."""


class LocalWriter:
    """A simulator's own model, steered. Raises TraitSpecError for traits that it does not serve, unless forced."""

    can_constrain = True

    def __init__(
        self,
        simulator: UserSimulator,
        traits: Traits,
        *,
        force: bool = False,
        sampling: Mapping[str, Any] | None = None,
    ) -> None:
        self._simulator, self._force, self._sampling = simulator, force, dict(sampling or {})
        # Whoever reads the text judges it: guards of the simulator's own would draw four times for each draw.
        self._user = ServedUser(name="rephraser", guards={guard.name: False for guard in GUARDS})
        prepared = self._prepare([{"role": "user", "content": GREETING}], traits, seed=0)
        self._intensities, self._dose = prepared.intensities, prepared.dose
        self.spec = format_traits(self._intensities)
        self.workers = max(1, min(16, simulator.engine.stats().max_batch))
        self._grammar: Callable[[str], Grammar] = lru_cache(64)(partial(text_grammar, simulator.lm.tokenizer))

    @property
    def made_by(self) -> dict[str, Any]:
        drawn = asdict(replace(self._simulator.sampling, **self._sampling))
        return {
            **self._simulator.provenance,
            "traits": self._intensities,
            "dose": round(self._dose, 4),
            "sampling": {name: drawn[name] for name in ("temperature", "top_p", "top_k", "min_p")},
        }

    def write(self, messages: Sequence[Mapping[str, str]], seed: int, length: int, pattern: str | None) -> str | None:
        prepared = self._prepare(messages, self._intensities, seed=seed, max_tokens=_room(length, pattern))
        if pattern is not None:
            grammar, request = self._grammar(pattern), prepared.request
            guide = partial(grammar.guide, request.stop_ids, silent=False)  # it is a user's turn: steering stays on
            prepared = replace(prepared, request=replace(request, guide=guide))
        queue: SimpleQueue[str | UserTurn | Failure] = SimpleQueue()
        with closing(_Cancelled(self._simulator.submit(prepared, queue.put))):
            while isinstance(item := queue.get(), str):
                pass
        if isinstance(item, Failure):
            raise as_engine_error(item)
        if item.finish == "length" and pattern is None:  # a pattern brings its text to its end
            return None
        return "" if item.text == SILENCE else item.text

    def _prepare(self, messages: Sequence[Mapping[str, Any]], traits: Traits, **options: Any) -> Any:
        return self._simulator.prepare(
            messages, traits, user=self._user, force=self._force, **{**self._sampling, **options}
        )


class RemoteWriter:
    """Any OpenAI-compatible endpoint. model: its name there; ``{spec}`` in it becomes the traits, which only a served
    user of ours understands; another model is asked under the name alone."""

    can_constrain = False

    def __init__(
        self, endpoint: RemoteModel, model: str, spec: str, *, temperature: float = 0.7, workers: int = 8
    ) -> None:
        self._endpoint, self._temperature = endpoint, temperature
        self.spec, self.workers = spec, workers
        self.model = model.replace("{spec}", spec or "off")

    @property
    def made_by(self) -> dict[str, Any]:
        return {
            "url": without_password(self._endpoint.url),
            "model": self.model,
            "sampling": {"temperature": self._temperature},
            "versions": {"traitbasis": version("traitbasis")},
        }

    def write(self, messages: Sequence[Mapping[str, str]], seed: int, length: int, pattern: str | None) -> str | None:
        if pattern is not None:
            raise EvaluationError("a model by URL cannot be held to a pattern; leave --constrain out, or use --model")
        reply = self._endpoint.complete(
            self.model,
            messages=list(messages),
            seed=seed % 2**31,
            max_tokens=_room(length, None),
            temperature=self._temperature,
        )
        choice = reply.choices[0]
        text = (choice.message.content or "").strip()
        if choice.finish_reason == "length":
            return None
        return "" if text == SILENCE else text


class _Cancelled:
    """A ticket that is cancelled when it is left; nothing happens to one that has ended."""

    def __init__(self, ticket: Any) -> None:
        self.close = ticket.cancel


def _room(length: int, pattern: str | None) -> int:
    """Tokens for a message: twice the turn's, at 4 characters a token; a pattern bounds the text itself."""
    return 48 + length // 2 if pattern is None else 256 + 6 * length


# --- one turn ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rephrased:
    """A turn and what became of it.

    status: ``rephrased`` and ``constrained`` are new text that names every entity; ``kept_original`` is the original,
    since no draw passed; ``empty`` had nothing to say. entities: those of the original, as they are written there.
    draws: how many it took. faults: how many draws were thrown away, by the rule that objected. best: of a turn that
    was kept, the draw that came closest: what it lost and invented, and which rule objected.
    """

    text: str
    status: Status
    entities: tuple[str, ...] = ()
    draws: int = 0
    faults: Mapping[str, int] = field(default_factory=dict)
    best: Mapping[str, Any] | None = None

    @property
    def note(self) -> dict[str, Any]:
        """For the record: all but the text."""
        found = {**asdict(self), "entities": list(self.entities), "faults": dict(self.faults)}
        return {name: value for name, value in found.items() if name != "text" and value is not None}


def rephrase_turn(
    writer: Writer,
    turn: str,
    said: Sequence[tuple[str, str]] = (),
    *,
    agent: str = "",
    tries: int = TRIES,
    constrain: bool = False,
    meaning: float = MEANING,
    seed: int = 0,
) -> Rephrased:
    """A turn in the writer's own words, drawn until no rule objects; else the turn itself.

    said: what agent and customer have said before, oldest first, the customer's turns as rewritten. agent: its line
    before this turn, if it has one. tries: draws of each kind, free first, then with `constrain` to a pattern. meaning:
    see ``rewording.fault``. The same seed gives the same turn. Raises what the writer raises.
    """
    if not turn.strip():
        return Rephrased(turn, "empty")
    names = tuple(dict.fromkeys(entity.text for entity in entities(turn)))
    if len(turn) > _LONGEST:
        return Rephrased(turn, "kept_original", names, best={"fault": f"longer than {_LONGEST} characters"})
    messages = _messages(turn, names, said, agent)
    faults: Counter[str] = Counter()
    closest: tuple[int, dict[str, Any]] | None = None
    patterns = [None] * tries + [_pattern(turn)] * (tries if constrain else 0)
    for draw, pattern in enumerate(patterns):
        try:
            drawn = writer.write(messages, digest_seed([seed, draw]), len(turn), pattern)
        except RequestError as error:  # it does not fit into the model's context, most likely
            return Rephrased(turn, "kept_original", names, draw, dict(faults), {"fault": str(error)})
        text = _unwrapped(drawn or "", turn)
        objection = "cut" if drawn is None else fault(turn, text, meaning=meaning)
        if objection is None:
            status: Status = "rephrased" if pattern is None else "constrained"
            return Rephrased(text, status, names, draw + 1, dict(faults))
        faults[objection] += 1
        lost, new = [_texts(found) for found in (kept(turn, text)[1], invented(turn, text))]
        distance = len(lost) + len(new) if text else len(names) + 1
        if closest is None or distance < closest[0]:
            closest = distance, {"fault": objection, "lost": lost, "invented": new}
    return Rephrased(turn, "kept_original", names, len(patterns), dict(faults), closest and closest[1])


def _messages(turn: str, names: Sequence[str], said: Sequence[tuple[str, str]], agent: str) -> list[dict[str, str]]:
    told = _NAMES.format(names=", ".join(names)) if names else ""
    found = [{"role": "system", "content": _INSTRUCTION.format(turn=turn, names=told)}]
    for line, answer in said[-_HISTORY:]:
        found += [{"role": "user", "content": line}, {"role": "assistant", "content": answer}]
    return [*found, {"role": "user", "content": agent or (NEXT if said else GREETING)}]


def _unwrapped(text: str, turn: str) -> str:
    """Without quotation marks around the whole, which many models set around what somebody says."""
    text = text.strip()
    wrapped = re.fullmatch(r"[\"“]([^\"“”]+)[\"”]", text)
    return wrapped[1].strip() if wrapped and not turn.strip().startswith(('"', "“")) else text


def _texts(found: Sequence[Entity]) -> list[str]:
    return [entity.text for entity in found]


# --- constrained text -------------------------------------------------------------------------------------------------

_WORD = r"[{letters}][{letters}'’-]{{0,14}}"
_LEAD = re.compile(
    r"(?:\b(?:from|to|into|in|on|at|of|for|with|by|as|under|within|between|and|or|than|below|above|over|until|before"
    r"|after|about|named|called|titled|dubbed|id|is|username|password|token|access|number|card|the|my|file|order|priority"
    r"|level|level of|the file)\s+){1,4}\Z",
    re.IGNORECASE,
)
_TAIL = re.compile(
    r"\A\s(?:directory|folder|files?|shares|units|tickets?|sector|stock|account|card|mode|class|decimal places)\b",
    re.IGNORECASE,
)


def _pattern(turn: str) -> str:
    """What a message must look like that says a turn's entities in order, with free words between them.

    An entity takes along the words that say what it is for (``to 'temp' directory``), and the first verb of what stands
    before it is said, too, or another one for the same. No digits, quotation marks or signs are free, so nothing that
    looks like an entity but a name can be invented; free words are whole words, a bounded number at each place.
    """
    word = _WORD.format(letters="A-Za-zÀ-ɏ" if all(c <= "ɏ" for c in turn if c.isalpha()) else r"\p{L}")
    pattern, end = "", 0
    parts: list[tuple[str, int]] = []
    for start, stop in _anchors(turn):
        words = turn[end:start].split()
        if verbs := actions(turn[end:start]):
            parts.append((_any_of(same_actions(verbs[0])), len(words)))
        parts.append((_literal(turn[start:stop]), len(words)))
        end = stop
    if not parts and (verbs := actions(turn)):
        parts.append((_any_of(same_actions(verbs[0])), 8))
    for part, words_before in parts:
        gap = r"[,;:.!?]? " if pattern else ""
        pattern += rf"{gap}(?:{word}[,;:.!?]{{0,2}} ){{0,{max(4, min(12, words_before + 3))}}}{part}"
    return pattern + rf"[,;:.!?]{{0,2}}(?: {word}[,;:.!?]{{0,2}}){{0,14}}"


def _anchors(turn: str) -> Iterator[tuple[int, int]]:
    """Places of the entities with the words that belong to them; those that meet are one."""
    begun: tuple[int, int] | None = None
    for entity in entities(turn):
        lead = _LEAD.search(turn[begun[1] if begun else 0 : entity.start])
        start = entity.start - len(lead.group()) if lead else entity.start
        tail = _TAIL.match(turn[entity.end :])
        stop = entity.end + (tail.end() if tail else 0)
        if begun and not re.search(r"\w", turn[begun[1] : start]):
            begun = begun[0], stop
        else:
            if begun:
                yield begun
            begun = start, stop
    if begun:
        yield begun


def _literal(text: str) -> str:
    return re.sub(r"([\\.+*?()|\[\]{}^$#&~/-])", r"\\\1", " ".join(text.split()))


def _any_of(verbs: Sequence[str]) -> str:
    """One of them, with a capital or without."""
    return f"(?:{'|'.join(f'[{verb[0].upper()}{verb[0]}]{verb[1:]}' for verb in verbs)})"


# --- a benchmark ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Settings:
    """How turns are rewritten; a file holds records of one setting."""

    seed: int = 0
    tries: int = TRIES
    constrain: bool = False
    meaning: float = MEANING

    def __post_init__(self) -> None:
        if self.tries < 1:
            raise EvaluationError(f"tries is {self.tries}; at least one draw is needed")
        if not 0 <= self.meaning <= 1:
            raise EvaluationError(f"meaning is {self.meaning}; it is a share, from 0 to 1")


def rephrase_record(
    writer: Writer, record: Record, settings: Settings = Settings(), *, turns: _Turns | None = None
) -> dict[str, Any]:
    """A record with its user turns rewritten one after the other, each in the light of those before it. turns: keeps
    those that are done."""
    found: list[Rephrased] = []
    said: list[tuple[str, str]] = []
    for number, (turn, reply) in enumerate(zip(record.turns, record.replies, strict=True)):
        agent = reply[:_LONGEST] or (NEXT if said else GREETING)
        done = (turns and turns.find(record, number)) or rephrase_turn(
            writer,
            turn,
            said,
            agent=agent,
            tries=settings.tries,
            constrain=settings.constrain,
            meaning=settings.meaning,
            seed=digest_seed([settings.seed, record.id, number]),
        )
        if turns:
            turns.add(record, number, done)
        found.append(done)
        if done.status != "empty":
            said.append((agent, done.text))
    note = {**made_with(writer, settings), **_source(record), "turns": [done.note for done in found]}
    return record.rewritten([done.text for done in found], note)


def rephrase_file(
    writer: Writer,
    records: Sequence[Record],
    out: Path,
    settings: Settings = Settings(),
    *,
    done: Callable[[int], None] = lambda records: None,
) -> list[dict[str, Any]]:
    """Rewrite records into a file of JSON lines, several at a time, and give them back in the records' order.

    Each record is appended as soon as it is done, and what is done of the others is kept beside the file; a run that
    was killed goes on where it was, and gives the same text. At last the file is put into the records' order. done:
    told how many user turns were finished, from any thread. At Ctrl-C nobody waits for a turn. Raises EvaluationError
    when the file holds something else, when another run writes it, and when the writer cannot be held to a pattern.
    """
    with alone(out, EvaluationError):
        return _rephrased(writer, records, out, settings, done)


def _rephrased(
    writer: Writer, records: Sequence[Record], out: Path, settings: Settings, done: Callable[[int], None]
) -> list[dict[str, Any]]:
    if settings.constrain and not writer.can_constrain:
        raise EvaluationError("a model by URL cannot be held to a pattern; leave --constrain out, or use --model")
    header = json.loads(json.dumps(made_with(writer, settings)))
    finished = _finished(out, header, records)
    done(sum(len(record.turns) for record in records if record.number in finished))
    left = [record for record in records if record.number not in finished]
    turns = _Turns(out.with_name(f"{out.name}.turns"), header, done)
    with Threads(max(1, min(writer.workers, len(left)))) as pool:
        tasks = {pool.submit(rephrase_record, writer, record, settings, turns=turns): record for record in left}
        try:
            for task in as_completed(tasks):
                finished[tasks[task].number] = task.result()
                append_whole(out, _line(task.result()))
        except BaseException:
            turns.no_more.set()
            raise
    ordered = [finished[record.number] for record in records]
    write_whole(out, "".join(map(_line, ordered)))
    turns.path.unlink(missing_ok=True)
    return ordered


class _Turns:
    """Finished turns of unfinished records, on disk: a small machine needs minutes for a record."""

    def __init__(self, path: Path, header: Mapping[str, Any], done: Callable[[int], None]) -> None:
        self.path, self._done, self._lock, self.no_more = path, done, Lock(), Event()
        self._found: dict[tuple[int, str, int], Rephrased] = {}
        lines = path.read_text("utf-8", "replace").split("\n")[:-1] if path.is_file() else []
        if lines and lines[0] + "\n" == _line(header):
            for line in lines[1:]:
                with suppress(ValueError, TypeError, LookupError):  # two pieces of lines that a kill cut off
                    turn = json.loads(line)
                    self._found[turn["record"], turn["source"], turn["turn"]] = Rephrased(**turn["done"])
        write_whole(path, _line(header))
        for key, turn in self._found.items():
            self._write(key, turn)

    def find(self, record: Record, number: int) -> Rephrased | None:
        """Raises EvaluationError when no more turns are to be begun: a record may have hundreds."""
        if self.no_more.is_set():
            raise EvaluationError("broken off")
        return self._found.get((record.number, record.digest, number))

    def add(self, record: Record, number: int, turn: Rephrased) -> None:
        key = (record.number, record.digest, number)
        with self._lock:
            if key not in self._found:
                self._write(key, turn)
            self._done(1)

    def _write(self, key: tuple[int, str, int], turn: Rephrased) -> None:
        line = {**dict(zip(("record", "source", "turn"), key, strict=True)), "done": asdict(turn)}
        append_whole(self.path, _line(line))


def _is_cut(line: bytes) -> bool:
    """Whether a line without its end is one that a kill cut off."""
    try:
        json.loads(line)
    except ValueError:
        return True
    return False


def _line(record: Mapping[str, Any]) -> str:
    return json.dumps(record, ensure_ascii=False) + "\n"


def made_with(writer: Writer, settings: Settings) -> dict[str, Any]:
    """What says of a file how it was made (contract 11)."""
    return {"format": FORMAT, "spec": writer.spec, **asdict(settings), "made_by": dict(writer.made_by)}


def _source(record: Record) -> dict[str, Any]:
    return {"record": record.number, "source": record.digest}


def _finished(out: Path, header: Mapping[str, Any], records: Sequence[Record]) -> dict[int, dict[str, Any]]:
    """Records of an earlier run with the same settings, by number. What a kill cut off is taken away."""
    if not out.is_file():
        return {}
    data = out.read_bytes()
    whole = data.rfind(b"\n") + 1
    if not whole and not (data[:1] in (b"", b"{") and _is_cut(data)):
        raise EvaluationError(f"{out} holds no rephrased records; delete it, or write elsewhere with --out")
    found, sources = {}, {record.number: record.digest for record in records}
    for number, line in enumerate(data[:whole].decode("utf-8", "replace").split("\n")[:-1], 1):
        try:
            record = json.loads(line)
            note = record["traitbasis"]
            different = sorted(name for name in header if note.get(name) != header[name])
            place, source = int(note["record"]), note["source"]
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise EvaluationError(
                f"{out}, line {number}: no rephrased record ({error}); delete the file, or write elsewhere with --out"
            ) from error
        if different or sources.get(place, source) != source:
            what = ", ".join(different) or "another benchmark"
            raise EvaluationError(
                f"{out} holds records that were made with other settings ({what}); delete it, or write elsewhere with "
                "--out"
            )
        found[place] = record
    if extra := sorted(found.keys() - sources.keys()):
        raise EvaluationError(
            f"{out} holds {len(extra)} records more than are asked for; raise --limit, or write elsewhere with --out"
        )
    if whole < len(data):
        os.truncate(out, whole)
    return found
