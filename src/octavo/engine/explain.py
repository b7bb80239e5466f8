"""A life in words: what each part of it was, and a few sentences that tell the whole.

Decides the words alone; `lives` decides what happened. Invariant: nothing is told but numbers,
durations and reasons: no text, no token and no id of any request.
"""

from collections.abc import Iterator

from octavo.core.lookup import CacheLookup, CacheMiss
from octavo.engine.lives import Life, Part, Work

SHORTEST = 5e-5  # seconds worth a sentence
_WAITS = {
    "new": "for its turn",
    "preempted": "for its turn again",
    "blocks": "because no blocks were free",
    "max_num_seqs": "because as many sequences ran as may (max_num_seqs)",
}
_PARTS = {
    "grammar": "its grammar was compiled",
    "prefill": "steps that computed its prompt",
    "decode": "steps that drew its tokens",
    "recompute": "steps that computed what preemption had lost",
    "sat out": "steps that left it out, since others used their budget",
    "mask": "waiting for the mask of its structured output",
    "between": "between steps: planning, text, messages",
}


def explain(life: Life) -> list[str]:
    """Return the sentences that tell a life, in the order of its stages."""
    parts = {str(part.name): part for part in life.parts if not part.reason}
    return [
        *(f"Compiled its grammar for {duration(p.seconds)}." for p in [parts.get("grammar")] if p),
        *_waits(life, "queued"),
        *_cache(life),
        *_prefill(parts.get("prefill")),
        *_decode(life, parts.get("decode")),
        *_preemptions(life, parts.get("recompute")),
        *_rest(parts),
        _end(life),
    ]


def what(part: Part) -> str:
    """Return what a part of a life was, in a few words."""
    if part.name == "queued":
        return f"queued {because(part.reason)}"
    if part.name == "preempted":
        return f"preempted, waiting {because(part.reason)}"
    return _PARTS[part.name]


def because(reason: str) -> str:
    """Return why the scheduler lets a sequence wait."""
    return _WAITS.get(reason, f"because of {reason}")


def duration(seconds: float) -> str:
    """Return a time with two or three digits and its unit."""
    if seconds < 0.01:
        return f"{1e3 * seconds:.1f} ms"
    if seconds < 1:
        return f"{1e3 * seconds:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 3600 else f"{seconds / 3600:.1f} h"


def _waits(life: Life, name: str) -> Iterator[str]:
    for part in life.parts:
        if part.name == name:
            yield f"{name.capitalize()} {duration(part.seconds)} {because(part.reason)}."


# --- the cache ----------------------------------------------------------------------------------


def _cache(life: Life) -> Iterator[str]:
    lookup, total = life.cache, life.num_prompt_tokens
    if lookup is None:
        return
    assert life.admitted_at is not None
    why = _miss(lookup, life.admitted_at)
    if lookup.num_tokens:
        source = _source(lookup, life.admitted_at)
        end = f"; the rest missed because {why}" if why else ", all but the last"
        yield f"{lookup.num_tokens:,} of {total:,} prompt tokens came from {source}{end}."
    else:
        yield f"None of the {_count(total, 'prompt token')} was cached: {why}."
    if lookup.is_salted:
        yield "Only what was computed under its own cache salt was looked at."


def _source(lookup: CacheLookup, now: float) -> str:
    assert lookup.oldest is not None
    assert lookup.newest is not None
    newest, oldest = duration(now - lookup.newest), duration(now - lookup.oldest)
    when = newest if newest == oldest else f"{newest} to {oldest}"
    others = "another request" if lookup.num_sources == 1 else f"{lookup.num_sources} others"
    return f"blocks computed {when} before for {others}"


def _miss(lookup: CacheLookup, now: float) -> str:
    match lookup.miss:
        case CacheMiss.NOTHING:
            return ""
        case CacheMiss.DIFFERS:
            return f"the text differs at token {lookup.num_tokens + 1:,} from what is cached"
        case CacheMiss.ENDS if lookup.num_tokens:
            return "nothing cached goes on from there"
        case CacheMiss.ENDS:
            return "nothing that begins like it is cached"
        case CacheMiss.EVICTED:
            assert lookup.evicted_at is not None
            return f"their block was evicted {duration(now - lookup.evicted_at)} before"
        case CacheMiss.TOO_SHORT:
            return "a prompt of one token is too short"
        case CacheMiss.NOT_ASKED:
            return "it was not asked, since all rows of the prompt are wanted"
        case CacheMiss.OFF:
            return "prefix caching is off"


# --- the steps ----------------------------------------------------------------------------------


def _prefill(part: Part | None) -> Iterator[str]:
    if part is None or not part.work.num_steps:
        return
    steps = part.work.num_steps
    decodes = part.num_beside / steps
    beside = f" beside {_mean(decodes)} decodes" if decodes else ""
    yield (
        f"Prefill of {_count(part.num_tokens, 'token')} in {_count(steps, 'step')}{beside}: "
        f"{duration(part.seconds)}{_limit(part.work)}."
    )


def _decode(life: Life, part: Part | None) -> Iterator[str]:
    if life.is_pooled or not life.num_generated_tokens:
        return
    tokens = _count(life.num_generated_tokens, "token")
    samples = f" in {life.num_samples} samples" if life.num_samples > 1 else ""
    if part is None or not part.work.num_steps:
        yield f"{tokens}{samples}, with the last step of the prompt."
        return
    steps = part.work.num_steps
    batch = part.work.num_chunks / steps
    company = f" of {_mean(batch)} sequences" if batch > 1 else ""
    yield (
        f"{tokens}{samples}: {_count(steps, 'step')}{company} after the first token, "
        f"{duration(part.seconds / steps)} each{_limit(part.work)}."
    )


def _limit(work: Work) -> str:
    share = work.roofline_share
    if share is None:
        return ""
    if work.bound == "overhead":
        return f", bound by overhead, at {100 * share:.0f} % of the machine's limits"
    limit = "bandwidth" if work.bound == "memory" else "arithmetic"
    return f", {work.bound}-bound at {100 * share:.0f} % of the machine's {limit}"


def _preemptions(life: Life, recompute: Part | None) -> Iterator[str]:
    if not life.num_preemptions:
        return
    times = {1: "once", 2: "twice"}.get(life.num_preemptions, f"{life.num_preemptions} times")
    spent = f" in {duration(recompute.seconds)}" if recompute is not None else ""
    yield (
        f"Preempted {times}: {_count(life.num_recomputed_tokens, 'token')} recomputed{spent}, "
        f"{life.num_recovered_tokens:,} found in the cache again."
    )
    yield from _waits(life, "preempted")


def _rest(parts: dict[str, Part]) -> Iterator[str]:
    for name in ("sat out", "mask", "between"):
        part = parts.get(name)
        if part is not None and part.seconds > SHORTEST:
            yield f"{duration(part.seconds)} {_PARTS[name]}."


def _end(life: Life) -> str:
    spent = duration(life.until - life.arrival_time)
    if life.finish_reason is None:
        return f"It goes on, after {spent} in the engine so far."
    return f"Ended after {spent} in the engine: {life.finish_reason}."


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _mean(number: float) -> str:
    return f"{number:.1f}".removesuffix(".0")
