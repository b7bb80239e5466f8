"""A tokenizer's vocabulary as data, and how it is read from a Hugging Face folder.

Decides what counts as special and what is *guarded*, and which of a folder's small files has the
say. It builds nothing and knows no GGUF.

Invariant: a `Vocabulary` was checked: its ids are unique and in range, and no merge makes a guarded
token. Only its merges are checked when they are read.
"""

import itertools
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from octavo.errors import ModelFileError, ModelNotFoundError, UnsupportedModelError, shorten

Json = dict[str, Any]
Merges = list[tuple[str, str]]

SPACE = "▁"  # how SentencePiece spells a space (U+2581)
BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
# Turn marks are guarded even where a careless file forgets to call them special.
LOOKS_SPECIAL = re.compile(r"<[|\uff5c][^<>]*[|\uff5c]>")


@dataclass(frozen=True)
class AddedToken:
    """A token that is matched in the text as a whole, before BPE sees the rest."""

    id: int
    text: str
    special: bool
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False
    normalized: bool = False

    @property
    def guarded(self) -> bool:
        """Whether only `parse_special=True` may find it in a text. A single character is text."""
        looks_special = self.special or LOOKS_SPECIAL.fullmatch(self.text) is not None
        return looks_special and len(self.text.strip()) > 1


@dataclass(frozen=True)
class Vocabulary:
    """What every source of a tokenizer is reduced to; `normalizer` and `pre_tokenizer` are written
    as in a tokenizer.json. merges: reads them, since most of the memory is theirs."""

    vocab: dict[str, int]
    merges: Callable[[], Merges]
    added: list[AddedToken]
    options: Json  # of the BPE model: unk_token, byte_fallback, ignore_merges, ...
    normalizer: Json | None
    pre_tokenizer: Json | None
    byte_level: bool
    bos_id: int | None
    add_bos: bool
    eos_ids: tuple[int, ...]
    templates: Mapping[str, str] = field(default_factory=dict)

    def ordinary(self) -> dict[str, int]:
        """Return the texts of tokens and their ids, without those of guarded tokens."""
        vocab = dict(self.vocab)
        for token in self.added:
            if token.guarded and token.text != self.options.get("unk_token"):
                vocab.pop(token.text, None)
        # The library gives an added token the id that the vocabulary has for its text.
        vocab.update({token.text: token.id for token in self.added if not token.guarded})
        return vocab


def nodes(tree: Json | None) -> Iterable[Json]:
    """A normaliser or pre-tokeniser and, in a sequence, its members."""
    if not isinstance(tree, dict):
        return
    yield tree
    for key in ("normalizers", "pretokenizers", "decoders", "processors"):
        for child in tree.get(key) or ():
            yield from nodes(child)


def one_line(error: Exception) -> str:
    """Return an error's message on one line of at most 160 characters."""
    return shorten(" ".join(str(error).split()), 160)


def damaged(detail: str) -> ModelFileError:
    """Return the error for a tokenizer that cannot be what a sound file holds."""
    return ModelFileError(f"The tokenizer is damaged: {detail}. Fetch the model again.")


_BPE_OPTIONS = (
    "unk_token",
    "continuing_subword_prefix",
    "end_of_word_suffix",
    "fuse_unk",
    "byte_fallback",
    "ignore_merges",
)


def read_folder(path: Path) -> Vocabulary:
    """Read `tokenizer.json` and the small files beside it; errors as `Tokenizer.from_directory`."""
    main = path / "tokenizer.json"
    if not main.is_file():
        raise ModelNotFoundError(f"{path} has no tokenizer.json.")
    tree, config = _read_json(main), _read_json(path / "tokenizer_config.json")
    names = _read_json(path / "special_tokens_map.json") | config
    model = tree.get("model")
    if not isinstance(model, dict):
        raise damaged("tokenizer.json has no model")
    if model.get("type", "BPE") != "BPE":
        raise UnsupportedModelError(f"A tokenizer of type {model['type']!r}: only BPE is known.")
    vocab = _checked_vocab(model.get("vocab"))
    ends = [_content(names.get(key)) for key in ("bos_token", "eos_token", "pad_token")]
    added = _hub_added_tokens(tree.get("added_tokens"), [text for text in ends if text])
    ids = vocab | {token.text: token.id for token in added}
    bos_id = ids.get(ends[0]) if ends[0] else None
    pre_tokenizer, decoder = tree.get("pre_tokenizer"), tree.get("decoder")
    parts_of_text = itertools.chain(nodes(pre_tokenizer), nodes(decoder))
    add_bos = config.get("add_bos_token")
    return Vocabulary(
        vocab=vocab,
        merges=partial(pairs_of, model.get("merges"), added),
        added=added,
        options={key: model[key] for key in _BPE_OPTIONS if model.get(key) is not None},
        normalizer=tree.get("normalizer"),
        pre_tokenizer=pre_tokenizer,
        byte_level=any(node.get("type") == "ByteLevel" for node in parts_of_text),
        bos_id=bos_id,
        add_bos=add_bos if isinstance(add_bos, bool) else _post_adds(tree, ends[0]),
        eos_ids=_hub_eos_ids(path, ids, ends[1], max(ids.values(), default=-1)),
        templates=_hub_templates(path, config),
    )


def _read_json(path: Path) -> Json:
    try:
        tree = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (ValueError, RecursionError) as error:
        raise damaged(f"{path.name} is not JSON ({one_line(error)})") from None
    if not isinstance(tree, dict):
        raise damaged(f"{path.name} holds no JSON object")
    return tree


def _content(token: object) -> str | None:
    """A special token is written as a string or as an object with its content."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _checked_vocab(vocab: object) -> dict[str, int]:
    if not isinstance(vocab, dict) or set(map(type, vocab.values())) - {int}:
        raise damaged("its vocabulary is not a table of token ids")
    if vocab and (min(vocab.values()) < 0 or max(vocab.values()) >= 1 << 31):
        raise damaged("it has a token id out of range")
    if len(set(vocab.values())) != len(vocab):
        raise damaged("two tokens have the same id")
    return vocab


def _hub_added_tokens(entries: object, ends: Sequence[str]) -> list[AddedToken]:
    flags = ("lstrip", "rstrip", "single_word", "normalized")
    added = []
    for entry in entries if isinstance(entries, list) else []:
        match entry:
            case {"content": str(text), "id": int(token)} if text and 0 <= token < 1 << 31:
                special = entry.get("special") is True or text in ends
                marks = {flag: entry.get(flag) is True for flag in flags}
                added.append(AddedToken(token, text, special, **marks))
            case _:
                raise damaged(f"an added token is {shorten(entry)}")
    if len({token.id for token in added}) != len(added):
        raise damaged("two added tokens have the same id")
    return added


def pairs_of(merges: object, added: Iterable[AddedToken]) -> Merges:
    """Return the merges, written as "left right" or [left, right], that make no guarded token."""
    guarded = {token.text for token in added if token.guarded}
    listed = merges if isinstance(merges, list) else [merges]
    # Half a million of them are no rarity: no match statement, no function per merge.
    split: list[Any] = [merge.split(" ") if type(merge) is str else merge for merge in listed]
    for merge, pair in zip(listed, split, strict=True):
        if type(pair) is not list or len(pair) != 2 or not (pair[0] and pair[1]):
            raise damaged(f"a merge is {shorten(merge)}, not a pair of tokens")
        if type(pair[0]) is not str or type(pair[1]) is not str:
            raise damaged(f"a merge is {shorten(merge)}, not a pair of tokens")
    return [
        (left, right)
        for left, right in split
        if not (left + right in guarded or left in guarded or right in guarded)
    ]


def _post_adds(tree: Json, text: str | None) -> bool:
    """Whether the post-processor's template begins with the token `text`."""
    for node in nodes(tree.get("post_processor")):
        match node:
            case {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": first}}, *_]}:
                return bool(text) and first == text
    return False


def _hub_eos_ids(path: Path, ids: dict[str, int], eos: str | None, last: int) -> tuple[int, ...]:
    """The tokenizer's EOS, then those of generation_config.json (else config.json)."""
    generation = _read_json(path / "generation_config.json").get("eos_token_id")
    if generation is None:
        generation = _read_json(path / "config.json").get("eos_token_id")
    listed = generation if isinstance(generation, list) else [generation]
    listed = [token for token in listed if token is not None]
    if any(type(token) is not int or not 0 <= token <= last for token in listed):
        raise damaged(f"its end tokens are {shorten(generation)}")
    own = [ids[eos]] if eos in ids else []
    return tuple(dict.fromkeys([*own, *listed]))


def _hub_templates(path: Path, config: Json) -> dict[str, str]:
    """Sources by name; a file of its own wins over tokenizer_config.json, as it does for others."""
    listed = config.get("chat_template")
    if listed is None:
        listed = _read_json(path / "chat_template.json").get("chat_template")
    if isinstance(listed, str):
        listed = [{"name": "default", "template": listed}]
    templates = {
        entry["name"]: entry["template"]
        for entry in (listed if isinstance(listed, list) else [])
        if isinstance(entry, dict)
        and isinstance(entry.get("name"), str)
        and isinstance(entry.get("template"), str)
    }
    files = {"default": path / "chat_template.jinja"}
    named = sorted((path / "additional_chat_templates").glob("*.jinja"))
    files |= {file.stem: file for file in named}
    for name, file in files.items():
        if file.is_file():
            templates[name] = file.read_text("utf-8", "replace")
    return templates
