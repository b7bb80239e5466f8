from types import SimpleNamespace

import numpy as np
import pytest

from octavo.executors.executor import PromptRow, SampleRow
from octavo.executors.reference import prepare
from octavo.program.ops import ElementSizes
from octavo.program.program import Chunk
from octavo.request import Request, SamplingParams
from tests.executors.checkpoints import Piece, batch, executor, load

IDS = np.random.default_rng(3).integers(0, 300, 100)
TABLE = range(7)


def request(request_id="r", **params) -> Request:
    return Request(
        request_id=request_id,
        prompt_token_ids=IDS[:70].tolist(),
        params=SamplingParams(**params),
        max_tokens=8,
        seed=1,
    )


def test_sampled_rows_come_back_in_the_order_they_were_asked_for():
    greedy = request(temperature=0.0, logprobs=3)
    piece = Piece(IDS, 0, 100, TABLE)
    logits = executor("llama").logits(batch(piece))
    rows = [99, 3, 50, *range(60, 99)]  # more than one tile of logits
    samples = tuple(SampleRow(place, greedy, 0, rows[place] + 1, 0) for place in (2, 0, 40, 1, 1))
    result = executor("llama").submit(batch(piece, rows=rows, samples=samples)).result()
    expected = [int(logits[rows[sample.logit_row]].argmax()) for sample in samples]
    assert result.token_ids == expected
    assert [entry.token_id for entry in result.logprobs] == expected


def test_prompt_rows_report_the_known_token():
    piece = Piece(IDS, 0, 100, TABLE)
    logits = executor("llama").logits(batch(piece)).astype(np.float64)
    logprobs = logits - np.logaddexp.reduce(logits, axis=1, keepdims=True)
    known = tuple(PromptRow(i, "r", i + 1, int(IDS[i + 1]), 0) for i in (70, 5))
    result = executor("llama").submit(batch(piece, prompt_rows=known)).result()
    assert [entry.token_id for entry in result.prompt_logprobs] == [IDS[71], IDS[6]]
    expected = [logprobs[70, IDS[71]], logprobs[5, IDS[6]]]
    assert [entry.logprob for entry in result.prompt_logprobs] == pytest.approx(expected, abs=1e-9)


def test_step_without_logits_still_writes_pages():
    run = executor("llama")
    result = run.submit(batch(Piece(IDS, 0, 99, TABLE), rows=[])).result()
    assert (result.token_ids, result.logprobs, result.prompt_logprobs) == ([], [], [])
    whole = executor("llama").logits(batch(Piece(IDS, 0, 100, TABLE), rows=[99]))
    assert np.array_equal(run.logits(batch(Piece(IDS, 99, 1, TABLE))), whole)


def test_duration_is_what_the_given_clock_says():
    ticks = iter([10.0, 12.5])
    run = executor("llama", clock=lambda: next(ticks))
    assert run.submit(batch(Piece(IDS, 0, 4, TABLE))).result().duration == 2.5


def test_copies_are_done_in_order_and_before_anything_is_written():
    run = executor("llama")
    run.logits(batch(Piece(IDS, 0, 48, range(3))))
    fork = Piece(np.concatenate([IDS[:40], IDS[60:]]), 40, 8, [0, 1, 5])
    logits = run.logits(batch(fork, Piece(IDS, 48, 2, range(4)), copies=[(2, 4), (4, 5)]))
    again = fork._replace(start=0, count=48, table=range(20, 23))
    assert np.array_equal(logits[:8], executor("llama").logits(batch(again))[40:])
    straight = executor("llama").logits(batch(Piece(IDS, 0, 50, TABLE)))
    assert np.array_equal(logits[8:], straight[48:])


@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16"])
def test_exported_blocks_continue_in_another_executor(kv_dtype):
    source = executor("qwen3", kv_dtype=kv_dtype)
    source.logits(batch(Piece(IDS, 0, 96, range(6))))
    content = source.export_blocks(range(6))
    target = executor("qwen3", kv_dtype=kv_dtype)
    target.import_blocks([9, 3, 7, 30, 12, 11], content)
    step = Piece(IDS, 96, 4, [9, 3, 7, 30, 12, 11, 40])
    expected = source.logits(batch(step._replace(table=range(7))))
    assert np.array_equal(target.logits(batch(step)), expected)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("qwen3", {"kv_dtype": "bfloat16"}),
        ("qwen3", {"block_size": 32}),
        ("qwen3", {"weights_digest": "another"}),
        ("qwen3-f16", {"weights_digest": "another"}),
        ("llama", {}),
    ],
)
def test_blocks_of_another_model_or_format_are_refused(name, settings):
    content = executor("qwen3").export_blocks([0, 1])
    with pytest.raises(ValueError, match="another model, executor or KV format"):
        executor(name, **settings).import_blocks([0, 1], content)


def test_fingerprint_tells_what_decides_the_bits():
    prints = {
        executor("llama").fingerprint,
        executor("llama", kv_dtype="bfloat16").fingerprint,
        executor("llama", dtype=np.float64).fingerprint,
        executor("llama", weights_digest="another").fingerprint,
        executor("qwen2").fingerprint,
    }
    assert len(prints) == 5
    assert executor("llama").fingerprint == executor("llama", num_blocks=9).fingerprint


GOOD = batch(Piece(IDS, 5, 4, TABLE), Piece(IDS, 0, 2, [9]))
BAD = {
    "unknown token": ("token_ids", [1, 2, 3, 300, 5, 6], "token_ids must be from 0 to 299"),
    "negative token": ("token_ids", [1, 2, 3, -1, 5, 6], "token_ids must be from 0 to 299"),
    "block beyond the pool": ("block_tables", [[160], [9]], "block_tables must be from 0 to 159"),
    "negative block": ("block_tables", [[1], [-1]], "block_tables must be from 0 to 159"),
    "position beyond the table": ("positions", [5, 6, 7, 900, 0, 1], "positions must be from 0"),
    "gap in positions": ("positions", [5, 6, 8, 9, 0, 1], "positions must end"),
    "context that does not fit": ("context_lengths", [10, 2], "positions must end"),
    "rows without a chunk": ("chunk_starts", [0, 4, 5], "do not part 6 rows"),
    "empty chunk": ("chunk_starts", [0, 6, 6], "do not part 6 rows"),
    "logits of no row": ("logit_rows", [6], "logit_rows must be from 0 to 5"),
    "copy beyond the pool": ("copies", [[0, 160]], "copies must be from 0 to 159"),
}


@pytest.mark.parametrize(("field", "value", "problem"), BAD.values(), ids=BAD.keys())
def test_impossible_batch_arrives_as_an_error_and_writes_nothing(field, value, problem):
    fields = {name: getattr(GOOD, name) for name in GOOD.__slots__}
    run = executor("llama")
    future = run.submit(SimpleNamespace(**fields | {field: np.array(value, np.int32)}))
    assert problem in str(future.exception())
    assert isinstance(future.exception(), ValueError)
    assert not run.pages.array["numbers"].any()


def test_a_row_without_numbers_fails_its_own_request_and_no_other():
    weights = dict(load("mistral")[1])  # whose head has weights of its own
    weights["embedding"] = weights["embedding"].copy()
    weights["embedding"][IDS[0]] = np.nan
    bad, good = (request(request_id=name) for name in ("bad", "good"))
    samples = (SampleRow(0, bad, 0, 1, 0), SampleRow(1, good, 0, 1, 0))
    known = (PromptRow(0, "bad", 1, 5, 0), PromptRow(1, "good", 1, 5, 0))
    pieces = (Piece(IDS[:1], 0, 1, [0]), Piece(IDS[1:2], 0, 1, [1]))
    both = batch(*pieces, samples=samples, prompt_rows=known)
    result = executor("mistral", weights).submit(both).result()
    alone = batch(pieces[1], samples=(SampleRow(0, good, 0, 1, 0),))
    assert result.token_ids[1:] == executor("mistral").submit(alone).result().token_ids
    assert [report is None for report in result.prompt_logprobs] == [True, False]
    assert list(result.errors) == ["bad"]


@pytest.mark.parametrize("block_size", [0, -16, 24, 512])
def test_block_size_divides_a_segment(block_size):
    with pytest.raises(ValueError, match="block_size must divide 256"):
        executor("llama", block_size=block_size)


def test_prepared_program_is_priced_as_it_is_executed():
    program, weights = load("llama")
    prepared = prepare(program, weights.__getitem__, dtype=np.float64, kv_dtype="float32")
    sizes = prepared.sizes
    assert (sizes.weight("lm_head"), sizes.activation, sizes.kv) == (8.0, 8.0, 4.0)
    step = [Chunk(1, 10)]
    assert prepared.program.flops(step, 1) == program.flops(step, 1)
    assert isinstance(sizes, ElementSizes)
    assert prepare(program, weights.__getitem__, fused=False).program is program
    for name, shape in program.parameters.items():
        assert prepared.weights[name].shape == shape
