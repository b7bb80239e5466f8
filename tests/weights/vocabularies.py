"""Tiny tokenizers of every kind, and folders with one of the library's own."""

import copy
import json
from pathlib import Path

import tokenizers
from hypothesis import settings
from tokenizers import models, pre_tokenizers

from octavo.weights.tokenizer import Tokenizer

GOLDEN = Path(__file__).parent.parent / "golden"
GOLDENS = json.loads((GOLDEN / "tokenizers.json").read_text())
TEXTS, TINY = GOLDENS["texts"], GOLDENS["tiny"]
BYTE_LEVEL = [name for name in TINY if "sentencepiece" not in name]
FOLDERS = sorted(path.parent.name for path in GOLDEN.glob("tiny/*/tokenizer.json"))
PREFIXED, PLAIN = "sentencepiece with a prefix space", "sentencepiece without"
quick = settings(deadline=None, max_examples=60)


def metadata(name: str, **changes: object) -> dict[str, object]:
    """A tiny model's metadata with keys changed; None takes a key away."""
    keys = {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    merged = {**copy.deepcopy(TINY[name]["metadata"]), **keys}
    return {key: value for key, value in merged.items() if value is not None}


TOKENIZERS = {name: Tokenizer.from_gguf(metadata(name)) for name in TINY}
GPT2 = TOKENIZERS["gpt-2"]


def write_folder(folder: Path, library: tokenizers.Tokenizer, **files: object) -> Path:
    folder.mkdir(exist_ok=True)
    library.save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def small_library() -> tokenizers.Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    library = tokenizers.Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.add_special_tokens(["<s>", "</s>"])  # 256, 257
    library.add_tokens(["<tool>"])  # 258, after the special ones
    library.add_special_tokens(["<end>"])  # 259
    return library
