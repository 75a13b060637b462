"""Errors a caller can act on: each message names the thing, the value, and the way out.

Everything here derives from ``TraitBasisError``, so the command line and the server can show the message alone.
"""

from __future__ import annotations


class TraitBasisError(Exception):
    """Base of every error this package raises on purpose."""


class PairError(TraitBasisError):
    """A contrastive-pair file is invalid; names the file, the pair and the field."""


class ModelError(TraitBasisError):
    """A model cannot be found, fetched or steered."""


class ChatTemplateError(TraitBasisError):
    """A conversation cannot be rendered with the model's chat template, or a span cannot be found in it."""


class ArtifactError(TraitBasisError):
    """A trait vector or basis file is missing, damaged, or belongs to another model."""


class TraitSpecError(TraitBasisError):
    """A request names an unknown trait or an intensity that is no level and no finite number."""


class OverLimitError(TraitSpecError):
    """A request's traits are more than their model was found to bear, or one is not steerable on it; can be forced."""


class UsersError(TraitBasisError):
    """A file of served users is invalid; names the file, the user and the field."""


class SweepError(TraitBasisError):
    """A layer sweep cannot be run or read: other settings than its file's, a damaged file, nothing to choose from."""


class ReportError(TraitBasisError):
    """A figure or a report cannot be made: matplotlib is missing, or what it is made of does not fit together."""


class AnnotationError(TraitBasisError):
    """A sheet for annotators or a file of votes cannot be made or read; names the file, the line and the item."""


class JudgeError(TraitBasisError):
    """A judge cannot be asked (no package, URL, key or model), or nothing that it answers can be read."""


class EvaluationError(TraitBasisError):
    """Dialogues cannot be collected, read or measured: a missing endpoint, a damaged file, nothing to compare."""


class ReactionError(TraitBasisError):
    """What makes a customer react cannot be read: an unknown condition, bad anchors, a damaged state."""


class HarnessError(TraitBasisError):
    """A benchmark harness cannot be run, or its results cannot be read; names the harness, the file and the way out."""


class RequestError(TraitBasisError):
    """A generation request cannot be served as asked (empty conversation, too long, bad sampling value).

    code: machine-readable kind, in OpenAI's words where it has one (``context_length_exceeded``).
    """

    def __init__(self, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.code = code


class ToolCallError(TraitBasisError):
    """A generated reply is no tool call that can be sent: not JSON, an unknown tool, wrong arguments."""


class EngineError(TraitBasisError):
    """The engine failed or was closed while a request was running."""


class EngineBusyError(EngineError):
    """The engine's queue is full; the same request can succeed later."""


class EngineClosedError(EngineError):
    """The engine was closed; no request to it can succeed any more."""
