"""What the prefix cache had of a sequence's beginning, and why it had no more: in numbers alone.

Decides what may be told of a lookup. Knows neither blocks nor tokens.

Invariant: it tells nothing of what stands under another salt, not even that something does, and
neither tokens nor ids of other requests.
"""

import enum
from dataclasses import dataclass


class CacheMiss(enum.StrEnum):
    """Why the token after the last cached one had to be computed."""

    NOTHING = "nothing"
    """It is the last one, which is always computed."""
    DIFFERS = "differs"
    """What is cached after the same beginning goes on with another token."""
    ENDS = "ends"
    """Nothing that goes on from there is cached, or remembered as evicted."""
    EVICTED = "evicted"
    """Its block was cached, and gave way to other tokens."""
    TOO_SHORT = "too short"
    """A prompt of one token."""
    NOT_ASKED = "not asked"
    """Every row is wanted: prompt log-probabilities, or the mean of all states."""
    OFF = "off"
    """Prefix caching is off."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheLookup:
    """One look into the prefix cache, as a sequence was admitted. Times are in seconds.

    num_tokens: found. num_sources: requests that had computed them; oldest, newest: when, for the
    first and the last of their blocks by time. miss: why no more; evicted_at: when, if that is why.
    is_salted: only what was computed under the request's own salt was looked at.
    """

    num_tokens: int
    miss: CacheMiss
    num_sources: int = 0
    oldest: float | None = None
    newest: float | None = None
    evicted_at: float | None = None
    is_salted: bool = False
