"""What the native executor refuses, so that the library reads and writes nothing astray."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.errors import UnsupportedModelError
from octavo.executors.executor import PromptRow, SampleRow
from octavo.request import Request, SamplingParams
from tests.executors.checkpoints import Piece, batch
from tests.executors.native import (
    SETS,
    RandomWeights,
    Table,
    bits,
    native,
    needs_library,
    network,
    token_ids,
)

pytestmark = needs_library

GOOD = batch(Piece(token_ids(9), 5, 4, range(2)), Piece(token_ids(9), 0, 2, [9, 3]))
INTS = {
    "unknown token": ("token_ids", [1, 2, 3, 200, 5, 6], "token_ids must be from 0 to 199"),
    "negative token": ("token_ids", [1, 2, 3, -1, 5, 6], "token_ids must be from 0 to 199"),
    "block beyond the pool": ("block_tables", [[96, 0], [9, 3]], "must be from 0 to 95"),
    "negative block": ("block_tables", [[1, 0], [9, -1]], "must be from 0 to 95"),
    "tables of too few chunks": ("block_tables", [[1, 0]], "block_tables has the shape (1, 2)"),
    "a flat table": ("block_tables", [1, 2], "block_tables has the shape (2,)"),
    "no table": ("block_tables", np.zeros((2, 0)), "positions must be from 0 to -1"),
    "position beyond the table": ("positions", [5, 6, 7, 64, 0, 1], "positions must be from 0"),
    "negative position": ("positions", [5, 6, 7, 8, -1, 0], "positions must be from 0"),
    "gap in positions": ("positions", [5, 6, 8, 9, 0, 1], "positions must end"),
    "too few positions": ("positions", [5, 6, 7, 8, 0], "positions has the shape (5,)"),
    "context that does not fit": ("context_lengths", [10, 2], "positions must end"),
    "context of the least number": ("context_lengths", [9, -(2**31)], "positions must end"),
    "too few contexts": ("context_lengths", [9], "has the shape"),
    "rows without a chunk": ("chunk_starts", [0, 4, 5], "do not part 6 rows"),
    "chunks of other rows": ("chunk_starts", [0, 4, 7], "chunk_starts must be from 0 to 6"),
    "chunks that go back": ("chunk_starts", [0, 2**31 - 1, 6], "chunk_starts must be from 0"),
    "empty chunk": ("chunk_starts", [0, 6, 6], "do not part 6 rows"),
    "no chunk starts": ("chunk_starts", [], "chunk_starts has the shape"),
    "logits of no row": ("logit_rows", [6], "logit_rows must be from 0 to 5"),
    "logits of a negative row": ("logit_rows", [-1], "logit_rows must be from 0 to 5"),
    "more logits than rows may be": ("logit_rows", [0] * 1201, "at most 1200 rows"),
    "state of no row": ("state_rows", [6], "state_rows must be from 0 to 5"),
    "more states than rows may be": ("state_rows", [0] * 1201, "at most 1200 rows"),
    "copy beyond the pool": ("copies", [[0, 96]], "copies must be from 0 to 95"),
    "copies that are no pairs": ("copies", [[0, 1, 2]], "copies has the shape"),
}
ARRAYS = [name for name in GOOD.__slots__ if isinstance(getattr(GOOD, name), np.ndarray)]


def with_field(field: str, value: np.ndarray) -> Any:
    fields = {name: getattr(GOOD, name) for name in GOOD.__slots__}
    return SimpleNamespace(**fields | {field: value})


@pytest.fixture(scope="module")
def small() -> Any:
    program = network(layers=1)
    return native(program, RandomWeights(program), SETS[0])


class TestBadInput:
    @pytest.mark.parametrize(("field", "value", "problem"), INTS.values(), ids=INTS.keys())
    def test_an_impossible_batch_arrives_as_an_error_and_writes_nothing(
        self, small, field, value, problem
    ):
        small.pages[...] = 0
        future = small.submit(with_field(field, np.array(value, np.int32)))
        assert isinstance(future.exception(), ValueError)
        assert problem in str(future.exception())
        assert not small.pages.any()

    @pytest.mark.parametrize("field", ARRAYS)
    def test_arrays_of_another_type_or_with_gaps_are_refused(self, small, field):
        value = np.asarray(getattr(GOOD, field))
        for wrong in (value.astype(np.int64), value.astype(np.float32), spread(value)):
            if wrong.dtype == np.int32 and wrong.flags.c_contiguous:
                continue  # nothing in it could have gaps
            error = small.submit(with_field(field, wrong)).exception()
            assert isinstance(error, ValueError)
            assert str(error) == f"{field} must be contiguous int32"

    @given(st.sampled_from(ARRAYS), st.integers(0, 7), st.integers(-2, 100))
    def test_the_library_refuses_a_changed_number_exactly_where_the_limits_do(
        self, small, field, place, value
    ):
        array = np.array(getattr(GOOD, field))
        if array.size:
            array.flat[place % array.size] = value
        changed = with_field(field, array)
        expected = None
        try:
            small._limits.check(changed)
        except ValueError as error:
            expected = str(error)
        refused = small.submit(changed).exception()
        assert (None if refused is None else str(refused)) == expected

    def test_a_chunk_without_rows_is_refused_though_all_others_fit(self, small):
        for starts in ([0, 4], [4, 0]):
            pieces = (Piece(token_ids(9), 0, count, [count]) for count in starts)
            error = small.submit(batch(*pieces)).exception()
            assert "do not part 4 rows" in str(error)

    def test_a_step_of_more_rows_than_there_is_room_for_is_refused(self):
        program = network(layers=1)
        run = native(program, RandomWeights(program), SETS[0], max_rows=8)
        ids = token_ids(9)
        assert np.isfinite(run.logits(batch(Piece(ids, 0, 8, [0])))).all()
        with pytest.raises(ValueError, match="at most 8 rows"):
            run.logits(batch(Piece(ids, 0, 9, [0])))

    def test_a_position_beyond_the_longest_sequence_is_refused(self):
        program = network(layers=1)
        run = native(program, RandomWeights(program), SETS[0], max_positions=40)
        ids = token_ids(41)
        assert np.isfinite(run.logits(batch(Piece(ids, 0, 40, [0, 1])))).all()
        with pytest.raises(ValueError, match="positions must be from 0 to 39"):
            run.logits(batch(Piece(ids, 0, 41, [0, 1])))

    def test_after_a_refusal_the_next_batch_is_computed(self, small):
        expected = bits(small.logits(GOOD))
        assert small.submit(with_field("token_ids", np.zeros(6))).exception()
        assert bits(small.logits(GOOD)) == expected

    def test_logits_of_nan_fail_their_own_request_and_no_other(self):
        program = network(vocab=60)
        table = np.ones((60, 64), np.float32)
        table[3] = np.nan
        run = native(program, Table(RandomWeights(program, "F32"), table), SETS[0])
        params = SamplingParams(temperature=0, max_tokens=4)
        requests = [
            Request(request_id=name, prompt_token_ids=[i], params=params, max_tokens=4, seed=0)
            for i, name in ((3, "bad"), (5, "good"))
        ]
        samples = tuple(SampleRow(i, r, 0, 1, 0) for i, r in enumerate(requests))
        known = tuple(PromptRow(i, r.request_id, 1, 2, 0) for i, r in enumerate(requests))
        pieces = [Piece(np.array([i]), 0, 1, [i]) for i in (3, 5)]
        result = run.submit(batch(*pieces, samples=samples, prompt_rows=known)).result()
        assert list(result.errors) == ["bad"]
        assert [report is None for report in result.prompt_logprobs] == [True, False]
        alone = run.logits(batch(pieces[1]))
        assert result.token_ids[1] == alone.argmax()

    @pytest.mark.parametrize(
        "settings",
        [
            {"block_size": 8},
            {"block_size": 24},
            {"block_size": 512},
            {"block_size": 0},
            {"kv_dtype": "int4"},
            {"kv_dtype": "auto"},
            {"num_threads": 0},
            {"max_rows": 0},
            {"max_positions": 0},
        ],
    )
    def test_settings_that_the_library_cannot_honour_are_refused(self, settings):
        program = network(layers=1)
        with pytest.raises(ValueError, match=r"block_size must divide 256|impossible"):
            native(program, RandomWeights(program), SETS[0], **settings)

    def test_an_instruction_set_that_is_not_there_is_refused(self):
        program = network(layers=1)
        with pytest.raises(ValueError, match="no instruction set neon"):
            native(program, RandomWeights(program), "neon")

    @pytest.mark.parametrize("head_dim", [8, 24, 40, 528])
    def test_heads_of_another_size_are_refused(self, head_dim):
        program = network(layers=1, head_dim=head_dim, heads=1, kv_heads=1)
        with pytest.raises(
            UnsupportedModelError, match=f"16 to 512 in steps of 16, not {head_dim}"
        ):
            native(program, RandomWeights(program), SETS[0])

    @pytest.mark.parametrize(
        ("shape", "settings"),
        [
            ({}, {"kv_dtype": "bfloat16"}),
            ({}, {"kv_dtype": "int8"}),
            ({}, {"block_size": 64}),
            ({}, {"weights_digest": "another"}),
            ({"head_dim": 32}, {}),
        ],
    )
    def test_blocks_of_another_model_or_format_are_refused(self, small, shape, settings):
        program = network(layers=1, **shape)
        other = native(program, RandomWeights(program), SETS[0], **settings)
        with pytest.raises(ValueError, match="another model, executor or KV format"):
            other.import_blocks([0, 1], small.export_blocks([0, 1]))

    def test_blocks_that_are_not_there_or_of_another_number_are_refused(self, small):
        for blocks in ([-1], [96], [0, 10**6]):
            with pytest.raises(ValueError, match="from 0 to 95"):
                small.export_blocks(blocks)
        with pytest.raises(ValueError, match="3 blocks take"):
            small.import_blocks([0, 1, 2], small.export_blocks([0, 1]))

    def test_closing_twice_does_nothing_and_a_step_afterwards_is_an_error(self):
        program = network(layers=1)
        run = native(program, RandomWeights(program), SETS[0], num_threads=3)
        run.logits(GOOD)
        run.close()
        run.close()
        assert run.submit(GOOD).exception() is not None


def spread(values: np.ndarray) -> np.ndarray:
    """The same numbers with a gap after each."""
    wide = np.zeros((*values.shape, 2), np.int32)
    wide[..., 0] = values
    return wide[..., 0]
