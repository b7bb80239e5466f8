"""The reference against logits of Hugging Face transformers, with float32 pages."""

import numpy as np
import pytest

from tests.executors.checkpoints import NAMES, Piece, batch, executor, golden

TABLES = [range(50), range(50, 100), range(100, 150)]


def prompts(name):
    """Each golden prompt: its ids and greedy continuation, positions and logits."""
    values = golden(name)
    for number in range(3):
        prefix = f"prompt{number}_"
        if prefix + "ids" in values:
            yield {key.removeprefix(prefix): values[key] for key in values if prefix in key}


def distance(ours, theirs):
    return np.abs(ours - theirs).max() / np.abs(theirs).max()


@pytest.mark.parametrize("name", NAMES)
def test_prefill_agrees_at_every_stored_position(name):
    run = executor(name)
    for prompt in prompts(name):
        ids = prompt["ids"]
        logits = run.logits(batch(Piece(ids, 0, len(ids), TABLES[0])))
        assert distance(logits[prompt["prefill_positions"]], prompt["prefill_logits"]) < 1e-4


@pytest.mark.parametrize("name", NAMES)
def test_decode_after_a_prompt_in_pages_agrees(name):
    run = executor(name)
    for prompt in prompts(name):
        ids = np.concatenate([prompt["ids"], prompt["decode_ids"]])
        length = len(prompt["ids"])
        steps = [Piece(ids, 0, length, TABLES[1])]
        steps += [Piece(ids, length + i, 1, TABLES[1]) for i in range(11)]
        rows = [run.logits(batch(step, rows=[step.count - 1]))[0] for step in steps]
        assert distance(np.array(rows), prompt["decode_logits"]) < 1e-4
        assert np.argmax(rows, axis=1).tolist() == prompt["decode_ids"].tolist()


@pytest.mark.parametrize("name", NAMES)
def test_decode_beside_the_prefill_of_another_sequence_agrees(name):
    run = executor(name)
    first, second = list(prompts(name))[:2]
    ids = np.concatenate([first["ids"], first["decode_ids"]])
    length, other = len(first["ids"]), second["ids"]
    half = len(other) // 2
    run.logits(batch(Piece(ids, 0, length, TABLES[0]), Piece(other, 0, half, TABLES[2])))
    rest = Piece(other, half, len(other) - half, TABLES[2])
    logits = run.logits(batch(Piece(ids, length, 1, TABLES[0]), rest))
    assert distance(logits[:1], first["decode_logits"][1:2]) < 1e-4
    assert distance(logits[-1:], second["decode_logits"][:1]) < 1e-4
    later = run.logits(batch(Piece(other, half, 1, TABLES[2]), Piece(ids, length, 2, TABLES[0])))
    assert distance(later[-1:], first["decode_logits"][2:3]) < 1e-4


@pytest.mark.parametrize("name", NAMES)
def test_float64_agrees_and_is_nearer_than_bfloat16_pages(name):
    prompt = next(prompts(name))
    step = batch(Piece(prompt["ids"], 0, len(prompt["ids"]), TABLES[0]))

    def error(**settings):
        logits = executor(name, **settings).logits(step)
        return distance(logits[prompt["prefill_positions"]], prompt["prefill_logits"])

    assert error(dtype=np.float64) < 1e-4 < error(kv_dtype="bfloat16") < 0.1
