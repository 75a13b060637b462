"""A model behind an OpenAI-compatible URL: a simulated user, an agent, a judge. Whatever goes wrong there becomes one
error that says what to do. Needs the ``openai`` package, which is optional."""

from __future__ import annotations

import re
import threading
from typing import TYPE_CHECKING, Any, NoReturn

from traitbasis.errors import EvaluationError, TraitBasisError

if TYPE_CHECKING:
    from openai import OpenAI
    from openai.types.chat import ChatCompletion

_THOUGHT = re.compile(r"<think>.*?(?:</think>|\Z)", re.DOTALL)


class RemoteModel:
    """Chat completions at a `url` (``http://localhost:8000/v1``); may be used by several threads at once.

    api_key: sent only when given; no environment variable is read. timeout: seconds for one request. retries: tries
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
        if not re.match(r"https?://[^/]", url):
            raise error(f"{what}'s URL is {url!r}; it must be a base URL such as http://localhost:8000/v1")
        self.url, self._api_key = url.rstrip("/"), api_key
        self._opened: OpenAI | None
        self._what, self._error, self._extra, self._timeout, self._retries = what, error, extra, timeout, retries
        self._lock, self._opened = threading.Lock(), None

    def complete(self, model: str, **request: Any) -> ChatCompletion:
        """The reply of `model`. request: as for ``chat.completions.create``. Raises `error`."""
        client = self._client()  # says so when the package is missing
        import openai

        where = f"{self._what} at {without_password(self.url)}"
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
        except (openai.OpenAIError, ValueError) as error:
            self._fail(f"{where} answered what is no chat completion: {error}", error)
        # A web page gives a str, another API's object no choices.
        if not getattr(reply, "choices", None):
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
        raise self._error(message) from cause

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


def without_thoughts(text: str) -> str:
    """A reply without what a reasoning model wrote for itself, closed or cut off."""
    return _THOUGHT.sub("", text)


def without_password(url: str) -> str:
    """A URL without user and password, to be shown and written down."""
    return re.sub(r"(?<=://)[^/@]*@", "", url)
