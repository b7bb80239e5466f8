"""When a request that waits would begin, from predicted work.

Decides what stands before it: prompts to be computed, chunk by chunk beside the streams, and, where
nothing is free, steps until running sequences finish. Knows neither the server's queue nor clocks.

Invariant: more work before a request never makes it begin sooner.
"""

from dataclasses import dataclass

from octavo.core.scheduler import LOOK_AHEAD, Scheduler
from octavo.cost.predictor import StepPredictor

# Tokens that an answer is expected to have while none has finished, unless it may have fewer.
USUAL_OUTPUT_TOKENS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """The steps to come, as predicted now. Times in seconds.

    decode_seconds: of a step in which the running sequences generate. chunk_tokens, chunk_seconds:
    of a prompt in a step beside them, and that step. num_pending_tokens: of running sequences'
    prompts. num_free_seats: sequences that may begin before another has finished.
    steps_per_seat: mean steps between two sequences that finish.
    """

    decode_seconds: float
    chunk_tokens: int
    chunk_seconds: float
    num_pending_tokens: int
    num_free_seats: int
    steps_per_seat: float

    def seconds_until(self, num_tokens: int, num_requests: int) -> float:
        """Return when one begins for whose sake so much begins first.

        num_tokens: of waiting prompts before it. num_requests: that wait before it.
        """
        chunk_steps = (self.num_pending_tokens + num_tokens) / self.chunk_tokens
        seats = max(0, num_requests + 1 - self.num_free_seats)
        more_steps = max(0.0, seats * self.steps_per_seat - chunk_steps)
        return chunk_steps * self.chunk_seconds + more_steps * self.decode_seconds


def look_ahead(scheduler: Scheduler, predictor: StepPredictor) -> Outlook:
    """Return what the steps to come look like, as things stand between two of them."""
    spans, num_pending = [], 0
    for sequence in scheduler.running:
        missing = len(sequence.token_ids) - sequence.num_computed
        if missing > 1:
            num_pending += missing
        else:
            spans.append((sequence.num_computed, 1))
    price = predictor.price(spans, len(spans))
    # Halfway through the prompts that wait, of which the first are those that matter.
    lengths = [len(s.token_ids) for s in scheduler.waiting[:LOOK_AHEAD]]
    start = sum(lengths) // (2 * len(lengths)) if lengths else 0
    most = scheduler.max_num_batched_tokens - len(spans)
    num_tokens = scheduler.room(spans, most, is_timed=bool(spans)).take(start, most, most + 1)
    return Outlook(
        decode_seconds=price.seconds,
        chunk_tokens=max(1, num_tokens),
        chunk_seconds=price.plus(start, max(1, num_tokens), 0).seconds,
        num_pending_tokens=num_pending,
        num_free_seats=scheduler.num_free_seats,
        steps_per_seat=_mean_output(scheduler) / max(1, len(scheduler.running)),
    )


def _mean_output(scheduler: Scheduler) -> float:
    """Return the tokens of an answer: of those that have finished, else as far as they may go."""
    counters = scheduler.counters
    if counters.num_finished:
        return counters.num_finished_tokens / counters.num_finished
    allowed = [min(USUAL_OUTPUT_TOKENS, s.request.max_tokens) for s in scheduler.running]
    return sum(allowed) / len(allowed) if allowed else 0.0
