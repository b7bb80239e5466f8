"""The `Sample` operation in NumPy: from one row of logits to one token and its log-probabilities.

Decides the order of the sampling parameters (vLLM's: allowed ids and mask, bad words, min_tokens,
bias, penalties, temperature, min_p, top_k, top_p, draw), every tie (the smaller id is the likelier)
and what a draw depends on. Knows no model and no text. It specifies the native sampler.

All arithmetic is float64 on exact copies of the float32 logits, with one fixed order of operations,
so that the native sampler has the same bits on every machine.
Invariant: the result depends on the row's logits and its `SampleRow` alone.
"""

import math
from collections.abc import Iterable
from collections.abc import Sequence as Ordered

import numpy as np
from numpy.typing import NDArray

from octavo.errors import OctavoError
from octavo.executors.executor import Batch, PromptRow, SampleRow, StepResult, TokenLogprobs
from octavo.request import SamplingParams

Floats = NDArray[np.floating]
Ids = NDArray[np.intp]

SEGMENT = 4096
# Any two different float32 are further apart than this temperature times 700, so a colder row has
# the same weights, 1 and 0, and no exponent overflows.
_COLDEST = 1e-60
# Sums keep so many lanes; every id of a segment adds to the lane of its remainder.
_LANES = 32
# e^r = 1 + r + r^2 p(r) with the least even error of degree 9 on |r| <= ln 2 / 2: 1.6e-17. The
# coefficients begin with that of r^9.
_LOWEST = -708.0
_LOG2_E, _LN2_HIGH, _LN2_LOW = 1.4426950408889634, 0.6931471803691238, 1.9082149292705877e-10
_POLYNOMIAL = (
    2.510038549551032e-08,
    2.7620088445409746e-07,
    2.7557268459997064e-06,
    2.4801521295954376e-05,
    0.00019841269863053618,
    0.0013888888917213717,
    0.008333333333330062,
    0.04166666666662413,
    0.16666666666666669,
    0.5000000000000001,
)
# Adding it rounds to a whole number, which the lowest bits of the sum then hold.
_ROUND = 1.5 * 2.0**52
_GROUP = 64
_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15


def sample_tiles(batch: Batch, tiles: Iterable[tuple[int, NDArray[np.float32]]]) -> StepResult:
    """Draw every token of a batch, and report on its prompts, as the logits come.

    tiles: (first, logits of the rows from `first` on) of `batch.logit_rows`, in order; a tile is
    not looked at again. A row whose logits are no numbers fails its own request alone.
    """
    samples, known = batch.samples, batch.prompt_rows
    result = StepResult([0] * len(samples), [None] * len(samples), [None] * len(known))
    to_draw, to_report = _by_logit_row(samples), _by_logit_row(known)
    for first, tile in tiles:
        while to_draw and samples[to_draw[-1]].logit_row < first + len(tile):
            place = to_draw.pop()
            row = samples[place]
            try:
                drawn = sample(tile[row.logit_row - first], row)
                result.token_ids[place], result.logprobs[place] = drawn
            except OctavoError as error:
                result.errors[row.request.request_id] = error
        while to_report and known[to_report[-1]].logit_row < first + len(tile):
            place = to_report.pop()
            asked = known[place]
            try:
                result.prompt_logprobs[place] = prompt_logprobs(
                    tile[asked.logit_row - first], asked
                )
            except OctavoError as error:
                result.errors[asked.request_id] = error
    if to_draw or to_report:
        raise ValueError("a row to sample is not among the batch's logit_rows")
    return result


def _by_logit_row(rows: Ordered[SampleRow] | Ordered[PromptRow]) -> list[int]:
    """Return the rows' places, the first logit row last: `pop` takes them in the tiles' order."""
    return sorted(range(len(rows)), key=lambda place: (rows[place].logit_row, place))[::-1]


def sample(logits: NDArray[np.float32], row: SampleRow) -> tuple[int, TokenLogprobs | None]:
    """Draw one token from `logits` (vocabulary,); report on it if the request asks for logprobs.

    Logits of -inf are tokens of probability 0. A row without a finite logit, or with NaN or +inf,
    raises `OctavoError`. If the parameters leave no token, bans give way: the answer is then the
    likeliest of `allowed_token_ids` that the mask allows (of all that the mask allows, if it
    allows none of those), whatever the temperature. A mask never gives way.
    """
    params = row.request.params
    raw_best = _checked_argmax(logits, row.request.request_id, row.position)
    values = _adjusted(logits, row)
    best = raw_best if values is logits else int(values.argmax())
    if values[best] == -math.inf:
        token_id = _least_bad(logits, row)
    elif params.temperature == 0:
        token_id = best
    else:
        ids, kept = _candidates(values, float(values[best]), params)
        u = uniform(row.request.seed, row.index, row.position)
        place = _draw(kept, float(values[best]), params.temperature, u)
        token_id = place if ids is None else int(ids[place])
    if params.logprobs is None:
        return token_id, None
    num_top = None if params.logprobs == -1 else params.logprobs
    return token_id, _logprobs(logits, float(logits[raw_best]), token_id, num_top)


def prompt_logprobs(logits: NDArray[np.float32], row: PromptRow) -> TokenLogprobs:
    """Report the log-probability of the known token `row.token_id` under `logits` (vocabulary,)."""
    best = _checked_argmax(logits, row.request_id, row.position)
    return _logprobs(logits, float(logits[best]), row.token_id, row.num_top)


def distribution(logits: NDArray[np.float32], row: SampleRow) -> NDArray[np.float64]:
    """Return the probabilities (vocabulary,) from which `sample` draws; a single 1 when greedy.

    All zeros where the parameters leave no token. Only tests and explanations need it.
    """
    values = _adjusted(logits, row)
    probabilities = np.zeros(len(values))
    best = int(values.argmax())
    if row.request.params.temperature == 0:
        probabilities[best] = values[best] > -math.inf
    elif values[best] > -math.inf:
        ids, kept = _candidates(values, float(values[best]), row.request.params)
        weights = _weights(kept, float(values[best]), row.request.params.temperature)
        probabilities[slice(None) if ids is None else ids] = weights / weights.sum()
    return probabilities


def uniform(seed: int, index: int, position: int) -> float:
    """Return a number in [0, 1) with 53 random bits that depends on these three integers alone.

    It is output `position` of the SplitMix64 generator (Steele, Lea and Flood 2014) whose state is
    mixed from seed and index; integers modulo 2**64, so the same on every platform.
    """
    state = _mix(_mix(seed + _GOLDEN) + (index + 1) * _GOLDEN)
    return (_mix(state + (position + 1) * _GOLDEN) >> 11) * 2.0**-53


def _mix(z: int) -> int:
    z &= _MASK
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & _MASK
    return z ^ (z >> 31)


# Before the temperature: what changes logits.


def _checked_argmax(logits: NDArray[np.float32], request_id: str, position: int) -> int:
    """Return the likeliest id. One pass also finds what is wrong: argmax stops at a NaN."""
    best = int(logits.argmax())
    if not math.isfinite(logits[best]):
        raise unusable(request_id, position, float(logits[best]))
    return best


def unusable(request_id: str, position: int, largest: float) -> OctavoError:
    """The error of a row whose `largest` logit is no number."""
    return OctavoError(
        f"The largest logit for token {position} of request {request_id} is {largest}, so "
        "no token can be drawn. The weights or the cache may be damaged; try float32 pages."
    )


def no_token_left(row: SampleRow) -> OctavoError:
    """The error of a row whose mask is empty."""
    return OctavoError(
        f"The grammar of request {row.request.request_id} allows no token at position "
        f"{row.position}."
    )


def _adjusted(logits: NDArray[np.float32], row: SampleRow) -> Floats:
    """Return the logits (vocabulary,) after bans, bias and penalties; banned is -inf.

    It is `logits` itself where nothing applies, which is the common case.
    """
    params = row.request.params
    banned = _banned(row)
    penalised = params.needs_history and len(row.history) > 0
    if (
        params.allowed_token_ids is None
        and row.mask is None
        and not (banned or params.logit_bias or penalised)
    ):
        return logits
    values: Floats = logits.astype(np.float64)
    if params.allowed_token_ids is not None:
        allowed = _known(params.allowed_token_ids, len(values))
        values = np.full(len(logits), -math.inf)
        values[allowed] = logits[allowed]
    if row.mask is not None:
        values[~unpacked(row.mask, len(values))] = -math.inf
    values[_known(banned, len(values))] = -math.inf
    for token_id, bias in (params.logit_bias or {}).items():
        if token_id < len(values):
            values[token_id] += bias
    if penalised:
        _penalise(values, row)
    return values


def unpacked(mask: NDArray[np.uint32], vocab_size: int) -> NDArray[np.bool_]:
    """Return a mask of packed bits (see `SampleRow.mask`) as one truth per token: (vocab_size,)."""
    if 32 * len(mask) < vocab_size:
        raise ValueError(f"a mask of {len(mask)} words is too short for {vocab_size} tokens")
    little = mask.astype("<u4", copy=False).view(np.uint8)
    return np.unpackbits(little, bitorder="little", count=vocab_size).view(np.bool_)


def _known(ids: Iterable[int], vocab_size: int) -> Ids:
    """Drop ids past the vocabulary: nothing can draw them, so banning them changes nothing."""
    return np.array([i for i in ids if i < vocab_size], dtype=np.intp)


def _banned(row: SampleRow) -> list[int]:
    """Ids that would complete a bad word, and end tokens that come too early."""
    banned = []
    num_generated = len(row.history) - len(row.request.prompt_token_ids)
    for *start, last in row.request.bad_word_ids:
        if len(start) <= max(num_generated, 0):
            ending = row.history[len(row.history) - len(start) :]
            if list(ending) == start:
                banned.append(last)
    if row.num_output < row.request.params.min_tokens:
        banned += row.request.stop_ids
    return banned


def _penalise(values: Floats, row: SampleRow) -> None:
    """Repetition counts prompt and output; frequency and presence, after it, only the output."""
    params = row.request.params
    if params.repetition_penalty != 1.0:
        seen = _known(set(row.history), len(values))
        old = values[seen]
        penalty = params.repetition_penalty
        values[seen] = np.where(old > 0, old / penalty, old * penalty)
    generated = _known(row.history[len(row.request.prompt_token_ids) :], len(values))
    if len(generated) and (params.frequency_penalty or params.presence_penalty):
        ids, counts = np.unique(generated, return_counts=True)
        values[ids] -= params.frequency_penalty * counts + params.presence_penalty


def _least_bad(logits: NDArray[np.float32], row: SampleRow) -> int:
    """The likeliest token that may be drawn: a ban gives way before a whitelist does."""
    allowed = np.unique(_known(row.request.params.allowed_token_ids or (), len(logits)))
    if row.mask is not None:
        permitted = np.flatnonzero(unpacked(row.mask, len(logits)))
        both = np.intersect1d(allowed, permitted, assume_unique=True)
        allowed = both if len(both) else permitted
        if not len(allowed):
            raise no_token_left(row)
    return int(allowed[logits[allowed].argmax()]) if len(allowed) else int(logits.argmax())


# From the temperature on: which tokens stay, and the draw.


def _weights(values: Floats, top: float, temperature: float) -> NDArray[np.float64]:
    """Return exp((values - top) / temperature): 1 for the likeliest token, 0 for a banned one."""
    exponents = values.astype(np.float64)
    exponents -= top
    if temperature != 1.0:
        exponents *= 1 / max(temperature, _COLDEST)
    return _exponentials(exponents)


def _exponentials(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return e^x for x <= 0 to within a unit in the last place; 0 below -708.

    x = n ln 2 + r, so e^x = 2^n e^r. NumPy's own differs between instruction sets.
    """
    inside = np.maximum(x, _LOWEST)
    shifted = inside * _LOG2_E + _ROUND
    n = shifted - _ROUND
    r = (inside - n * _LN2_HIGH) - n * _LN2_LOW
    first, *others = _POLYNOMIAL
    p = r * first
    for coefficient in others[:-1]:
        p += coefficient
        p *= r
    p += others[-1]
    p *= r * r
    p += r
    p += 1.0
    p.view(np.int64)[:] += shifted.view(np.int64) << 52
    p[x < _LOWEST] = 0.0
    return p


def _sum(weights: NDArray[np.float64]) -> float:
    """Add up a segment: each lane in order, then the lanes in order."""
    lanes = np.zeros((-(-len(weights) // _LANES), _LANES))
    lanes.reshape(-1)[: len(weights)] = weights
    return float(np.cumsum(np.add.reduce(lanes, axis=0))[-1])


def _running_sums(values: Floats, top: float, temperature: float) -> NDArray[np.float64]:
    """Return the weights' sum up to the end of each segment, merged left to right: (segments,)."""
    sums = [
        _sum(_weights(values[start : start + SEGMENT], top, temperature))
        for start in range(0, len(values), SEGMENT)
    ]
    return np.cumsum(sums, dtype=np.float64)


def _candidates(values: Floats, top: float, params: SamplingParams) -> tuple[Ids | None, Floats]:
    """Return the ids (ascending, None is all) that min_p, top_k and top_p keep, and their values.

    min_p and top_k both keep a beginning of the order by likelihood, so their order is free, and
    top_k on the values before the temperature breaks the same ties.
    """
    ids: Ids | None = None
    if 0 < params.top_k < len(values):
        ids = _largest(values, params.top_k)
        values = values[ids]
    if params.min_p > 0:
        # As a Python float the bound would be rounded to the values' float32.
        bound = np.float64(top + params.temperature * math.log(params.min_p))
        kept = np.flatnonzero(values >= bound)
        ids, values = kept if ids is None else ids[kept], values[kept]
    if params.top_p < 1:
        kept = _nucleus(values, top, params.temperature, params.top_p)
        ids, values = kept if ids is None else ids[kept], values[kept]
    return ids, values


def _nucleus(values: Floats, top: float, temperature: float, top_p: float) -> Ids:
    """Return the places (ascending) of the fewest likeliest tokens that together reach `top_p`.

    Tokens no heavier than their share of the rest, (1 - top_p) / len(values), hold at most that
    rest together, so the nucleus lies among the others, and only those are sorted.
    """
    total = float(_running_sums(values, top, temperature)[-1])
    share = (1 - top_p) * total / len(values)
    bound = np.float64(min(top, top + temperature * math.log(share)))
    near = values[np.flatnonzero(values >= bound)]
    descending = np.sort(near)[::-1]
    running = np.cumsum(_weights(descending, top, temperature))
    last = min(int(np.searchsorted(running, top_p * total)), len(running) - 1)
    return _first_reaching(values, descending[last], last + 1)


def _draw(values: Floats, top: float, temperature: float, u: float) -> int:
    """Return the first place at which the running sum of weights exceeds u times their total."""
    sums = _running_sums(values, top, temperature)
    target = u * float(sums[-1])
    segment = _first_above(sums, target)
    before = float(sums[segment - 1]) if segment else 0.0
    start = segment * SEGMENT
    weights = _weights(values[start : start + SEGMENT], top, temperature)
    return start + _first_above(np.cumsum(weights), target - before)


def _first_above(running: NDArray[np.float64], target: float) -> int:
    """Where `running` first exceeds `target`; if rounding lets none, where it reaches its end.

    Either place added something to the sum, so a token of weight 0 is never drawn.
    """
    place = int(np.searchsorted(running, target, side="right"))
    return place if place < len(running) else int(np.searchsorted(running, running[-1]))


# The largest values, and the reports.


def _largest(values: Floats, count: int) -> Ids:
    """Return the places, ascending, of the `count` largest values; of equal ones the first."""
    if not 0 < count < len(values):
        return np.arange(min(count, len(values)))
    near = values[np.flatnonzero(values >= _lower_bound(values, count))]
    return _first_reaching(values, np.partition(near, len(near) - count)[len(near) - count], count)


def _first_reaching(values: Floats, bound: float, count: int) -> Ids:
    """Return the first `count` places of values of at least `bound`; ties at `bound` give way."""
    places = np.flatnonzero(values >= bound)
    surplus = len(places) - count
    if surplus > 0:
        places = np.delete(places, np.flatnonzero(values[places] == bound)[-surplus:])
    return places


def _lower_bound(values: Floats, count: int) -> float:
    """Return a number that at least `count` values reach, found without partitioning all of them.

    The values fall into groups of 64; as many groups have their largest at or above the bound.
    """
    num_groups = len(values) // _GROUP
    if count > num_groups // 4:
        return -math.inf
    largest = values[: num_groups * _GROUP].reshape(_GROUP, num_groups).max(axis=0)
    return float(np.partition(largest, num_groups - count)[num_groups - count])


def _logprobs(
    logits: NDArray[np.float32], top: float, token_id: int, num_top: int | None
) -> TokenLogprobs:
    """Report on `token_id` and the `num_top` likeliest (None: all) under the raw distribution.

    -inf appears only for tokens of probability 0: where fewer than `num_top` others exist, or where
    `token_id` is one (a prompt may hold it).
    """
    log_total = math.log(_running_sums(logits, top, 1.0)[-1])
    own = float(logits[token_id])
    num_ahead = np.count_nonzero(logits > own) + np.count_nonzero(logits[:token_id] == own)
    places = _largest(logits, len(logits) if num_top is None else num_top)
    places = places[np.argsort(-logits[places], kind="stable")]
    return TokenLogprobs(
        token_id=token_id,
        logprob=own - top - log_total,
        rank=1 + int(num_ahead),
        top_ids=places.tolist(),
        top_logprobs=(logits[places].astype(np.float64) - top - log_total).tolist(),
    )
