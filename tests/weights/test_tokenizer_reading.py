"""When files are read: deferred, once, beside other threads, and merges out of a cache."""

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from octavo.errors import ModelFileError
from octavo.weights.tokenizer import Tokenizer
from tests.weights.vocabularies import (
    FOLDERS,
    GOLDEN,
    GPT2,
    PLAIN,
    TEXTS,
    TINY,
    TOKENIZERS,
    metadata,
)


@pytest.mark.parametrize("name", TINY)
def test_a_deferred_tokenizer_reads_its_metadata_again_at_the_first_text(name):
    reads = []

    def reopen():
        reads.append(name)
        return metadata(name)

    eager, deferred = (
        TOKENIZERS[name],
        Tokenizer.from_gguf(metadata(name), encodes="rarely", reopen=reopen),
    )
    everything = range(eager.vocab_size)
    assert [*map(deferred.token_bytes, everything)] == [*map(eager.token_bytes, everything)]
    assert [*map(deferred.token_text, everything)] == [*map(eager.token_text, everything)]
    assert (deferred.eos_ids, deferred.special_ids) == (eager.eos_ids, eager.special_ids)
    assert not reads
    for text in TEXTS[:-1]:
        for parse in (False, True):
            found = deferred.encode(text, parse_special=parse)
            assert found == eager.encode(text, parse_special=parse)
    assert reads == [name]


@pytest.mark.parametrize("name", FOLDERS)
def test_a_deferred_folder_is_read_again_at_the_first_text(name):
    folder = GOLDEN / "tiny" / name
    eager, deferred = (Tokenizer.from_directory(folder, encodes=when) for when in ("now", "rarely"))
    assert [*map(deferred.encode, TEXTS[:-1])] == [*map(eager.encode, TEXTS[:-1])]


def test_a_deferred_tokenizer_whose_file_was_damaged_since_says_so():
    reads = iter([metadata("gpt-2", merges=["no such"]), metadata("gpt-2")])
    tokenizer = Tokenizer.from_gguf(metadata("gpt-2"), encodes="rarely", reopen=lambda: next(reads))
    with pytest.raises(ModelFileError, match="damaged"):
        tokenizer.encode("text")
    assert tokenizer.encode("text") == GPT2.encode("text")


def test_threads_that_encode_first_read_once():
    reads = []
    tokenizer = Tokenizer.from_gguf(
        metadata("gpt-2"), encodes="rarely", reopen=lambda: reads.append(1) or metadata("gpt-2")
    )
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(tokenizer.encode, ["some text"] * 32))
    assert found == [GPT2.encode("some text")] * 32
    assert len(reads) == 1


@pytest.mark.parametrize("parse_special", [False, True])
def test_other_threads_run_while_a_long_text_is_encoded(parse_special):
    """With switching as good as off, another thread gets on only where the library lets it."""
    start, ran = threading.Event(), threading.Event()
    other = threading.Thread(target=lambda: start.wait() and ran.set())
    other.start()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000)
    try:
        start.set()
        for _ in range(50):  # once would do, were the machine idle
            GPT2.encode("some words " * 5_000, parse_special=parse_special)
            if ran.is_set():
                break
        assert ran.is_set()
    finally:
        sys.setswitchinterval(interval)
        other.join()


def test_importing_the_module_imports_no_tokenizer_library():
    check = "import sys, octavo.weights.tokenizer; print('tokenizers' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert run.stdout == "False\n"


# --- the cache of derived merges


def test_a_damaged_cache_entry_is_rebuilt(tmp_path):
    keys, text = metadata(PLAIN), TEXTS[10]
    expected = Tokenizer.from_gguf(keys, cache=tmp_path).encode(text)
    (entry,) = tmp_path.iterdir()
    sound = entry.read_bytes()
    for damaged in (b"", sound[:-1], sound[:40], b"x" * len(sound), sound[:-4] + b"\xff" * 4):
        entry.write_bytes(damaged)
        assert Tokenizer.from_gguf(keys, cache=tmp_path).encode(text) == expected
        assert entry.read_bytes() == sound
    assert list(tmp_path.iterdir()) == [entry]


def test_other_scores_have_their_own_cache_entry(tmp_path):
    scores = TINY[PLAIN]["metadata"]["tokenizer.ggml.scores"]
    Tokenizer.from_gguf(metadata(PLAIN), cache=tmp_path)
    Tokenizer.from_gguf(metadata(PLAIN, scores=[-s for s in scores]), cache=tmp_path)
    assert len(list(tmp_path.iterdir())) == 2


def test_a_cache_that_cannot_be_written_only_costs_time(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    assert Tokenizer.from_gguf(metadata(PLAIN), cache=blocked / "sub").encode("a")


def test_a_tokenizer_that_encodes_soon_reads_nothing_again():
    def reopen():
        raise AssertionError

    soon = Tokenizer.from_gguf(metadata("gpt-2"), encodes="soon", reopen=reopen)
    soon.prepare()
    soon.prepare()
    assert soon.encode("some text") == GPT2.encode("some text")


def test_damaged_merges_are_told_when_they_are_prepared():
    soon = Tokenizer.from_gguf(metadata("gpt-2", merges=["no such"]), encodes="soon")
    with pytest.raises(ModelFileError, match="damaged"):
        soon.prepare()
