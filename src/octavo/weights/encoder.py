"""Text to token ids: the BPE of the tokenizers library, built from a `Vocabulary`.

Decides that guarded tokens are found by a pass of their own, and which normaliser what follows one
gets. Knows neither BOS nor bytes of tokens.

Invariant: the BPE neither matches nor contains a guarded token.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import TYPE_CHECKING

from octavo.weights.vocabulary import AddedToken, Json, Vocabulary, nodes

if TYPE_CHECKING:
    import tokenizers


# The library lets other threads run only while it encodes a batch, which takes longer to begin.
LONG_TEXT = 1_000


class Encoder:
    """Encodes text. Safe to share between threads, which go on while a long text is encoded."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._bpe = _build_bpe(vocabulary)
        self._bpe_after = _without_first_prefix(self._bpe, vocabulary)
        self._splitter, self._split_ids = _build_splitter(vocabulary.added)

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text; guarded tokens in it are text like any other."""
        ids: list[int] = _encoding(self._bpe, text).ids
        return ids

    def encode_parsed(self, text: str, mark: str = "") -> list[int]:
        """Return the ids of a text in which guarded tokens are tokens.

        mark: a character that is taken out of the text once they were found.
        """
        ids: list[int] = []
        bpe = self._bpe
        found = _encoding(self._splitter, text)
        for split_id, (start, end) in zip(found.ids, found.offsets, strict=True):
            if split_id:
                ids.append(self._split_ids[split_id])
            else:
                piece = text[start:end].replace(mark, "") if mark else text[start:end]
                ids += _encoding(bpe, piece).ids
            bpe = self._bpe_after
        return ids


def _encoding(tokenizer: tokenizers.Tokenizer, text: str) -> tokenizers.Encoding:
    if len(text) < LONG_TEXT:
        return tokenizer.encode(text, add_special_tokens=False)
    (found,) = tokenizer.encode_batch([text], add_special_tokens=False)
    return found


def _build_bpe(vocabulary: Vocabulary) -> tokenizers.Tokenizer:
    """The BPE without its guarded tokens: they are neither matched nor in its vocabulary."""
    from tokenizers import AddedToken as LibraryToken
    from tokenizers import Tokenizer as LibraryTokenizer
    from tokenizers.models import BPE

    kept = [token for token in vocabulary.added if not token.guarded]
    skeleton: Json = {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": vocabulary.normalizer,
        "pre_tokenizer": vocabulary.pre_tokenizer,
        "model": {"type": "BPE", "vocab": {}, "merges": []},
    }
    bpe = LibraryTokenizer.from_str(json.dumps(skeleton))
    bpe.model = BPE(vocab=vocabulary.ordinary(), merges=vocabulary.merges(), **vocabulary.options)
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
