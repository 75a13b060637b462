"""The HTTP server: one simulator behind OpenAI's chat completions and τ-trait's steering endpoints. No ML in here."""

from .app import Settings, create_app
from .limits import Limits

__all__ = ["Limits", "Settings", "create_app"]
