"""The routes about tokens and templates: what a text or a conversation becomes.

Decides the shape of their replies. Computes nothing with the model. Invariant: they say exactly
what generation would use.
"""

import asyncio
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from octavo.errors import BadRequestError, InvalidParameterError
from octavo.request import is_text
from octavo.server.bodies import DetokenizeBody, TemplateBody, TokenizeBody, template_options
from octavo.server.failures import JSONReply
from octavo.server.generation import note_ignored
from octavo.server.service import Service
from octavo.server.turns import encode_messages, tools_of, with_instructions
from octavo.weights.tokenizer import Tokenizer


class Texts:
    """Handlers of /tokenize, /detokenize, /tokenizer_info and /apply-template."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def tokenize(self, body: TokenizeBody, http: HttpRequest) -> Response:
        """Return the token ids of a prompt or of messages."""
        headers = self._check(body, http)
        if (body.prompt is None) == (body.messages is None):
            raise BadRequestError("Give either prompt or messages.")
        tokenizer = self._tokenizer
        if body.prompt is None:
            ids = await encode_messages(self._service, body, tools_of(body))
        else:
            ids = await asyncio.to_thread(
                tokenizer.encode, body.prompt, add_bos=body.add_special_tokens
            )
        reply: dict[str, Any] = {
            "count": len(ids),
            "max_model_len": self._service.client.intake.max_model_len,
            "tokens": ids,
        }
        if body.return_token_strs:
            reply["token_strs"] = await asyncio.to_thread(list, map(tokenizer.token_text, ids))
        return JSONReply(reply, headers=headers)

    async def detokenize(self, body: DetokenizeBody, http: HttpRequest) -> Response:
        """Return the text of token ids."""
        headers = self._check(body, http)
        tokenizer = self._tokenizer
        for token in body.tokens:
            if not 0 <= token < tokenizer.vocab_size:
                raise InvalidParameterError(
                    "tokens", token, f"a token id from 0 to {tokenizer.vocab_size - 1}"
                )
        text = await asyncio.to_thread(tokenizer.decode, body.tokens, skip_special_tokens=False)
        return JSONReply({"prompt": text}, headers=headers)

    async def apply_template(self, body: TemplateBody, http: HttpRequest) -> Response:
        """Return the prompt that messages become, as text."""
        headers = self._check(body, http)
        trusts = self._service.config.trust_request_chat_template
        options = template_options(body, trusts_templates=trusts)
        chat, tools = self._service.client.face.chat, tools_of(body)
        messages = with_instructions(self._service, body.messages, tools)
        prompt = await asyncio.to_thread(chat.render, messages, tools=tools, **options)
        if not is_text(prompt):
            raise BadRequestError("The prompt would not be valid Unicode: a lone surrogate.")
        return JSONReply({"prompt": prompt}, headers=headers)

    async def tokenizer_info(self) -> Response:
        """Tell the special tokens and the chat template, for programs that make prompts."""
        tokenizer, face = self._tokenizer, self._service.client.face
        return JSONReply(
            {
                "bos_token": tokenizer.bos_token or None,
                "eos_token": tokenizer.eos_token or None,
                "bos_token_id": tokenizer.bos_id,
                "eos_token_id": tokenizer.eos_ids[0] if tokenizer.eos_ids else None,
                "add_bos_token": tokenizer.add_bos,
                "vocab_size": tokenizer.vocab_size,
                "model_max_length": self._service.client.intake.max_model_len,
                "chat_template": face.chat.source(),
            }
        )

    def _check(
        self, body: TokenizeBody | DetokenizeBody | TemplateBody, http: HttpRequest
    ) -> dict[str, str]:
        headers = note_ignored(body, http, strict=self._service.config.strict)
        self._service.check_model(body.model)
        return headers

    @property
    def _tokenizer(self) -> Tokenizer:
        tokenizer = self._service.client.face.tokenizer
        if tokenizer is None:
            raise BadRequestError("This model came without a tokenizer.")
        return tokenizer
