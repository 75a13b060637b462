"""A model behind an OpenAI-compatible URL: a simulated user, an agent, a judge. Whatever goes wrong there becomes one
error that says what to do. Needs the ``openai`` package, which is optional."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, NoReturn, ParamSpec, TypeVar
from urllib.parse import urlsplit

from traitbasis.errors import EvaluationError, TraitBasisError

if TYPE_CHECKING:
    from openai import OpenAI
    from openai.types.chat import ChatCompletion

P = ParamSpec("P")
T = TypeVar("T")

_THOUGHT = re.compile(r"<think>.*?(?:</think>|\Z)", re.DOTALL)


class RemoteModel:
    """Chat completions at a `url` (``http://localhost:8000/v1``); may be used by several threads at once.

    api_key: sent only when given, and told by no error; no environment variable is read. timeout: seconds for one
    request. retries: tries
    more after a lost connection, 408, 409, 429 or 5xx, with growing pauses. what, error, extra: how errors call the
    model, their class, and what to install when the ``openai`` package is missing. Close it, or use it in a ``with``.
    """

    def __init__(
        self,
        url: str,
        api_key: str | None = None,
        *,
        what: str = "the model",
        error: type[TraitBasisError] = EvaluationError,
        extra: str = "eval",
        timeout: float = 600.0,
        retries: int = 6,
    ) -> None:
        if not _is_base(url):
            raise error(
                f"{what}'s URL is {without_password(url)!r}; it must be a base URL such as http://localhost:8000/v1"
            )
        self.url, self._api_key = url.rstrip("/"), (api_key or "").strip() or None  # files end in a line break
        if self._api_key and not (self._api_key.isascii() and self._api_key.isprintable()):
            raise error(f"{what}'s API key has characters that no request can carry; was it copied whole?")
        self._opened: OpenAI | None
        self._what, self._error, self._extra, self._timeout, self._retries = what, error, extra, timeout, retries
        self._lock, self._opened = threading.Lock(), None

    def complete(self, model: str, **request: Any) -> ChatCompletion:
        """The reply of `model`. request: as for ``chat.completions.create``.

        Its first message has a text or None, and nothing that UTF-8 has not; its usage has whole numbers or is None.
        Raises `error`, for whatever else comes back too.
        """
        client = self._client()  # says so when the package is missing
        import openai

        where = f"{self._what} at {without_password(self.url)}"
        if "messages" in request:  # a benchmark may have half of a surrogate pair, which cannot be sent
            text = json.dumps(request["messages"], ensure_ascii=False)
            request["messages"] = json.loads(text.encode("utf-8", "replace"))
        try:
            reply: ChatCompletion = client.chat.completions.create(model=model, **request)
        except openai.APITimeoutError as error:
            self._fail(f"{where} did not answer within {self._timeout:g} s; give it a longer timeout", error)
        except openai.APIConnectionError as error:
            self._fail(f"{where} cannot be reached ({error.__cause__ or error}); is it running there?", error)
        except (openai.AuthenticationError, openai.PermissionDeniedError) as error:
            key = "the API key" if self._api_key else "a request without an API key"
            self._fail(f"{where} refused {key} ({error.status_code}): {error.message}", error)
        except openai.NotFoundError as error:
            self._fail(f"{where} answered 404 for model {model!r}; {self._served(client)}", error)
        except openai.APIStatusError as error:
            self._fail(f"{where} answered {error.status_code} for model {model!r}: {error.message}", error)
        except (openai.OpenAIError, ValueError, RecursionError) as error:
            self._fail(f"{where} answered what is no chat completion: {error}", error)
        if not _settled(reply):
            raise self._error(f"{where} answered what is no chat completion; a base URL usually ends in /v1")
        return reply

    def close(self) -> None:
        """Give its connections back."""
        with self._lock:
            if self._opened:
                self._opened.close()
            self._opened = None

    def __enter__(self) -> RemoteModel:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _fail(self, message: str, cause: Exception) -> NoReturn:
        raise self._error(without_secret(message, self._api_key)) from cause

    def _client(self) -> OpenAI:
        with self._lock:
            if self._opened is None:
                try:
                    from openai import OpenAI
                except ImportError as error:
                    raise self._error(
                        f"{self._what} is asked with the openai package: pip install 'traitbasis[{self._extra}]'"
                    ) from error
                # Without a key the package would send the one from the environment, to whatever URL this is.
                key = self._api_key or "none"
                self._opened = OpenAI(base_url=self.url, api_key=key, timeout=self._timeout, max_retries=self._retries)
            return self._opened

    def _served(self, client: OpenAI) -> str:
        """What to do about a 404: the model's name may be wrong, or the URL."""
        import openai

        try:
            names = [model.id for model in client.with_options(max_retries=0).models.list().data or ()]
        except (openai.OpenAIError, ValueError, AttributeError, TypeError):
            return "it lists no models either, so the URL is probably wrong; a base URL usually ends in /v1"
        return f"it serves: {', '.join(names[:20]) or 'none'}"


class Threads:
    """Calls side by side, as ``ThreadPoolExecutor`` makes them; but when Ctrl-C ends the ``with``, nobody waits for a
    reply that is still to come, but for a second: an endpoint may take minutes. Any other error begins no more calls,
    and waits."""

    def __init__(self, count: int) -> None:
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._futures = list[Future[Any]]()
        self._threads = [threading.Thread(target=self._work, daemon=True) for _ in range(count)]
        for thread in self._threads:
            thread.start()

    def submit(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        future: Future[T] = Future()

        def run() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(call(*args, **kwargs))
                except BaseException as error:  # to whoever asks for the result
                    future.set_exception(error)

        self._futures.append(future)
        self._calls.put(run)
        return future

    def _work(self) -> None:
        while run := self._calls.get():
            run()

    def __enter__(self) -> Threads:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        if kind:
            for future in self._futures:
                future.cancel()
        for _ in self._threads:
            self._calls.put(None)
        waits = kind is None or issubclass(kind, Exception)
        until = time.monotonic() + 1
        for thread in self._threads:
            thread.join(None if waits else max(0.0, until - time.monotonic()))


def _is_base(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0 and url.isprintable()
    except ValueError:  # a port that is no number, half of an IPv6 address
        return False


def _settled(reply: Any) -> bool:
    """Whether a reply has a message, as the package does not check: a web page gives a str, another API's object no
    choices. Makes of the message and the usage what ``RemoteModel.complete`` promises."""
    choices = getattr(reply, "choices", None)
    message = getattr(choices[0], "message", None) if isinstance(choices, list) and choices else None
    content = getattr(message, "content", None)
    if message is None or isinstance(message, str | list | dict | int) or not isinstance(content, str | None):
        return False
    message.content = content and content.encode("utf-8", "replace").decode()
    used = getattr(reply, "usage", None)
    counts = [getattr(used, name, None) for name in ("prompt_tokens", "completion_tokens")]
    if not all(type(count) is int for count in counts):
        reply.usage = None
    return True


def without_thoughts(text: str) -> str:
    """A reply without what a reasoning model wrote for itself, closed or cut off."""
    return _THOUGHT.sub("", text)


def without_password(url: str) -> str:
    """A URL without user and password, to be shown and written down."""
    return re.sub(r"(?<=://)[^/?#\s]*@", "", url)


def without_secret(text: str, secret: str | None) -> str:
    """A text without a key, which endpoints and clients repeat in their errors, and without passwords in URLs."""
    return without_password(text.replace(secret, "…") if secret else text)
