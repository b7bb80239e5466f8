"""Text to token ids and back, for one model.

Decides where the one BOS goes and which exact bytes each token stands for, and keeps user text from
becoming the *guarded* tokens that only a chat template may write. It does not know chat templates'
language, stop strings or streams.

Invariant: `encode(text, parse_special=False)` never returns a guarded token's id, because the BPE
underneath neither matches nor contains those tokens; a pass of its own finds them.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from octavo.errors import BadRequestError, InvalidParameterError
from octavo.weights.gguf_vocabulary import read_metadata
from octavo.weights.guarded import GuardedTexts
from octavo.weights.vocabulary import (
    BYTE_TOKEN,
    SPACE,
    AddedToken,
    Json,
    Vocabulary,
    damaged,
    nodes,
    one_line,
    read_folder,
)

if TYPE_CHECKING:
    import tokenizers


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

    def __init__(self, vocabulary: Vocabulary) -> None:
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
        self._bpe = _build_bpe(vocabulary)
        self._bpe_after = _without_first_prefix(self._bpe, vocabulary)
        self._splitter, self._split_ids = _build_splitter(vocabulary.added)

    @staticmethod
    def from_directory(path: Path) -> Tokenizer:
        """Read `tokenizer.json` and the small files beside it.

        Raises ModelNotFoundError without a tokenizer.json, ModelFileError for a damaged one, and
        UnsupportedModelError for any other model than BPE.
        """
        with _refusing_damage(str(path)):
            return Tokenizer(read_folder(path))

    @staticmethod
    def from_gguf(
        metadata: Mapping[str, object], *, pre: str | None = None, cache: Path | None = None
    ) -> Tokenizer:
        """Rebuild the tokenizer that a GGUF file's metadata describes.

        `pre` overrides `tokenizer.ggml.pre`. `cache` is a folder that keeps the merges derived from
        a SentencePiece vocabulary (about a second for 262,000 pieces); a damaged entry is rebuilt.
        Raises ModelFileError for damaged metadata, UnsupportedModelError for an unknown kind.
        """
        with _refusing_damage("the GGUF file"):
            return Tokenizer(read_metadata(metadata, pre, cache))

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
        if parse_special:
            ids = self._encode_parsed(text, mark)
        else:
            text = text.replace(mark, "") if mark else text
            ids = self._bpe.encode(text, add_special_tokens=False).ids
        if add_bos and self.add_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            ids.insert(0, self.bos_id)
        return ids

    def _encode_parsed(self, text: str, mark: str) -> list[int]:
        ids: list[int] = []
        bpe = self._bpe
        found = self._splitter.encode(text, add_special_tokens=False)
        for split_id, (start, end) in zip(found.ids, found.offsets, strict=True):
            if split_id:
                ids.append(self._split_ids[split_id])
            else:
                piece = text[start:end].replace(mark, "") if mark else text[start:end]
                ids += bpe.encode(piece, add_special_tokens=False).ids
            bpe = self._bpe_after
        return ids

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
        return added.text if added is not None else self._bpe.id_to_token(token) or ""

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


def _build_bpe(vocabulary: Vocabulary) -> tokenizers.Tokenizer:
    """The BPE without its guarded tokens: they are neither matched nor in its vocabulary."""
    from tokenizers import AddedToken as LibraryToken
    from tokenizers import Tokenizer as LibraryTokenizer
    from tokenizers.models import BPE

    kept = [token for token in vocabulary.added if not token.guarded]
    vocab = dict(vocabulary.vocab)
    for token in vocabulary.added:
        if token.guarded and token.text != vocabulary.options.get("unk_token"):
            vocab.pop(token.text, None)
    # The library gives an added token the id that the vocabulary has for its text.
    vocab.update({token.text: token.id for token in kept})
    skeleton: Json = {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": vocabulary.normalizer,
        "pre_tokenizer": vocabulary.pre_tokenizer,
        "model": {"type": "BPE", "vocab": {}, "merges": []},
    }
    bpe = LibraryTokenizer.from_str(json.dumps(skeleton))
    bpe.model = BPE(vocab=vocab, merges=vocabulary.merges, **vocabulary.options)
    bpe.add_tokens(
        [
            LibraryToken(
                t.text,
                lstrip=t.lstrip,
                rstrip=t.rstrip,
                single_word=t.single_word,
                normalized=t.normalized,
                special=False,
            )
            for t in kept
        ]
    )
    return bpe


def _build_splitter(added: Iterable[AddedToken]) -> tuple[tokenizers.Tokenizer, list[int]]:
    """A tokenizer that knows only the added tokens: it cuts a text into them and what lies between.

    Its id 0 is a stretch of text; id n stands for `ids[n]`. Guarded tokens are matched in the text
    as it is, even where a file asks for the normalised text, since a prefix space would hide them.
    """
    from tokenizers import AddedToken as LibraryToken
    from tokenizers import Tokenizer as LibraryTokenizer
    from tokenizers.models import WordLevel

    rest = "\0text\0"
    matched = [token for token in added if token.guarded or not token.normalized]
    splitter = LibraryTokenizer(WordLevel({rest: 0}, unk_token=rest))
    splitter.add_tokens(
        [
            LibraryToken(
                t.text,
                lstrip=t.lstrip,
                rstrip=t.rstrip,
                single_word=t.single_word,
                normalized=False,
            )
            for t in matched
        ]
    )
    return splitter, [0, *(token.id for token in matched)]


def _without_first_prefix(
    bpe: tokenizers.Tokenizer, vocabulary: Vocabulary
) -> tokenizers.Tokenizer:
    """The same BPE for what follows a special token, where only a text's very beginning gets the
    prefix space (Metaspace's scheme "first")."""
    if not any(node.get("prepend_scheme") == "first" for node in nodes(vocabulary.pre_tokenizer)):
        return bpe
    source = json.loads(bpe.to_str())
    for node in nodes(source["pre_tokenizer"]):
        if node.get("prepend_scheme") == "first":
            node["prepend_scheme"] = "never"
    return type(bpe).from_str(json.dumps(source))


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
