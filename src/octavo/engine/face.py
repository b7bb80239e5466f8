"""What a process knows of a model without its weights: files, tokenizer, chat template, defaults.

Decides which tokenizer and template belong to a model. A server holds this; the process that
computes holds it too. Computes nothing.

Invariant: opening it reads headers and vocabulary, and takes no memory for weights.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.config import EngineConfig
from octavo.engine import clock
from octavo.engine.intake import sampling_defaults
from octavo.engine.load import ModelFiles, open_model
from octavo.errors import ChatTemplateError, SettingError
from octavo.weights.tokenizer import Encodes, Tokenizer

if TYPE_CHECKING:
    from octavo.engine.chat import ChatTemplate


class Chat:
    """Turns conversations into token ids with one model's tokenizer and template."""

    def __init__(self, tokenizer: Tokenizer | None, override: str | None) -> None:
        self._tokenizer = tokenizer
        self._override = override
        self._compiled: dict[bool, ChatTemplate] = {}

    @property
    def has_template(self) -> bool:
        """Whether `encode` can work at all."""
        if self._tokenizer is None:
            return False
        return self._override is not None or bool(self._tokenizer.chat_templates)

    def encode(
        self, messages: Any, *, tools: Any = None, chat_template: str | None = None, **options: Any
    ) -> list[int]:
        """Return the prompt's ids; raises ChatTemplateError. Options are those of `encode_chat`."""
        from octavo.engine.chat import encode_chat

        template = self._template(chat_template, bool(tools))
        assert self._tokenizer is not None
        return encode_chat(
            self._tokenizer, template, messages, tools=tools, now=clock.now(), **options
        )

    def render(
        self, messages: Any, *, tools: Any = None, chat_template: str | None = None, **options: Any
    ) -> str:
        """Return the prompt as text; raises ChatTemplateError. Options: `ChatTemplate.render`."""
        template = self._template(chat_template, bool(tools))
        return template.render(messages, tools=tools, now=clock.now(), **options)

    def source(self, *, with_tools: bool = False) -> str | None:
        """Return the template's Jinja text, or None where there is none."""
        return self._template(None, with_tools).source if self.has_template else None

    def _template(self, own: str | None, with_tools: bool) -> "ChatTemplate":
        if self._tokenizer is None:
            raise ChatTemplateError("This model came without a tokenizer, so it cannot chat.")
        # Imported late: it brings Jinja, and the process that computes renders no chat.
        from octavo.engine.chat import ChatTemplate

        source = own or self._override
        known = self._compiled.get(with_tools) if own is None else None
        if known is None:
            # `now` is left to `render`, so that a compiled template serves for long.
            known = ChatTemplate.of(self._tokenizer, override=source, with_tools=with_tools)
            if own is None:
                self._compiled[with_tools] = known
        return known


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFace:
    """A model as its callers see it."""

    files: ModelFiles
    tokenizer: Tokenizer | None
    chat: Chat
    sampling_defaults: Mapping[str, Any]


def open_face(config: EngineConfig, *, encodes: Encodes = "soon") -> ModelFace:
    """Open a model's files, fetching them if need be; raises like `open_model`.

    encodes: when the tokenizer builds what only encoding needs.
    """
    template = _read_template(config.chat_template)
    files = open_model(config.model)
    tokenizer = _tokenizer(config, files, encodes)
    use_defaults = config.generation_config == "auto"
    return ModelFace(
        files=files,
        tokenizer=tokenizer,
        chat=Chat(tokenizer, template),
        sampling_defaults=sampling_defaults(files.generation_config) if use_defaults else {},
    )


def _tokenizer(config: EngineConfig, files: ModelFiles, encodes: Encodes) -> Tokenizer | None:
    if config.tokenizer is None:
        return files.tokenizer(encodes)
    path = Path(config.tokenizer)
    return Tokenizer.from_directory(path.parent if path.is_file() else path, encodes=encodes)


def _read_template(name: str | None) -> str | None:
    if name is None:
        return None
    try:
        return Path(name).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise SettingError(f"chat_template: cannot read {name}: {error}.") from None
