"""The native sampler draws and reports exactly what its specification does, bit for bit."""

import itertools
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from octavo.executors.executor import Batch, PromptRow, SampleRow, StepResult
from octavo.executors.native_sampling import NativeSampling
from octavo.executors.sampling import SEGMENT, sample_tiles
from octavo.native import library
from tests.executors.checkpoints import Piece, batch
from tests.executors.native import SETS, RandomWeights, native, needs_library, network, token_ids
from tests.executors.rows import INF, make_row

pytestmark = needs_library
# In the order in which the library takes them.
ARRAYS = (
    "token_ids", "positions", "chunk_starts", "block_tables", "context_lengths", "copies",
    "state_rows", "logit_rows",
)  # fmt: skip
LARGEST = float(np.finfo(np.float32).max)


class Sampler:
    """The native sampler alone: a tape that selects rows of given logits and draws from them."""

    def __init__(self, logits: np.ndarray, isa: str = SETS[0], threads: int = 1, head_rows=64):
        assert library is not None
        self.logits = np.ascontiguousarray(logits, np.float32)
        self.head_rows = head_rows
        rows, vocab = self.logits.shape
        self.selected = np.zeros((head_rows, vocab), np.float32)
        self.sampling = NativeSampling(library, vocab)
        self.limits = library.Limits(1, 1, rows, rows, rows)
        self.tape = library.Tape(isa, 0, 1, 32, 1, 16, 2, rows, threads)
        for kind in (library.Kind.select_rows, library.Kind.sample):
            op = library.Operation(kind)
            op.x = self._value(self.logits if kind == library.Kind.select_rows else self.selected)
            op.out = self._value(self.selected)
            self.tape.add(op)

    def run(self, step: Batch) -> StepResult:
        draws = self.sampling.prepare(step)
        self.draw(step, draws)
        return self.sampling.collect(step, draws)

    def draw(self, step: Batch, draws: Any) -> None:
        arrays = (getattr(step, name) for name in ARRAYS)
        self.tape.sample(self.limits.step(*arrays), self.head_rows, draws)

    def _value(self, array: np.ndarray) -> Any:
        assert library is not None
        return library.Value(array.ctypes.data, array.shape[1], array.shape[1])


def step_of(rows: int, samples=(), known=(), wanted=None) -> Batch:
    piece = Piece(np.zeros(rows, np.int32), 0, rows, [0])
    return batch(piece, rows=wanted, samples=tuple(samples), prompt_rows=tuple(known))


def expected_of(logits: np.ndarray, step: Batch) -> StepResult:
    return sample_tiles(step, [(0, logits[step.logit_rows])])


def same(found: StepResult, expected: StepResult) -> bool:
    """Equal tokens, equal bits of log-probabilities, equal errors."""
    return (
        found.token_ids == expected.token_ids
        and found.logprobs == expected.logprobs
        and found.prompt_logprobs == expected.prompt_logprobs
        and {name: str(error) for name, error in found.errors.items()}
        == {name: str(error) for name, error in expected.errors.items()}
    )


# --- random rows and parameters ------------------------------------------------------------------

VOCABS = [1, 2, 31, 33, 255, 256, 257, 700, SEGMENT, SEGMENT + 1, 2 * SEGMENT + 300]


def hard_logits(kind: str, vocab: int, rng: np.random.Generator) -> np.ndarray:
    """Rows that go wrong where something is approximate."""
    normal = rng.standard_normal(vocab)
    if kind == "normal":
        return (3 * normal).astype(np.float32)
    if kind == "ties":
        return np.round(normal).astype(np.float32)
    if kind == "equal":
        return np.full(vocab, normal[0], np.float32)
    if kind == "flat":
        return (1e-3 * normal).astype(np.float32)
    if kind == "steep":
        return (300 * normal).astype(np.float32)
    if kind == "huge":
        return np.clip(normal * 1e38, -LARGEST, LARGEST).astype(np.float32)
    if kind == "denormal":
        return (normal * 1e-42).astype(np.float32)
    if kind == "zeros of both signs":
        return np.where(normal > 0, 0.0, -0.0).astype(np.float32)
    if kind == "ascending":
        return np.arange(vocab, dtype=np.float32)
    row = np.full(vocab, -INF, np.float32)
    if kind == "one finite":
        row[rng.integers(vocab)] = normal[0]
        return row
    row[rng.random(vocab) < 0.1] = 1.5
    row[rng.integers(vocab)] = {"mostly banned": 2.0, "nan": math.nan, "infinite": INF}.get(kind, 0)
    return row


KINDS = [
    "normal", "ties", "equal", "flat", "steep", "huge", "denormal", "zeros of both signs",
    "ascending", "one finite", "mostly banned", "nan", "infinite", "nothing",
]  # fmt: skip


def rarely(strategy: st.SearchStrategy[Any], usual: Any) -> st.SearchStrategy[Any]:
    return st.one_of(st.just(usual), strategy)


@st.composite
def rows(draw: st.DrawFn, vocab: int, logit_row: int) -> SampleRow:
    """Any parameters that a caller may send, ids past the vocabulary included."""
    ids = st.one_of(st.integers(0, vocab - 1), st.sampled_from([vocab, vocab + 1, 10**9]))
    known = st.lists(st.integers(0, vocab - 1), max_size=12)
    vocabulary = st.integers(0, vocab - 1)
    mask = None
    if draw(st.booleans()):
        words = -(-vocab // 32) + draw(st.integers(0, 1))
        density = draw(st.sampled_from([0.0, 0.02, 0.5, 1.0]))
        bits = np.random.default_rng(draw(st.integers(0, 99))).random(32 * words) < density
        mask = np.packbits(bits, bitorder="little").view(np.uint32)
    return make_row(
        draw(st.lists(vocabulary, min_size=1, max_size=8)),
        draw(known),
        logit_row=logit_row,
        seed=draw(st.integers(-(2**63), 2**64 - 1)),
        index=draw(st.integers(0, 3)),
        mask=mask,
        temperature=draw(st.sampled_from([0, 0, 1, 1.0, 0.7, 1e-300, 1e-9, 1e6, 2])),
        top_k=draw(st.sampled_from([0, -1, 1, 2, 20, 300, vocab, 2**63 - 1])),
        top_p=draw(st.sampled_from([1, 1.0, 0.9, 0.5, 1e-300, 1 - 2**-53, 0.25, 0.999])),
        min_p=draw(st.sampled_from([0, 0, 0.1, 1, 1e-9])),
        repetition_penalty=draw(rarely(st.floats(1e-6, 1e6), 1.0)),
        presence_penalty=draw(rarely(st.floats(-2, 2), 0)),
        frequency_penalty=draw(rarely(st.sampled_from([2, -2, 0.3]), 0)),
        min_tokens=draw(st.sampled_from([0, 5, 2**62])),
        stop_ids=draw(st.lists(ids, max_size=4)),
        logprobs=draw(st.sampled_from([None, None, 0, 1, 5, 20, -1])),
        logit_bias=draw(
            rarely(
                st.dictionaries(ids, st.sampled_from([-100, 100.0, 0.1, -1.5]), max_size=5), None
            )
        ),
        allowed_token_ids=draw(rarely(st.lists(ids, min_size=1, max_size=9), None)),
        bad_words=tuple(
            tuple(word)
            for word in draw(st.lists(st.lists(ids, min_size=1, max_size=3), max_size=4))
        ),
    )


@st.composite
def steps(draw: st.DrawFn) -> tuple[np.ndarray, Batch]:
    vocab = draw(st.sampled_from(VOCABS))
    rng = np.random.default_rng(draw(st.integers(0, 10**6)))
    kinds = draw(st.lists(st.sampled_from(KINDS), min_size=1, max_size=6))
    logits = np.stack([hard_logits(kind, vocab, rng) for kind in kinds])
    places = st.lists(st.integers(0, len(kinds) - 1), max_size=6)
    samples = [draw(rows(vocab, place)) for place in draw(places)]
    known = [
        PromptRow(
            place,
            f"p{place}",
            number + 1,
            draw(st.integers(0, vocab - 1)),
            draw(st.sampled_from([0, 1, 5, 20, None])),
        )
        for number, place in enumerate(draw(places))
    ]
    return logits, step_of(len(kinds), samples, known)


@pytest.mark.case("V48")
@settings(max_examples=150, deadline=None)
@given(case=steps(), isa=st.sampled_from(SETS), threads=st.sampled_from([1, 3]))
def test_every_draw_and_report_equals_the_specifications(case, isa, threads):
    logits, step = case
    assert same(Sampler(logits, isa, threads).run(step), expected_of(logits, step))


@pytest.mark.slow
@settings(max_examples=5_000, deadline=None)
@given(case=steps(), isa=st.sampled_from(SETS), threads=st.sampled_from([1, 3]))
def test_many_draws_and_reports_equal_the_specifications(case, isa, threads):
    logits, step = case
    assert same(Sampler(logits, isa, threads).run(step), expected_of(logits, step))


# --- chosen rows ---------------------------------------------------------------------------------

SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "temperature": {"temperature": 0.8},
    "top_p": {"top_p": 0.95},
    "top_p of a cold row": {"top_p": 0.9, "temperature": 0.3},
    "top_k": {"top_k": 40},
    "large top_k": {"top_k": 5000, "top_p": 0.99},
    "min_p": {"min_p": 0.05},
    "all filters": {"top_k": 50, "top_p": 0.9, "min_p": 0.01, "temperature": 1.3},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": -0.2},
    "bias": {"logit_bias": {3: 4.0, 9: -100.0}, "logprobs": 5},
    "logprobs": {"logprobs": 20},
    "all logprobs": {"logprobs": -1, "temperature": 0},
}


@pytest.mark.parametrize("scale", [0.01, 1.0, 6.0])
@pytest.mark.parametrize("asked", SETTINGS.values(), ids=SETTINGS.keys())
def test_rows_as_long_as_a_real_vocabulary_agree(asked, scale):
    logits = (np.random.default_rng(3).standard_normal((3, 49_152)) * scale).astype(np.float32)
    samples = [make_row((1, 2, 2), (5, 5, 7), logit_row=row, **asked) for row in range(3)]
    step = step_of(3, samples)
    expected = expected_of(logits, step)
    for isa in SETS:
        assert same(Sampler(logits, isa).run(step), expected), isa


@pytest.mark.parametrize("isa", SETS)
@pytest.mark.parametrize("apart", [5e-324, 2.2e-311, 1e-307, 1e-300])
def test_a_nucleus_of_values_hardly_apart_leaves_out_the_least(apart, isa):
    """Bins that divide their range would be narrower than a double can say."""
    samples = [
        make_row(output=(0,), position=position, presence_penalty=apart, top_p=top_p)
        for top_p in (1 - 2**-53, 0.95)
        for position in range(50)
    ]
    logits, step = np.zeros((1, 31), np.float32), step_of(1, samples)
    assert same(Sampler(logits, isa).run(step), expected_of(logits, step))


def test_a_step_that_draws_nothing_has_an_empty_result():
    logits = np.zeros((2, 5), np.float32)
    for wanted in ([0, 1], []):
        found = Sampler(logits).run(step_of(2, wanted=wanted))
        assert found == StepResult([], [])


@pytest.mark.case("V19")
@pytest.mark.case("V20")
def test_draws_over_many_positions_are_the_specifications():
    """u at every place of the generator: 2,000 draws, of which any wrong bit would move some."""
    logits = np.zeros((1, 1000), np.float32)
    base = make_row(seed=-7, index=2)
    samples = [replace(base, position=position * 7919) for position in range(2000)]
    step = step_of(1, samples)
    assert Sampler(logits).run(step).token_ids == expected_of(logits, step).token_ids


# --- the law -------------------------------------------------------------------------------------


class TestLaw:
    VOCAB = 2 * SEGMENT + 77
    LOGITS = (np.random.default_rng(8).standard_normal((70, VOCAB)) * 2).astype(np.float32)

    def rows(self) -> list[SampleRow]:
        kinds = list(SETTINGS.values())
        return [
            make_row((1, 2), (3, row), logit_row=row, **kinds[row % len(kinds)])
            for row in range(70)
        ]

    def alone(self, row: SampleRow) -> tuple[Any, Any]:
        logits = self.LOGITS[row.logit_row : row.logit_row + 1]
        found = Sampler(logits).run(step_of(1, [replace(row, logit_row=0)]))
        return found.token_ids[0], found.logprobs[0]

    @pytest.mark.case("V17")
    @pytest.mark.parametrize("threads", [1, 2, 5])
    @pytest.mark.parametrize("head_rows", [1, 3, 64])
    def test_a_row_draws_the_same_alone_and_in_any_batch_slice_and_number_of_threads(
        self, threads, head_rows
    ):
        samples = self.rows()
        order = np.random.default_rng(threads).permutation(70)
        shuffled = [samples[i] for i in order]
        found = Sampler(self.LOGITS, SETS[0], threads, head_rows).run(step_of(70, shuffled))
        alone = [self.alone(row) for row in shuffled]
        assert list(zip(found.token_ids, found.logprobs, strict=True)) == alone

    def test_every_instruction_set_draws_the_same(self):
        step = step_of(70, self.rows())
        results = [Sampler(self.LOGITS, isa).run(step) for isa in SETS]
        assert all(result == results[0] for result in results)

    @pytest.mark.case("V44")
    def test_prompt_and_sample_report_the_same_bits(self):
        sampled = (
            Sampler(self.LOGITS).run(step_of(70, [make_row(logit_row=3, logprobs=20)])).logprobs[0]
        )
        assert sampled is not None
        known = PromptRow(3, "p", 1, sampled.token_id, 20)
        assert Sampler(self.LOGITS).run(step_of(70, [], [known])).prompt_logprobs == [sampled]


# --- rows that fail, and bad input ---------------------------------------------------------------


class TestUnusableLogits:
    @pytest.mark.parametrize("threads", [1, 2])
    @pytest.mark.parametrize("bad", [math.nan, INF, -INF])
    @pytest.mark.parametrize("at", [0, 255, 256, 699])
    def test_only_the_request_of_a_row_without_numbers_fails(self, bad, at, threads):
        logits = np.random.default_rng(1).standard_normal((5, 700)).astype(np.float32)
        if bad == -INF:
            logits[2] = bad
        logits[2, at] = bad
        samples = [
            make_row(logit_row=row, temperature=row % 2, logprobs=1) for row in (0, 1, 2, 3, 4)
        ]
        known = [PromptRow(row, f"p{row}", 9, 5, 1) for row in (1, 2, 3)]
        step = step_of(5, samples, known)
        found = Sampler(logits, SETS[0], threads).run(step)
        assert sorted(found.errors) == ["p2", "r2"]
        assert same(found, expected_of(logits, step))

    def test_a_mask_without_a_token_fails_its_request_alone(self):
        logits = np.zeros((2, 40), np.float32)
        empty = np.zeros(2, np.uint32)
        step = step_of(2, [make_row(mask=empty, logprobs=1), make_row(logit_row=1, logprobs=1)])
        found = Sampler(logits).run(step)
        assert list(found.errors) == ["r0"]
        assert "allows no token" in str(found.errors["r0"])
        assert same(found, expected_of(logits, step))

    def test_a_nan_hides_behind_no_larger_logit(self):
        logits = np.full((1, 3000), 5.0, np.float32)
        logits[0, 2900] = math.nan
        for isa, first in itertools.product(SETS, (0, 1)):
            logits[0, 0] = 100.0 * first
            assert list(Sampler(logits, isa).run(step_of(1, [make_row()])).errors) == ["r0"]


class TestBadInput:
    LOGITS = np.zeros((2, 40), np.float32)

    @pytest.mark.parametrize("row", [-1, 2, 10**12, -(2**63)])
    def test_a_row_of_no_logits_is_an_error_and_not_a_token(self, row):
        for samples, known in (
            ([make_row(logit_row=row)], []),
            ([], [PromptRow(row, "p", 1, 9, 0)]),
        ):
            with pytest.raises(ValueError, match="not among the batch's logit_rows"):
                Sampler(self.LOGITS).run(step_of(2, samples, known))

    @pytest.mark.case("V48")
    @pytest.mark.parametrize("token_id", [-1, 40, 10**12])
    def test_a_known_token_past_the_vocabulary_is_an_error(self, token_id):
        with pytest.raises(ValueError, match="not in the vocabulary"):
            Sampler(self.LOGITS).run(step_of(2, [], [PromptRow(0, "p", 1, token_id, 0)]))

    @pytest.mark.parametrize(
        ("mask", "problem"),
        [
            (np.zeros(1, np.uint32), "too few words"),
            (np.zeros(0, np.uint32), "too few words"),
            (np.zeros(2, np.int64), "contiguous uint32"),
            (np.zeros(4, np.uint32)[::2], "contiguous uint32"),
        ],
    )
    def test_a_mask_of_another_shape_is_refused(self, mask, problem):
        with pytest.raises(ValueError, match=problem):
            Sampler(self.LOGITS).run(step_of(2, [make_row(mask=mask)]))

    def test_after_a_refusal_the_next_batch_is_drawn(self):
        run = Sampler(self.LOGITS)
        with pytest.raises(ValueError, match="logit_rows"):
            run.run(step_of(2, [make_row(logit_row=9)]))
        assert run.run(step_of(2, [make_row(temperature=0)])).token_ids == [0]

    def test_history_ids_past_the_vocabulary_change_nothing(self):
        row = make_row((1, 60), (2, 10**12), repetition_penalty=2.0, frequency_penalty=1.0)
        step = step_of(2, [row])
        assert same(Sampler(self.LOGITS).run(step), expected_of(self.LOGITS, step))


# --- in the executor -----------------------------------------------------------------------------


class TestExecutor:
    def test_a_step_of_several_slices_draws_what_the_specification_draws_from_its_logits(self):
        program = network(vocab=300)
        run = native(program, RandomWeights(program), SETS[0], num_threads=2)
        piece = Piece(token_ids(150, 300), 0, 150, range(5))
        samples = tuple(
            make_row((1,), (2,), logit_row=row, top_p=0.9, logprobs=3) for row in (149, 5, 70)
        )
        known = tuple(PromptRow(row, "p", row + 1, row, 2) for row in range(150))
        step = batch(piece, samples=samples, prompt_rows=known)
        logits = run.logits(step)
        assert same(run.submit(step).result(), expected_of(logits, step))

    def test_a_step_with_any_number_of_logit_rows_is_one_native_call(self):
        program = network(vocab=300)
        run = native(program, RandomWeights(program), SETS[0])
        tape, calls = run._tape, []

        def sample(*arguments):
            calls.append(arguments)
            tape.sample(*arguments)

        run._tape = SimpleNamespace(sample=sample)  # nothing else is there to be called
        known = tuple(PromptRow(row, "p", row + 1, row, 0) for row in range(200))
        step = batch(Piece(token_ids(200, 300), 0, 200, range(7)), prompt_rows=known)
        assert None not in run.submit(step).result().prompt_logprobs
        assert len(calls) == 1

    def test_parameters_cross_once_and_are_dropped_with_their_request(self):
        run = Sampler(np.zeros((3, 40), np.float32))
        rows = [make_row(logit_row=row) for row in range(3)]
        run.run(step_of(3, rows))
        before = dict(run.sampling._asked)
        run.run(step_of(3, rows[:2]))
        after = run.sampling._asked
        assert set(after) == {row.request for row in rows[:2]}
        assert all(after[request] is before[request] for request in after)

    def test_draws_keep_alive_the_parameters_they_were_given(self):
        run = Sampler(np.zeros((3, 40), np.float32))
        step = step_of(3, [make_row(temperature=0, allowed_token_ids=[17])])
        draws = run.sampling.prepare(step)
        run.sampling._asked.clear()
        run.draw(step, draws)
        assert draws.drawn()[0] == [17]
