"""From a chat request to a prompt, parameters, and how the answer's text is split.

Decides what tools, reasoning and response formats mean for one turn of a conversation. What each
format looks like belongs to `tools` and `reasoning`.

Invariant: the prompt of a turn is the one that /tokenize and /apply-template tell.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from octavo.engine.client import LONG_TEXT
from octavo.request import Reasoning, SamplingParams
from octavo.server.bodies import ChatBody, TemplateBody, TokenizeBody, template_options
from octavo.server.pieces import Parts, Piece, PieceMaker, TextStage, ToolCallPart
from octavo.server.reasoning import ReasoningSplitter, find_reasoning
from octavo.server.service import Service
from octavo.server.tools import (
    ArgumentsDelta,
    CallStarted,
    ContentDelta,
    ToolCallParser,
    ToolEvent,
    ToolFormat,
    choose_format,
)
from octavo.server.tools.requests import (
    checked_tools,
    chosen_tools,
    finish_reason,
    response_format_constraint,
    tool_instructions,
    tools_constraint,
)

Json = dict[str, Any]
Tools = Sequence[Json] | None
# Tokens at the end of a prompt in which a template may have opened the reasoning.
TAIL_TOKENS = 32


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn, ready for the engine.

    text_stage: makes the stage of one answer. mode: of the choice of tools.
    """

    token_ids: list[int]
    params: SamplingParams
    text_stage: Callable[[], TextStage]
    mode: str

    def amend(self, piece: Piece, maker: PieceMaker) -> None:
        """Let the finish reason tell of tool calls."""
        called = maker.called_tools(piece.choice)
        piece.finish_reason = finish_reason(piece.finish_reason, int(called), self.mode)


async def take_turn(service: Service, body: ChatBody) -> Turn:
    """Return what a chat request asks of the engine; raises a `BadRequestError`."""
    mode, tools = chosen_tools(checked_tools(body.tools), body.tool_choice)
    form = tool_format(service, with_tools=bool(tools))
    special = _special_tokens(service)
    parallel = body.parallel_tool_calls is not False
    fixed: Json = {}
    constraint = None
    if tools:  # it walks every schema
        constraint = await asyncio.to_thread(
            tools_constraint, form, mode, tools, special=special, parallel=parallel
        )
    constraint = constraint or response_format_constraint(body.response_format)
    if constraint is not None:
        fixed["structured_outputs"] = constraint
    token_ids = await encode_messages(service, body, tools or None)
    reasoning = _reasoning(service, token_ids, with_tools=bool(tools))
    if reasoning is not None:
        fixed["reasoning"] = reasoning
    markers = [*(form.markers if tools else ())]
    markers += [] if reasoning is None else [reasoning.start, reasoning.end]
    if any(marker in special for marker in markers):
        fixed["skip_special_tokens"] = False  # the text must show where calls and reasoning begin
    params = body.chat_params(service.client.face.sampling_defaults, **fixed)

    def text_stage() -> TextStage:
        names = [tool["function"]["name"] for tool in tools]
        parser = ToolCallParser(form, names) if tools else None
        return AnswerText(ReasoningSplitter(reasoning), parser, parallel=parallel)

    return Turn(token_ids, params, text_stage, mode)


class AnswerText:
    """The text of one answer: reasoning, then content and tool calls."""

    def __init__(
        self, splitter: ReasoningSplitter, parser: ToolCallParser | None, *, parallel: bool
    ) -> None:
        self._splitter = splitter
        self._parser = parser
        self._parallel = parallel

    def push(self, text: str) -> Parts:
        """See `TextStage`."""
        reasoning, content = self._splitter.push(text)
        if self._parser is None or not content:
            return Parts(content, reasoning)
        return self._parts(reasoning, self._parser.push(content))

    def finish(self) -> Parts:
        """See `TextStage`."""
        reasoning, content = self._splitter.finish()
        if self._parser is None:
            return Parts(content, reasoning)
        events = self._parser.push(content) if content else []
        return self._parts(reasoning, [*events, *self._parser.finish()])

    def _parts(self, reasoning: str, events: Sequence[ToolEvent]) -> Parts:
        parts = Parts("", reasoning)
        for event in events:
            match event:
                case ContentDelta(text):
                    parts.content += text
                case CallStarted(index, call_id, name) if self._may(index):
                    parts.tool_calls.append(ToolCallPart(index, call_id, name))
                case ArgumentsDelta(index, text) if self._may(index):
                    parts.tool_calls.append(ToolCallPart(index, arguments=text))
        return parts

    def _may(self, index: int) -> bool:
        return self._parallel or index == 0


# --- the prompt ---------------------------------------------------------------------------------


def tools_of(body: TokenizeBody | TemplateBody) -> Tools:
    """Return the tools of a body that names no choice."""
    return checked_tools(body.tools) or None


async def encode_messages(
    service: Service, body: ChatBody | TokenizeBody | TemplateBody, tools: Tools
) -> list[int]:
    """Return the prompt's ids for a body with messages; long ones are rendered off the loop."""
    options = template_options(body, trusts_templates=service.config.trust_request_chat_template)
    chat = service.client.face.chat
    messages = with_instructions(service, body.messages or [], tools)

    def encode() -> list[int]:
        return chat.encode(messages, tools=tools, **options)

    if sum(len(str(message.get("content"))) for message in messages) > LONG_TEXT:
        return await asyncio.to_thread(encode)
    return encode()


def with_instructions(service: Service, messages: Sequence[Json], tools: Tools) -> list[Json]:
    """Return messages that tell of tools where the chat template does not."""
    source = service.client.face.chat.source(with_tools=bool(tools))
    if not tools or source is None or "tools" in source:
        return list(messages)
    text = tool_instructions(tool_format(service, with_tools=True), tools)
    first, *rest = messages
    if first.get("role") == "system" and isinstance(first.get("content"), str):
        return [{**first, "content": f"{first['content']}\n\n{text}"}, *rest]
    return [{"role": "system", "content": text}, *messages]


def tool_format(service: Service, *, with_tools: bool) -> ToolFormat:
    """Return how the model writes calls."""
    source = service.client.face.chat.source(with_tools=with_tools)
    return choose_format(service.config.tool_call_parser, source)


def _reasoning(service: Service, token_ids: list[int], *, with_tools: bool) -> Reasoning | None:
    face = service.client.face
    if service.config.reasoning_parser == "none" or face.tokenizer is None:
        return None
    tail = face.tokenizer.decode(token_ids[-TAIL_TOKENS:], skip_special_tokens=False)
    return find_reasoning(face.chat.source(with_tools=with_tools), tail)


def _special_tokens(service: Service) -> Mapping[str, int]:
    tokenizer = service.client.face.tokenizer
    if tokenizer is None:
        return {}
    return {tokenizer.token_text(token): token for token in tokenizer.special_ids}
