"""Tool calls: from a model's text to calls, and from a choice of tools to a grammar."""

from octavo.server.tools.constraint import calls_constraint
from octavo.server.tools.formats import FORMATS, ToolFormat, choose_format
from octavo.server.tools.parser import (
    ArgumentsDelta,
    CallStarted,
    ContentDelta,
    ToolCallParser,
    ToolEvent,
)

__all__ = [
    "FORMATS",
    "ArgumentsDelta",
    "CallStarted",
    "ContentDelta",
    "ToolCallParser",
    "ToolEvent",
    "ToolFormat",
    "calls_constraint",
    "choose_format",
]
