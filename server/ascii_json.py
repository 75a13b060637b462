"""JSON that can always be sent."""

from __future__ import annotations

import json
from typing import Any

from fastapi.responses import JSONResponse


class AsciiJSONResponse(JSONResponse):
    """JSON with every other character escaped. Names that a client sent come back in replies and errors, and half of a
    surrogate pair in one, which JSON can carry, is no UTF-8."""

    def render(self, content: Any) -> bytes:
        return json.dumps(content, allow_nan=False, separators=(",", ":")).encode("ascii")
