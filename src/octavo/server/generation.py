"""The routes that generate: completions and chat.

Decides how a body becomes prompts for the service and a reply in OpenAI's shape. Ranges belong to
`SamplingParams`, limits to the service, the order of a stream to `answering`.

Invariant: whatever is wrong with a request is raised before the first byte of its reply.
"""

from collections.abc import Sequence
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from octavo.engine import clock
from octavo.engine.intake import Prompt
from octavo.errors import BadRequestError
from octavo.request import SamplingParams
from octavo.server.answering import EventStream, Reply, answer_whole
from octavo.server.bodies import Body, ChatBody, CompletionBody, SamplingFields
from octavo.server.failures import JSONReply
from octavo.server.gate import CALLER, NOTE, REQUEST_ID
from octavo.server.pieces import PieceMaker
from octavo.server.records import RequestRecord
from octavo.server.service import OpenRequest, Service
from octavo.server.shapes import ChatShape, CompletionShape, Echo
from octavo.server.turns import take_turn

BEGIN_SECONDS = 5.0  # a stream's status waits so long for the first thing to tell
IGNORED = "x-octavo-ignored"
QUEUE_POSITION = "x-octavo-queue-position"


class Generation:
    """Handlers of /v1/completions and /v1/chat/completions."""

    def __init__(self, service: Service) -> None:
        self._service = service

    # --- completions ----------------------------------------------------------------------------

    async def completions(self, body: CompletionBody, http: HttpRequest) -> Response:
        """Continue one or more texts."""
        service = self._service
        reply_id = f"cmpl-{http.scope[REQUEST_ID]}"
        record = service.records.begin(reply_id, http.scope[CALLER])
        headers = note_ignored(body, http, strict=service.config.strict)
        model = service.check_model(body.model)
        service.check_open()
        body.check()
        params = body.completion_params(service.client.face.sampling_defaults)
        given = body.prompts(service.config.max_prompts)
        prompts = [as_prompt(prompt, body.cache_salt) for prompt in given]
        opened = await self._open_all(prompts, params, body, record)
        ids = [r.stream.request.prompt_token_ids for r in opened]
        shape = CompletionShape(
            reply_id,
            model,
            int(clock.now().timestamp()),
            echoes=[self._echo(*pair, body) for pair in zip(prompts, ids, strict=True)],
            prompt_token_ids=ids,
            with_logprobs=body.logprobs is not None,
            with_ids=bool(body.return_token_ids),
            is_echo_only=body.is_echo_only,
            token_bytes=service.token_bytes,
        )
        maker = PieceMaker(params.n, [len(i) for i in ids], counts_generated=not body.is_echo_only)
        return await self._answer(Reply(opened, maker, shape), body, http, headers)

    def _echo(self, prompt: Any, ids: list[int], body: CompletionBody) -> Echo | None:
        if not body.echo:
            return None
        tokenizer = self._service.client.face.tokenizer
        if tokenizer is None:
            raise BadRequestError("This model came without a tokenizer, so it cannot echo.")
        text = prompt.get("prompt")
        if text is None or body.truncate_prompt_tokens is not None:
            text = tokenizer.decode(ids, skip_special_tokens=False)
        return Echo(text, ids, tokenizer.token_text, body.logprobs is not None)

    # --- chat -----------------------------------------------------------------------------------

    async def chat(self, body: ChatBody, http: HttpRequest) -> Response:
        """Answer a conversation."""
        service = self._service
        reply_id = f"chatcmpl-{http.scope[REQUEST_ID]}"
        record = service.records.begin(reply_id, http.scope[CALLER])
        headers = note_ignored(body, http, strict=service.config.strict)
        model = service.check_model(body.model)
        service.check_open()
        turn = await take_turn(service, body)
        prompt = as_prompt(turn.token_ids, body.cache_salt)
        opened = await self._open_all([prompt], turn.params, body, record)
        shape = ChatShape(
            reply_id,
            model,
            int(clock.now().timestamp()),
            with_logprobs=bool(body.logprobs),
            num_top=body.top_logprobs or 0,
            with_ids=bool(body.return_token_ids),
            token_bytes=service.token_bytes,
        )
        taken = opened[0].stream.request.prompt_token_ids
        maker = PieceMaker(turn.params.n, [len(taken)], turn.text_stage)
        reply = Reply(opened, maker, shape, amend=lambda piece: turn.amend(piece, maker))
        if body.return_token_ids:
            reply.prompt_token_ids = taken
        return await self._answer(reply, body, http, headers)

    # --- both -----------------------------------------------------------------------------------

    async def _open_all(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        body: SamplingFields,
        record: RequestRecord,
    ) -> list[OpenRequest]:
        """Open every prompt, or none: the first refusal ends those before it."""
        opened: list[OpenRequest] = []
        try:
            for prompt in prompts:
                opened.append(  # noqa: PERF401 (what is open must be known when the next fails)
                    await self._service.open(
                        prompt,
                        params,
                        record=record,
                        priority=body.priority,
                        timeout=body.timeout,
                    )
                )
        except BaseException:
            for each in opened:
                each.close()
            raise
        return opened

    async def _answer(
        self, reply: Reply, body: SamplingFields, http: HttpRequest, headers: dict[str, str]
    ) -> Response:
        reply.note = http.scope[NOTE]
        headers = {**headers, QUEUE_POSITION: str(reply.requests[0].queue_position)}
        if not body.wants_stream:
            return JSONReply(await answer_whole(reply, http.receive), headers=headers)
        options = body.stream_options
        reply.include_usage = options is not None and options.include_usage
        reply.continuous_usage = options is not None and options.continuous_usage_stats
        reply.with_progress = bool(body.return_progress)
        try:
            await reply.begun(self._service.config.keep_alive_seconds or BEGIN_SECONDS)
        except BaseException:
            reply.close()
            raise
        return EventStream(
            reply, keep_alive=self._service.config.keep_alive_seconds, headers=headers
        )


def as_prompt(prompt: Any, salt: str | None) -> Any:
    """Return a text or ids as a prompt of the engine."""
    made: dict[str, Any] = (
        {"prompt": prompt} if isinstance(prompt, str) else {"prompt_token_ids": prompt}
    )
    if salt is not None:
        made["cache_salt"] = salt
    return made


def note_ignored(body: Body, http: HttpRequest, *, strict: bool) -> dict[str, str]:
    """Name unknown fields in the log and in the headers returned; `strict` refuses them."""
    unknown = body.unknown_fields()
    if not unknown:
        return {}
    shown = ", ".join(name[:60] for name in unknown[:20])
    shown = shown.encode("unicode_escape").decode()  # what headers and logs can hold
    if strict:
        raise BadRequestError(
            f"The request has unknown fields: {shown}. Leave them out, or start octavo without "
            "--strict."
        )
    http.scope[NOTE]["ignored"] = shown.replace(" ", "")
    return {IGNORED: shown}
