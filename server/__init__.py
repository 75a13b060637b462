"""The HTTP server: one simulator behind OpenAI's chat completions and τ-trait's steering endpoints. No ML in here."""

from .app import create_app

__all__ = ["create_app"]
