"""Which block already holds these tokens.

Decides whether a stretch of tokens, after a certain beginning, has been computed before. A full
block is found by a SHA-256 over its parent's hash and its tokens, and its tokens are compared
too; the best part of a block is found among its parent's children. Knows neither sequences nor
reference counts.

Invariant: an entry's block holds exactly its tokens, computed after exactly its parent's beginning.
"""

import hashlib
from array import array
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

_TOKEN_BYTES = 4
# Evicted blocks whose hashes are remembered, the latest ones: 0.5 MB at most.
EVICTED_REMEMBERED = 4096


@dataclass(slots=True)
class Origin:
    """Which request computed a block, and when: seconds on the clock of whoever asks.

    Nobody changes one.
    """

    request_id: str
    computed_at: float


@dataclass(slots=True)  # frozen, it would take four times as long to make
class CacheEntry:
    """What one block holds: its packed tokens, after `parent`. No `block_hash` if not full.

    Nobody changes one.
    """

    parent: bytes
    tokens: bytes
    block_hash: bytes | None
    origin: Origin


UNKNOWN_ORIGIN = Origin("", 0.0)


def pack(token_ids: list[int]) -> bytes:
    """Return token ids as bytes, four each, so that they hash and compare quickly."""
    return array("I", token_ids).tobytes()


class PrefixCache:
    """Blocks by their content. Hashes are the same in every process with the same fingerprint."""

    def __init__(self, fingerprint: str = "") -> None:
        self._fingerprint = fingerprint
        self._roots: dict[tuple[str, ...], bytes] = {}
        self._by_hash: dict[bytes, int] = {}
        self._entries: dict[int, CacheEntry] = {}
        # Per parent, the children sorted by their tokens: of a sorted list, the entry that shares
        # the longest beginning with a key stands next to where the key would be inserted.
        self._children: dict[bytes, list[tuple[bytes, int]]] = {}
        # Hash -> when it was evicted, oldest first. A hash covers the salt, so nobody learns here
        # of what stood under another one.
        self._evicted: OrderedDict[bytes, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def root(self, extra_keys: tuple[str, ...]) -> bytes:
        """Return the parent of all first blocks with these extra keys (salt, adapter version)."""
        root = self._roots.get(extra_keys)
        if root is None:
            # A salt is any text: repr keeps ("a", "b") apart from ("ab",) and escapes surrogates.
            text = repr((self._fingerprint, *extra_keys))
            root = hashlib.sha256(text.encode()).digest()
            # Salts come from callers: forget them all now and then rather than grow without bound.
            if len(self._roots) >= 1024:
                self._roots.clear()
            self._roots[extra_keys] = root
        return root

    @staticmethod
    def hash_block(parent: bytes, tokens: bytes) -> bytes:
        """Return the hash of a full block that holds `tokens` after `parent`."""
        return hashlib.sha256(parent + tokens).digest()

    def find(self, block_hash: bytes, parent: bytes, tokens: bytes) -> int | None:
        """Return the block of this hash, if it really holds `tokens` after `parent`."""
        block = self._by_hash.get(block_hash)
        if block is None:
            return None
        entry = self._entries[block]
        return block if entry.parent == parent and entry.tokens == tokens else None

    def find_partial(self, parent: bytes, tokens: bytes) -> tuple[int | None, int]:
        """Return the child of `parent` that begins with most of `tokens`, and how many tokens."""
        children = self._children.get(parent)
        best: tuple[int | None, int] = (None, 0)
        if not children or not tokens:
            return best
        at = bisect_left(children, (tokens, -1))
        for packed, block in children[max(0, at - 1) : at + 1]:
            length = _common_tokens(packed, tokens)
            if length > best[1]:
                best = (block, length)
        return best

    def goes_on(self, parent: bytes, tokens: bytes, length: int) -> bool:
        """Whether a child of `parent` shares `length` of `tokens`, and then holds other tokens.

        length: of the best partial match, so that a child that goes on differs there.
        """
        children = self._children.get(parent, ())
        at = bisect_left(children, (tokens, -1))
        shared, end = tokens[: length * _TOKEN_BYTES], length * _TOKEN_BYTES
        near = children[max(0, at - 1) : at + 1]
        return any(packed[:end] == shared and len(packed) > end for packed, _ in near)

    def insert(
        self,
        block: int,
        parent: bytes,
        tokens: bytes,
        block_hash: bytes | None,
        origin: Origin = UNKNOWN_ORIGIN,
    ) -> None:
        """Record what `block` holds; where a block with this content is known, that one stays."""
        if block in self._entries or (block_hash is not None and block_hash in self._by_hash):
            return
        if block_hash is not None:
            self._by_hash[block_hash] = block
            self._evicted.pop(block_hash, None)
        self._entries[block] = CacheEntry(parent, tokens, block_hash, origin)
        siblings = self._children.get(parent)
        if siblings is None:
            self._children[parent] = [(tokens, block)]
        else:
            insort(siblings, (tokens, block))

    def remove(self, block: int) -> CacheEntry | None:
        """Forget `block`, which is about to be overwritten. Returns what was known of it."""
        entry = self._entries.pop(block, None)
        if entry is None:
            return None
        if entry.block_hash is not None:
            del self._by_hash[entry.block_hash]
        children = self._children[entry.parent]
        if len(children) == 1:
            del self._children[entry.parent]
        else:
            del children[bisect_left(children, (entry.tokens, block))]
        return entry

    def evict(self, blocks: Iterable[int], now: float) -> int:
        """As `remove`, but remember for a while that the content was here until `now`.

        Returns how many of the blocks were known.
        """
        known = [entry for block in blocks if (entry := self.remove(block)) is not None]
        evicted = self._evicted
        for entry in known:
            if entry.block_hash is not None:
                evicted[entry.block_hash] = now
                if len(evicted) > EVICTED_REMEMBERED:
                    evicted.popitem(last=False)
        return len(known)

    def forget_evicted(self) -> None:
        """Remember no eviction any more."""
        self._evicted.clear()

    def evicted_at(self, block_hash: bytes) -> float | None:
        """Return when the content of this hash was evicted, if that is remembered."""
        return self._evicted.get(block_hash)

    def origin_of(self, block: int) -> Origin:
        """Return who computed a findable block, and when."""
        return self._entries[block].origin

    def holds(self, block: int) -> bool:
        """Whether the block's content can be found."""
        return block in self._entries

    def check(self) -> None:
        """Raise AssertionError if the three indexes disagree."""
        hashed = {e.block_hash: b for b, e in self._entries.items() if e.block_hash is not None}
        assert hashed == self._by_hash, "hash index differs from the entries"
        children = sorted((e.parent, e.tokens, b) for b, e in self._entries.items())
        indexed = sorted((p, t, b) for p, kids in self._children.items() for t, b in kids)
        assert children == indexed, "child index differs from the entries"
        assert not self._evicted.keys() & self._by_hash.keys(), "an evicted hash can be found"


def _common_tokens(a: bytes, b: bytes) -> int:
    """Return how many leading tokens two packed lists share."""
    limit = min(len(a), len(b)) // _TOKEN_BYTES
    if a[: limit * _TOKEN_BYTES] == b[: limit * _TOKEN_BYTES]:
        return limit
    low, high = 0, limit  # the first `low` tokens are equal, the first `high` are not
    while high - low > 1:
        middle = (low + high) // 2
        if a[: middle * _TOKEN_BYTES] == b[: middle * _TOKEN_BYTES]:
            low = middle
        else:
            high = middle
    return low
