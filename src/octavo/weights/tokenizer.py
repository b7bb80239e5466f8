"""Text to token ids and back, for one model.

Decides where the one BOS goes and which exact bytes each token stands for, and keeps user text from
becoming the *guarded* tokens that only a chat template may write. It does not know chat templates'
language, stop strings or streams.

Invariant: `encode(text, parse_special=False)` never returns a guarded token's id.
"""

from __future__ import annotations

import itertools
import threading
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from pathlib import Path
from typing import Literal

import numpy as np

from octavo.errors import BadRequestError, InvalidParameterError
from octavo.weights.encoder import Encoder
from octavo.weights.gguf_vocabulary import read_metadata
from octavo.weights.guarded import GuardedTexts
from octavo.weights.vocabulary import (
    BYTE_TOKEN,
    SPACE,
    Vocabulary,
    damaged,
    nodes,
    one_line,
    read_folder,
)

Reread = Callable[[], Vocabulary]
# When what only encoding needs is built: at once; at the first text or `prepare`, from what is kept
# in memory until then; or then, from files that are read again.
Encodes = Literal["now", "soon", "rarely"]
# Tokens whose bytes are kept, about 200 bytes each: most of a text is made of few tokens.
_NUM_KEPT = 8192


class TokenTexts:
    """The texts of a vocabulary by id, in one piece of memory; "" for an id without one."""

    def __init__(self, vocab: Mapping[str, int]) -> None:
        sequence = sorted(vocab, key=vocab.__getitem__)
        encoded = [text.encode() for text in sequence]
        self._content = b"".join(encoded)
        self._ids = np.array([vocab[text] for text in sequence], np.int32)
        self._ends = np.cumsum(list(map(len, encoded)), dtype=np.int64)

    def __getitem__(self, token: int) -> str:
        place = token
        if not (token < len(self._ids) and self._ids[token] == token):
            place = bisect_left(self._ids, token)
            if place == len(self._ids) or self._ids[place] != token:
                return ""
        start = self._ends[place - 1] if place else 0
        return self._content[start : self._ends[place]].decode()


class Tokenizer:
    """Encodes and decodes text for one model. Safe to share between threads.

    Attributes:
        vocab_size: one more than the largest token id; ids are 0 <= id < vocab_size.
        bos_id: the token that begins every prompt, or None where the model names none.
        add_bos: whether prompts begin with `bos_id` by default.
        eos_ids: every token that ends a reply, the file's own first.
        special_ids: tokens that are no text: `decode` skips them.
        guarded: token texts that ordinary text cannot turn into tokens.
        chat_templates: Jinja sources by name; "default" is the usual one.
        prefix_space: a space was put before the text, and `decode` takes it away again.
    """

    def __init__(self, vocabulary: Vocabulary, reread: Reread | None = None) -> None:
        self.bos_id = vocabulary.bos_id
        self.add_bos = vocabulary.add_bos and vocabulary.bos_id is not None
        self.eos_ids = vocabulary.eos_ids
        self.chat_templates = dict(vocabulary.templates)
        self._byte_level = vocabulary.byte_level
        self._byte_fallback = bool(vocabulary.options.get("byte_fallback"))
        self._added = {token.id: token for token in vocabulary.added}
        last = max(itertools.chain(vocabulary.vocab.values(), self._added), default=-1)
        self.vocab_size = last + 1
        ends = (*self.eos_ids, *(() if self.bos_id is None else (self.bos_id,)))
        self.special_ids = frozenset(t.id for t in vocabulary.added if t.special).union(ends)
        self.guarded = GuardedTexts(tuple(t.text for t in vocabulary.added if t.guarded))
        self.prefix_space = _adds_prefix_space(vocabulary)
        self._texts = TokenTexts(vocabulary.ordinary())
        self._kept_bytes = lru_cache(_NUM_KEPT)(self._bytes_of)
        self._reread = reread
        self._lock = threading.Lock()
        self._encoder = Encoder(vocabulary) if reread is None else None

    @staticmethod
    def from_directory(path: Path, *, encodes: Encodes = "now") -> Tokenizer:
        """Read `tokenizer.json` and the small files beside it.

        Most of a tokenizer's memory, and of the time to build it, is what only encoding needs.
        `encodes` says when that is built. Merges are checked no sooner.
        Raises ModelNotFoundError without a tokenizer.json, ModelFileError for a damaged one, and
        UnsupportedModelError for any other model than BPE.
        """
        with _refusing_damage(str(path)):
            return _made(read_folder(path), encodes, partial(read_folder, path))

    @staticmethod
    def from_gguf(
        metadata: Mapping[str, object],
        *,
        pre: str | None = None,
        cache: Path | None = None,
        encodes: Encodes = "now",
        reopen: Callable[[], Mapping[str, object]] | None = None,
    ) -> Tokenizer:
        """Rebuild the tokenizer that a GGUF file's metadata describes.

        `pre` overrides `tokenizer.ggml.pre`. `cache` is a folder that keeps the merges derived from
        a SentencePiece vocabulary (about a second for 262,000 pieces); a damaged entry is rebuilt.
        `encodes` is as in `from_directory`; for "rarely", `reopen` returns the metadata again.
        Raises ModelFileError for damaged metadata, UnsupportedModelError for an unknown kind.
        """
        again = reopen or (lambda: metadata)
        with _refusing_damage("the GGUF file"):
            vocabulary = read_metadata(metadata, pre, cache)
            return _made(vocabulary, encodes, lambda: read_metadata(again(), pre, cache))

    def encode(
        self, text: str, *, add_bos: bool = True, parse_special: bool = False, mark: str = ""
    ) -> list[int]:
        """Return the token ids of `text`, begun with exactly one BOS where the model wants one.

        With `parse_special` the texts of guarded tokens become those tokens; otherwise they are
        text like any other. `mark` is a character that is taken out of the text after guarded
        tokens were found: put into a token's text, it keeps that text from being found.
        Raises BadRequestError for text that is not valid Unicode (a lone surrogate).
        """
        _require_unicode(text)
        encoder = self._encoder or self._build_encoder()
        if parse_special:
            ids = encoder.encode_parsed(text, mark)
        else:
            ids = encoder.encode(text.replace(mark, "") if mark else text)
        if add_bos and self.add_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            ids.insert(0, self.bos_id)
        return ids

    def prepare(self) -> None:
        """Build what encoding needs, if nothing has yet; raises like the constructors."""
        if self._encoder is None:
            self._build_encoder()

    def _build_encoder(self) -> Encoder:
        with self._lock:
            if self._encoder is None:
                assert self._reread is not None
                with _refusing_damage("the model"):
                    self._encoder = Encoder(self._reread())
                self._reread = None
            return self._encoder

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of `ids`; bytes that are not UTF-8 become U+FFFD.

        The space that the tokenizer put before the text is taken away from its beginning.
        Raises InvalidParameterError for an id outside the vocabulary.
        """
        if skip_special_tokens:
            ids = [token for token in ids if token not in self.special_ids]
        joined = b"".join(map(self.token_bytes, ids))
        if self.prefix_space and ids and ids[0] not in self._added:
            joined = joined.removeprefix(b" ")
        return joined.decode("utf-8", "replace")

    def token_bytes(self, token: int) -> bytes:
        """Return the exact bytes that one token adds to a text; b"" for an id that has no token.

        A special token's bytes are its text. Raises InvalidParameterError outside the vocabulary.
        """
        return self._kept_bytes(token)

    def _bytes_of(self, token: int) -> bytes:
        text = self.token_text(token)
        added = self._added.get(token)
        if added is not None:
            spelled = text if self._byte_level or added.special else text.replace(SPACE, " ")
            return spelled.encode()
        if self._byte_level:
            try:
                return bytes(map(_BYTE_OF.__getitem__, text))
            except KeyError:  # a token that its file spells as plain text
                return text.encode()
        if self._byte_fallback and (match := BYTE_TOKEN.fullmatch(text)):
            return bytes([int(match[1], 16)])
        return text.replace(SPACE, " ").encode()

    def token_text(self, token: int) -> str:
        """Return the token as the vocabulary spells it ("Ġhello", "▁hello", "<0x0A>")."""
        if not 0 <= token < self.vocab_size:
            raise InvalidParameterError("A token id", token, f"between 0 and {self.vocab_size - 1}")
        added = self._added.get(token)
        return added.text if added is not None else self._texts[token]

    @property
    def bos_token(self) -> str:
        """The text of the BOS token, "" where there is none; chat templates write it."""
        return "" if self.bos_id is None else self.token_text(self.bos_id)

    @property
    def eos_token(self) -> str:
        """The text of the first end token, "" where there is none; chat templates write it."""
        return self.token_text(self.eos_ids[0]) if self.eos_ids else ""

    @property
    def chat_template(self) -> str | None:
        """The usual chat template's source, or None where the model has none."""
        return self.chat_templates.get("default")


def _require_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadRequestError(
            f"The text is not valid Unicode: a lone surrogate at character {error.start}."
        ) from None


# --- building


@contextmanager
def _refusing_damage(source: str) -> Iterator[None]:
    """Turn whatever the tokenizers library and odd types of values raise into one line."""
    try:
        yield
    except (ValueError, TypeError, OverflowError, KeyError, AttributeError) as error:
        raise damaged(f"{source}: {one_line(error)}") from None
    except Exception as error:
        if type(error) is Exception:  # the library raises bare exceptions for a wrong vocabulary
            raise damaged(f"{source}: {one_line(error)}") from None
        raise


def _made(vocabulary: Vocabulary, encodes: Encodes, reread: Reread) -> Tokenizer:
    if encodes == "now":
        return Tokenizer(vocabulary)
    return Tokenizer(vocabulary, reread if encodes == "rarely" else lambda: vocabulary)


def _adds_prefix_space(vocabulary: Vocabulary) -> bool:
    return any(
        node.get("prepend_scheme") in ("first", "always") or node.get("type") == "Prepend"
        for node in itertools.chain(nodes(vocabulary.normalizer), nodes(vocabulary.pre_tokenizer))
    )


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's spelling of bytes: printable ones as themselves, the others from U+0100 up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = (byte for byte in range(256) if byte not in set(printable))
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + place): byte for place, byte in enumerate(others)
    }


_BYTE_OF = _byte_alphabet()
