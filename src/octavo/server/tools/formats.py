"""How models write tool calls: one line per format.

Decides the markers and the notation of each format, and which one a chat template asks for. Parses
nothing.
"""

from dataclasses import dataclass
from typing import Literal

from octavo.errors import InvalidParameterError, nearest


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """One way of writing calls.

    opens, closes: markers around calls; they are never shown. notation: "json" is an object with
    name and arguments, "python" a call with keywords. arguments: the key of the arguments that a
    model is asked to write; both usual ones are read. is_bare: calls may stand without a marker if
    the answer begins with them. id_length: characters of a call's id, where a template insists.
    """

    name: str
    opens: tuple[str, ...]
    closes: tuple[str, ...]
    notation: Literal["json", "python"] = "json"
    arguments: str = "arguments"
    is_bare: bool = False
    id_length: int | None = None

    @property
    def markers(self) -> tuple[str, ...]:
        """All markers. Where one is a special token, text must be made with special tokens."""
        return self.opens + self.closes


FORMATS = {
    form.name: form
    for form in (
        ToolFormat(name="hermes", opens=("<tool_call>",), closes=("</tool_call>",)),
        ToolFormat(
            name="llama3_json",
            opens=("<|python_tag|>",),
            closes=(),
            arguments="parameters",
            is_bare=True,
        ),
        ToolFormat(
            name="pythonic",
            opens=("<|python_start|>",),
            closes=("<|python_end|>",),
            notation="python",
            is_bare=True,
        ),
        ToolFormat(name="mistral", opens=("[TOOL_CALLS]",), closes=(), id_length=9),
        ToolFormat(name="gemma", opens=("```tool_code",), closes=("```",), notation="python"),
        ToolFormat(name="json", opens=("```json",), closes=("```",), is_bare=True),
    )
}
# What a template writes only for one format, the most telling first.
_SIGNS = (
    ("[TOOL_CALLS]", "mistral"),
    ("<tool_call>", "hermes"),
    ("<|python_start|>", "pythonic"),
    ("[func_name1(", "pythonic"),
    ("<|python_tag|>", "llama3_json"),
    ("<|eom_id|>", "llama3_json"),
    ('"parameters": dictionary', "llama3_json"),
    ("tool_code", "gemma"),
    ("<start_of_turn>", "gemma"),
)


def choose_format(name: str, template: str | None) -> ToolFormat:
    """Return the format called `name`; for "auto", the one that the chat template writes.

    A template that knows no tools gets "json". Raises InvalidParameterError for an unknown name.
    """
    if name == "auto":
        signs = ((sign, found) for sign, found in _SIGNS if sign in (template or ""))
        return FORMATS[next((found for _, found in signs), "json")]
    if name not in FORMATS:
        allowed = f"auto, {', '.join(FORMATS)}"
        raise InvalidParameterError("tool_call_parser", name, allowed + nearest(name, FORMATS))
    return FORMATS[name]
