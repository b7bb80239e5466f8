"""A tokenizer's vocabulary from the metadata of a GGUF file.

Decides how each kind of model cuts words, which merges a SentencePiece vocabulary implies (its
file lists none) and what is wrong with damaged metadata. It reads no file but its own cache.

Invariant: what is read from the cache is what would have been derived; a damaged entry is ignored.
"""

import hashlib
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from octavo.errors import UnsupportedModelError, nearest, shorten
from octavo.weights.vocabulary import (
    BYTE_TOKEN,
    LOOKS_SPECIAL,
    SPACE,
    AddedToken,
    Json,
    Merges,
    Vocabulary,
    damaged,
    pairs_of,
)

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6  # tokenizer.ggml.token_type
# Tokens that end a turn. A file may name only one of them as its end; one that its own chat
# template writes ends a turn as well.
_TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>", "<|eot|>")


@dataclass(frozen=True)
class _Pre:
    """How a byte-level model cuts a text into words, and what goes with that kind."""

    regex: str | None  # None: GPT-2's own
    digits: bool = False  # every digit is a word
    nfc: bool = False
    add_bos: bool = False  # where the file does not say
    ignore_merges: bool = False  # a word that is a token is taken whole


_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_END = r"|\s*[\r\n]+|\s+(?!\S)|\s+"


def _word_regex(letters: str, digits: str, *, also: str = "") -> str:
    return (
        rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}{letters}]+|{digits}"
        rf"| ?[^\s\p{{L}}{letters}\p{{N}}]+[\r\n{also}]*{_END}"
    )


def _case_regex(digits: str, contraction: str = "") -> str:
    """Words end where capitals begin again."""
    upper, lower = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
    start = r"[^\r\n\p{L}\p{N}]?"
    return (
        rf"{start}{upper}*{lower}+{contraction}|{start}{upper}+{lower}*{contraction}"
        rf"|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*{_END}"
    )


_GPT2 = _Pre(regex=None)
_DIGITS = _Pre(regex=None, digits=True)
_THREE_DIGITS = _word_regex("", r"\p{N}{1,3}")
_LLAMA3 = _Pre(_THREE_DIGITS, add_bos=True, ignore_merges=True)
_QWEN2 = _Pre(_word_regex("", r"\p{N}"), nfc=True)
_GPT4O = _Pre(_case_regex(r"\p{N}{1,3}", f"{_CONTRACTION}?"))

PRE_TOKENIZERS: Mapping[str, _Pre] = {
    "default": _GPT2,
    "gpt-2": _GPT2,
    "gpt2": _GPT2,
    "olmo": _GPT2,
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "refact": _DIGITS,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama-bpe": _LLAMA3,
    "falcon3": _LLAMA3,
    "dbrx": _Pre(_THREE_DIGITS),
    "smaug-bpe": _Pre(_THREE_DIGITS),
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "qwen35": _Pre(_word_regex(r"\p{M}", r"\p{N}"), nfc=True),
    "tekken": _Pre(_case_regex(r"\p{N}"), add_bos=True, ignore_merges=True),
    "gpt-4o": _GPT4O,
    "llama4": _GPT4O,
}


def read_metadata(
    metadata: Mapping[str, object], pre: str | None, cache: Path | None
) -> Vocabulary:
    """Read the `tokenizer.*` keys; arguments and errors are those of `Tokenizer.from_gguf`."""
    kind = metadata.get("tokenizer.ggml.model")
    tokens = _column(metadata, "tokens", {str})
    if not tokens:
        raise damaged("tokenizer.ggml.tokens is missing or empty")
    if len(set(tokens)) != len(tokens):
        raise damaged("tokenizer.ggml.tokens names a token twice")
    types = _column(metadata, "token_type", {int}, len(tokens)) or [NORMAL] * len(tokens)
    ids = {name: _gguf_id(metadata, name, len(tokens)) for name in _GGUF_IDS}
    # Padding and unknown are left out: files name ordinary tokens for them, such as "!".
    named = (ids[name] for name in ("bos", "eos", "eot", "eom"))
    special = {token for token in named if token is not None}
    special.update(i for i, kind_ in enumerate(types) if kind_ in (CONTROL, UNKNOWN))
    marks = {
        i for i, text in enumerate(tokens) if text[:1] == "<" and LOOKS_SPECIAL.fullmatch(text)
    }
    marks.update(special, (i for i, kind_ in enumerate(types) if kind_ == USER_DEFINED))
    added = [AddedToken(i, tokens[i], i in special) for i in sorted(marks) if tokens[i]]
    templates = _gguf_templates(metadata)
    shared = {
        "added": added,
        "bos_id": ids["bos"],
        "eos_ids": _gguf_eos_ids(ids, added, templates),
        "templates": templates,
    }
    if kind == "gpt2":
        return _byte_level_parts(metadata, tokens, pre, shared)
    if kind == "llama":
        return _sentencepiece_parts(metadata, tokens, types, ids["unknown"], cache, shared)
    raise UnsupportedModelError(f"tokenizer.ggml.model is {shorten(kind)}, not 'gpt2' or 'llama'.")


_GGUF_IDS = ("bos", "eos", "eot", "eom", "unknown", "padding")


def _gguf_id(metadata: Mapping[str, object], name: str, count: int) -> int | None:
    token = metadata.get(f"tokenizer.ggml.{name}_token_id")
    if token is None or (type(token) is int and 0 <= token < count):
        return token
    raise damaged(f"tokenizer.ggml.{name}_token_id is {shorten(token)} of {count:,} tokens")


def _column(
    metadata: Mapping[str, object], name: str, kinds: set[type], count: int | None = None
) -> list[Any]:
    """An array of the metadata, [] where it is missing, with its type and length checked."""
    column = metadata.get(f"tokenizer.ggml.{name}")
    if column is None:
        return []
    if not isinstance(column, list) or set(map(type, column)) - kinds:
        raise damaged(f"tokenizer.ggml.{name} is not a list of {min(k.__name__ for k in kinds)}")
    if count is not None and len(column) != count:
        raise damaged(f"tokenizer.ggml.{name} has {len(column):,} entries for {count:,} tokens")
    return column


def _flag(metadata: Mapping[str, object], name: str, default: bool) -> bool:
    value = metadata.get(f"tokenizer.ggml.{name}", default)
    if not isinstance(value, bool):
        raise damaged(f"tokenizer.ggml.{name} is {shorten(value)}, not true or false")
    return value


def _gguf_templates(metadata: Mapping[str, object]) -> dict[str, str]:
    prefix = "tokenizer.chat_template"
    # By key first: to ask for an array decodes it.
    named = (key for key in metadata if key == prefix or key.startswith(prefix + "."))
    return {
        key.removeprefix(prefix).removeprefix(".") or "default": value
        for key in named
        if isinstance(value := metadata[key], str)
    }


def _gguf_eos_ids(
    ids: Mapping[str, int | None], added: Sequence[AddedToken], templates: Mapping[str, str]
) -> tuple[int, ...]:
    named = [ids[name] for name in ("eos", "eot", "eom")]
    written = [
        token.id
        for token in added
        if token.text in _TURN_ENDS and any(token.text in source for source in templates.values())
    ]
    return tuple(dict.fromkeys(token for token in (*named, *written) if token is not None))


def _byte_level_parts(
    metadata: Mapping[str, object], tokens: list[str], name: str | None, shared: Json
) -> Vocabulary:
    chosen = metadata.get("tokenizer.ggml.pre", "default") if name is None else name
    pre = PRE_TOKENIZERS.get(chosen) if isinstance(chosen, str) else None
    if pre is None:
        raise UnsupportedModelError(
            f"tokenizer.ggml.pre is {shorten(chosen)}, an unknown way to cut words."
            f"{nearest(str(chosen), PRE_TOKENIZERS)} Known: {', '.join(PRE_TOKENIZERS)}."
        )
    steps: list[Json] = [{"type": "Digits", "individual_digits": True}] if pre.digits else []
    if pre.regex is not None:
        pattern = {"Regex": pre.regex}
        steps.append({"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False})
    steps.append(
        {
            "type": "ByteLevel",
            "add_prefix_space": False,
            "trim_offsets": True,
            "use_regex": pre.regex is None,
        }
    )
    return Vocabulary(
        vocab=dict(zip(tokens, range(len(tokens)), strict=True)),
        merges=lambda: pairs_of(_column(metadata, "merges", {str}), shared["added"]),
        options={"ignore_merges": pre.ignore_merges},
        normalizer={"type": "NFC"} if pre.nfc else None,
        pre_tokenizer={"type": "Sequence", "pretokenizers": steps},
        byte_level=True,
        add_bos=_flag(metadata, "add_bos_token", pre.add_bos),
        **shared,
    )


def _sentencepiece_parts(
    metadata: Mapping[str, object],
    tokens: list[str],
    types: list[int],
    unknown: int | None,
    cache: Path | None,
    shared: Json,
) -> Vocabulary:
    scores = np.array(_column(metadata, "scores", {float, int}, len(tokens)), dtype=np.float64)
    if not len(scores) or not np.isfinite(scores).all():
        raise damaged("tokenizer.ggml.scores is missing or not finite")
    bytes_found = {text for text, kind in zip(tokens, types, strict=True) if kind == BYTE}
    wrong = next((text for text in bytes_found if not BYTE_TOKEN.fullmatch(text)), None)
    if wrong is not None or (bytes_found and len(bytes_found) != 256):
        found = f"the byte token {shorten(wrong)}" if wrong else f"{len(bytes_found)} byte tokens"
        raise damaged(f"it has {found}; there are 256, <0x00> to <0xFF>")
    guarded = {token.id for token in shared["added"]}
    usable = np.array(types) == NORMAL
    usable[list(guarded)] = False
    normalizers: list[Json] = [{"type": "Replace", "pattern": {"String": " "}, "content": SPACE}]
    if _flag(metadata, "add_space_prefix", True):
        normalizers.insert(0, {"type": "Prepend", "prepend": SPACE})
    else:  # runs of spaces are matched as SentencePiece spells them (a prefix would hide them)
        shared["added"] = [
            replace(token, normalized=" " in token.text and not token.guarded)
            for token in shared["added"]
        ]
    options: Json = {"byte_fallback": bool(bytes_found), "fuse_unk": True}
    if unknown is not None:
        options["unk_token"] = tokens[unknown]
    return Vocabulary(
        vocab=dict(zip(tokens, range(len(tokens)), strict=True)),
        merges=partial(_kept_merges, tokens, usable, scores, cache),
        options=options,
        normalizer={"type": "Sequence", "normalizers": normalizers},
        pre_tokenizer=None,
        byte_level=False,
        add_bos=_flag(metadata, "add_bos_token", True),
        **shared,
    )


def _derived_merges(tokens: list[str], usable: np.ndarray, scores: np.ndarray) -> np.ndarray:
    """Return the merges that a SentencePiece BPE vocabulary implies, as ids [num_merges, 2].

    SentencePiece joins whichever neighbours make the best-scored piece, so every way to cut a piece
    into two pieces is a merge, ranked by the piece's score; of one piece's cuts, the longest left
    part comes first (as in Hugging Face's conversion).
    """
    ids = {tokens[i]: i for i in np.flatnonzero(usable).tolist()}
    left, right, made = [], [], []
    find = ids.get
    for piece, whole in ids.items():  # the hot loop: 1.4 million cuts for Gemma
        for cut in range(len(piece) - 1, 0, -1):
            tail = find(piece[cut:])
            if tail is not None:
                head = find(piece[:cut])
                if head is not None:
                    left.append(head)
                    right.append(tail)
                    made.append(whole)
    order = np.argsort(-scores[np.array(made, dtype=np.int64)], kind="stable")
    return np.array([left, right], dtype=np.int32).T[order]


def _kept_merges(
    tokens: list[str], usable: np.ndarray, scores: np.ndarray, cache: Path | None
) -> Merges:
    """Derive the merges, or read them from `cache`, kept there under a digest of their inputs."""
    if cache is None:
        pairs = _derived_merges(tokens, usable, scores)
    else:
        digest = hashlib.sha256(b"octavo merges 1\0")
        for part in ("\0".join(tokens).encode(), usable.tobytes(), scores.tobytes()):
            digest.update(part)
        entry = cache / f"merges-{digest.hexdigest()[:32]}"
        found = _read_pairs(entry, len(tokens))
        pairs = _derived_merges(tokens, usable, scores) if found is None else found
        if found is None:
            _write_pairs(entry, pairs)
    text = tokens.__getitem__
    return list(zip(map(text, pairs[:, 0].tolist()), map(text, pairs[:, 1].tolist()), strict=True))


def _read_pairs(entry: Path, count: int) -> np.ndarray | None:
    """An entry is the SHA-256 of its pairs, then the pairs; None for an absent or damaged one."""
    try:
        content = entry.read_bytes()
    except OSError:
        return None
    body = memoryview(content)[32:]
    if len(body) % 8 or hashlib.sha256(body).digest() != content[:32]:
        return None
    pairs = np.frombuffer(body, dtype="<i4").reshape(-1, 2)
    return pairs if not pairs.size or (pairs.min() >= 0 and pairs.max() < count) else None


def _write_pairs(entry: Path, pairs: np.ndarray) -> None:
    """Write under another name and rename, so that no reader sees half an entry. A cache that
    cannot be written only costs time."""
    body = np.ascontiguousarray(pairs, dtype="<i4").tobytes()
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=entry.parent, prefix=".merges-")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(hashlib.sha256(body).digest() + body)
            os.replace(name, entry)
        except OSError:
            os.unlink(name)
    except OSError:
        return
