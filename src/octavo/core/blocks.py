"""Who owns which block of the KV pool.

Decides which physical block holds which stretch of a sequence: adopting cached prefixes, growing,
forking with copy-on-write, publishing computed blocks, freeing. Knows neither the order in which
sequences run nor what a block's bytes are.

Invariant: a block's reference count equals the number of block tables it stands in; it is in the
free list exactly when that is 0; and a block that may be written stands in one table only.
"""

from collections import OrderedDict
from collections.abc import Iterable
from typing import NamedTuple

from octavo.core.lookup import CacheLookup, CacheMiss
from octavo.core.prefix import Origin, PrefixCache, pack
from octavo.request import Request, Sequence


class BlockCopy(NamedTuple):
    """Copy every key and value of block `source` to block `destination` before the step writes."""

    source: int
    destination: int


class PrefixMatch(NamedTuple):
    """What the cache holds of a sequence's beginning: whole blocks, then a part of one more.

    miss, evicted_at: why it holds no more; see `CacheLookup`.
    """

    blocks: list[int]
    partial_block: int | None
    num_tokens: int
    miss: CacheMiss = CacheMiss.NOT_ASKED
    evicted_at: float | None = None


NO_MATCH = PrefixMatch([], None, 0)


class BlockPool:
    """Reference counts and the free list, least recently used first."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.ref_counts = [0] * num_blocks
        self.num_shared = 0  # blocks that stand in more than one table
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))

    @property
    def num_free(self) -> int:
        """Blocks that stand in no table; they may still hold cached content."""
        return len(self._free)

    def take(self, num_blocks: int) -> list[int]:
        """Remove the least recently used free blocks and return them with one reference each."""
        pop, counts = self._free.popitem, self.ref_counts
        blocks = [pop(last=False)[0] for _ in range(num_blocks)]
        for block in blocks:
            counts[block] = 1
        return blocks

    def share(self, block: int) -> None:
        """Add a reference, reviving the block if it was free."""
        if self.ref_counts[block] == 0:
            del self._free[block]
        self.ref_counts[block] += 1
        self.num_shared += self.ref_counts[block] == 2

    def release(self, block: int, *, is_cached: bool) -> None:
        """Drop a reference. A block without cached content is the first to be taken again."""
        self.ref_counts[block] -= 1
        self.num_shared -= self.ref_counts[block] == 1
        if self.ref_counts[block] == 0:
            self._free[block] = None
            if not is_cached:
                self._free.move_to_end(block, last=False)

    def touch(self, block: int) -> None:
        """Make the block, if it is free, the most recently used."""
        if block in self._free:
            self._free.move_to_end(block)

    def is_free(self, block: int) -> bool:
        """Whether the block stands in the free list."""
        return block in self._free


class BlockManager:
    """Block tables of all running sequences over one pool.

    num_blocks: size of the pool; block_size: tokens per block. fingerprint: what beside tokens
    decides a block's bytes (model, formats, executor), so that hashes of different engines differ.
    now: seconds, set by whoever has a clock; what is computed and evicted is stamped with it.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        fingerprint: str = "",
        enable_prefix_caching: bool = True,
    ) -> None:
        self.block_size = block_size
        self.pool = BlockPool(num_blocks)
        self.cache = PrefixCache(fingerprint)
        self.enable_prefix_caching = enable_prefix_caching
        self.num_reserved = 0
        self.num_evicted = 0
        self.now = 0.0
        self._copies: list[BlockCopy] = []
        self._lookups: list[CacheLookup] = []

    @property
    def num_available(self) -> int:
        """Free blocks that are promised to nobody."""
        return self.pool.num_free - self.num_reserved

    def blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def drain_copies(self) -> list[BlockCopy]:
        """Return the copies that became due since the last call; they must run in this order."""
        copies, self._copies = self._copies, []
        return copies

    def drain_lookups(self) -> list[CacheLookup]:
        """Return what the cache had of each sequence admitted since the last call, in order."""
        lookups, self._lookups = self._lookups, []
        return lookups

    # --- entering and leaving -------------------------------------------------------------------

    def searches(self, request: Request) -> bool:
        """Whether the cache is asked for the beginning of this request."""
        needs_every_row = request.params.prompt_logprobs is not None or request.pooling == "mean"
        return self.enable_prefix_caching and not needs_every_row

    def match(self, sequence: Sequence) -> PrefixMatch:
        """Find the longest cached beginning of `sequence`, leaving it one token to compute.

        A sequence whose prompt log-probabilities or mean state are wanted matches nothing: blocks
        hold neither.
        """
        request = sequence.request
        if not self.searches(request):
            return NO_MATCH
        size, tokens = self.block_size, sequence.token_ids
        limit = len(tokens) - 1
        parent = self.cache.root(request.extra_keys)
        blocks: list[int] = []
        missing: bytes | None = None
        for i in range(limit // size):
            packed = pack(tokens[i * size : (i + 1) * size])
            block_hash = self._hash_of(sequence, i, parent, packed)
            block = self.cache.find(block_hash, parent, packed)
            if block is None:
                missing = block_hash
                break
            blocks.append(block)
            parent = block_hash
        start = len(blocks) * size
        wanted = pack(tokens[start : min(limit, start + size)])
        partial, length = self.cache.find_partial(parent, wanted)
        evicted_at = None if missing is None else self.cache.evicted_at(missing)
        if start + length == limit:
            miss = CacheMiss.NOTHING if limit else CacheMiss.TOO_SHORT
        elif evicted_at is not None:
            miss = CacheMiss.EVICTED
        else:
            goes_on = self.cache.goes_on(parent, wanted, length)
            miss = CacheMiss.DIFFERS if goes_on else CacheMiss.ENDS
        return PrefixMatch(blocks, partial, start + length, miss, evicted_at)

    def admit(self, sequence: Sequence, match: PrefixMatch, length: int, headroom: int) -> bool:
        """Give `sequence` its matched blocks and reserve the rest of `length` tokens.

        Returns False, changing nothing, unless `headroom` unpromised blocks are left besides.
        """
        num_revived = sum(self.pool.is_free(block) for block in match.blocks)
        num_new = self.blocks_for(length) - len(match.blocks)
        if self.num_available - num_revived < num_new + headroom:
            return False
        self._lookups.append(self._describe(sequence, match))
        for block in match.blocks:
            self.pool.share(block)
        sequence.block_table = list(match.blocks)
        self._reserve(sequence, num_new)
        if match.partial_block is not None:
            self.pool.touch(match.partial_block)
            (destination,) = self._take_for(sequence, 1)
            self._copies.append(BlockCopy(match.partial_block, destination))
            sequence.block_table.append(destination)
        sequence.num_computed = match.num_tokens
        sequence.capacity = len(sequence.block_table) * self.block_size
        return True

    def _describe(self, sequence: Sequence, match: PrefixMatch) -> CacheLookup:
        found = [*match.blocks, *([] if match.partial_block is None else [match.partial_block])]
        origins = [self.cache.origin_of(block) for block in found]
        miss = match.miss if self.enable_prefix_caching else CacheMiss.OFF
        return CacheLookup(
            num_tokens=match.num_tokens,
            miss=miss,
            num_sources=len({origin.request_id for origin in origins}),
            oldest=min((origin.computed_at for origin in origins), default=None),
            newest=max((origin.computed_at for origin in origins), default=None),
            evicted_at=match.evicted_at if miss is CacheMiss.EVICTED else None,
            is_salted=bool(sequence.request.extra_keys),
        )

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Let `child` share all of `parent`'s blocks; whoever writes to one copies it first."""
        for block in parent.block_table:
            self.pool.share(block)
        child.block_table = list(parent.block_table)
        child.num_computed = parent.num_computed
        child.block_hashes = list(parent.block_hashes)
        parent.capacity = child.capacity = 0

    def free(self, sequence: Sequence, *, publish: bool = True) -> None:
        """Take all blocks from `sequence`; what it computed stays findable until it is reused.

        publish: False where the last step failed, so that the tail's content is in doubt.
        """
        if publish and sequence.num_computed % self.block_size:
            self._publish_partial(sequence)
        # Tails go first into the free list, so that they are evicted before the heads they need.
        for block in reversed(sequence.block_table):
            self.pool.release(block, is_cached=self.cache.holds(block))
        self._reserve(sequence, 0)
        sequence.block_table = []
        sequence.num_computed = 0
        sequence.capacity = 0

    # --- growing and publishing -----------------------------------------------------------------

    def grow(self, sequence: Sequence, length: int) -> bool:
        """Make the slots [num_computed, length) of `sequence` its own to write.

        Returns False, changing nothing, if the pool cannot give the blocks.
        """
        size, table = self.block_size, sequence.block_table
        tail = sequence.num_computed // size
        is_shared = tail < len(table) and self.pool.ref_counts[table[tail]] > 1
        num_new = self.blocks_for(length) - len(table)
        # Reservations count the blocks of a whole sequence, and a copy on write comes on top.
        if max(0, num_new - sequence.num_reserved) + is_shared > self.num_available:
            return False
        if is_shared:
            source, (table[tail],) = table[tail], self._take(1)
            self._copies.append(BlockCopy(source, table[tail]))
            self.pool.release(source, is_cached=self.cache.holds(source))
        if num_new > 0:
            table += self._take_for(sequence, num_new)
        sequence.capacity = len(table) * size
        return True

    def publish(self, sequence: Sequence, first: int, end: int) -> None:
        """Make the sequence's blocks [first, end), full and computed, findable by their tokens."""
        if not self.enable_prefix_caching:
            return
        size, tokens, hashes = self.block_size, sequence.token_ids, sequence.block_hashes
        parent = hashes[first - 1] if first else self.cache.root(sequence.request.extra_keys)
        origin = Origin(sequence.request.request_id, self.now)
        for i in range(first, end):
            packed = pack(tokens[i * size : (i + 1) * size])
            block_hash = self._hash_of(sequence, i, parent, packed)
            self.cache.insert(sequence.block_table[i], parent, packed, block_hash, origin)
            parent = block_hash

    def forget(self) -> None:
        """Make no block findable any more; those in use stay in use."""
        for block in range(self.pool.num_blocks):
            self.cache.remove(block)
        self.cache.forget_evicted()

    def _publish_partial(self, sequence: Sequence) -> None:
        if not self.enable_prefix_caching:
            return
        index, length = divmod(sequence.num_computed, self.block_size)
        block = sequence.block_table[index]
        # A shared tail is still written by its other owner, or will be published by it.
        if self.pool.ref_counts[block] > 1:
            return
        hashes = sequence.block_hashes
        parent = hashes[index - 1] if index else self.cache.root(sequence.request.extra_keys)
        start = index * self.block_size
        packed = pack(sequence.token_ids[start : start + length])
        origin = Origin(sequence.request.request_id, self.now)
        self.cache.insert(block, parent, packed, None, origin)

    def _hash_of(self, sequence: Sequence, index: int, parent: bytes, packed: bytes) -> bytes:
        hashes = sequence.block_hashes
        if index == len(hashes):
            hashes.append(self.cache.hash_block(parent, packed))
        return hashes[index]

    def _reserve(self, sequence: Sequence, num_blocks: int) -> None:
        self.num_reserved += num_blocks - sequence.num_reserved
        sequence.num_reserved = num_blocks

    def _take_for(self, sequence: Sequence, num_blocks: int) -> list[int]:
        self._reserve(sequence, max(0, sequence.num_reserved - num_blocks))
        return self._take(num_blocks)

    def _take(self, num_blocks: int) -> list[int]:
        blocks = self.pool.take(num_blocks)
        self.num_evicted += self.cache.evict(blocks, self.now)
        return blocks

    # --- accounting -----------------------------------------------------------------------------

    @property
    def num_cached(self) -> int:
        """Blocks, free or in use, whose content can be found by its tokens."""
        return len(self.cache)

    def num_empty_slots(self, sequences: Iterable[Sequence]) -> int:
        """Allocated token slots of `sequences` that hold nothing; a shared block counts once."""
        size = self.block_size
        empty: dict[int, int] = {}
        for sequence in sequences:
            table, computed = sequence.block_table, sequence.num_computed
            for i in range(computed // size, len(table)):
                filled = max(0, computed - i * size)
                empty[table[i]] = min(empty.get(table[i], size), size - filled)
        return sum(empty.values())

    def check(self, sequences: Iterable[Sequence]) -> None:
        """Raise AssertionError if an invariant does not hold; for tests and for idle engines."""
        counts = [0] * self.pool.num_blocks
        reserved = 0
        for sequence in sequences:
            reserved += sequence.num_reserved
            assert len(set(sequence.block_table)) == len(sequence.block_table), sequence
            assert sequence.num_computed <= len(sequence.block_table) * self.block_size, sequence
            for block in sequence.block_table:
                counts[block] += 1
        assert counts == self.pool.ref_counts, "references differ from table entries"
        assert self.pool.num_shared == sum(count > 1 for count in counts), "shared blocks differ"
        for block, count in enumerate(counts):
            assert self.pool.is_free(block) == (count == 0), f"block {block}: {count} references"
        assert reserved == self.num_reserved, "reservations differ from their sum"
        assert self.num_available >= 0, "more blocks are promised than are free"
        self.cache.check()
