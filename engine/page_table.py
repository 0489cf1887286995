"""Which pages a sequence holds, from admission to its end: the bookkeeping between sequences and the pool."""

from __future__ import annotations

from engine.pages import PageKey, PagePool
from engine.sequence import Sequence


class PageTable:
    """Every change of a sequence's pages goes through here. `max_tokens` is the context limit."""

    def __init__(self, pool: PagePool, max_tokens: int) -> None:
        self.pool = pool
        self.max_tokens = max_tokens

    def missing(self, sequence: Sequence, rows: int) -> int:
        """Pages to add for that many rows after the computed ones."""
        end = min(sequence.computed + rows, self.max_tokens)
        return max(0, self.pool.pages_for(end) - len(sequence.pages))

    def surplus(self, sequence: Sequence) -> int:
        """Pages behind the last known token: they are reserved for drafts."""
        return max(0, len(sequence.pages) - self.pool.pages_for(sequence.length))

    def reclaimable(self, sequence: Sequence) -> int:
        """Pages that nobody else holds."""
        return sum(self.pool.references(page) == 1 for page in sequence.pages)

    def grow(self, sequence: Sequence, rows: int) -> None:
        """Add what `missing` says. Raises OutOfPages."""
        sequence.pages += self.pool.allocate(self.missing(sequence, rows))

    def reserve(self, sequence: Sequence, rows: int, spare: int) -> int | None:
        """Grow by what `missing` says, and return that; None, and nothing done, if it exceeds `spare`."""
        wanted = self.missing(sequence, rows)
        if wanted > max(spare, 0):
            return None
        sequence.pages += self.pool.allocate(wanted)
        return wanted

    def shed(self, sequence: Sequence) -> None:
        """Give up reserved pages and the draft they are for.

        Whether this happens depends on lengths that were known before the draft was made, so it says
        nothing about the draft and biases nothing.
        """
        if surplus := self.surplus(sequence):
            self.pool.release(sequence.pages[-surplus:])
            del sequence.pages[-surplus:]
            sequence.draft = None

    def probe(self, sequence: Sequence) -> tuple[int, int]:
        """(tokens left to compute, pages taken) if the sequence were seated now."""
        hit = self._cached_prefix(sequence)
        # A cached page that nobody holds comes out of the available ones too.
        claimed = sum(self.pool.references(page) == 0 for page in hit)
        fresh = self.pool.pages_for(sequence.length) - len(hit)
        return sequence.length - len(hit) * self.pool.page_size, fresh + claimed

    def seat(self, sequence: Sequence) -> None:
        """Give a sequence without pages its cached prefix, and blank pages for the rest of its tokens."""
        hit = self._cached_prefix(sequence)
        self.pool.retain(hit)
        sequence.pages = hit + self.pool.allocate(self.pool.pages_for(sequence.length) - len(hit))
        sequence.computed = len(hit) * self.pool.page_size
        sequence.published = len(hit)

    def publish(self, sequence: Sequence) -> None:
        """Make newly filled pages findable. Every token in them is committed."""
        full = min(sequence.computed, sequence.length) // self.pool.page_size
        keys = self._page_keys(sequence, full)
        for index in range(sequence.published, full):
            self.pool.publish(sequence.pages[index], keys[index])
        sequence.published = full

    def _cached_prefix(self, sequence: Sequence) -> list[int]:
        """Cached pages of its tokens, but of none whose logits are needed: the last, those to be scored."""
        skipped = sequence.length - 1
        if sequence.unscored:
            skipped = min(skipped, sequence.scored)
        full = skipped // self.pool.page_size
        return self.pool.match(self._page_keys(sequence, full)[:full])

    def _page_keys(self, sequence: Sequence, count: int) -> list[PageKey]:
        """Keys of at least its first `count` full pages, each computed once in the sequence's life."""
        size, keys = self.pool.page_size, sequence.page_keys
        for index in range(len(keys), count):
            tokens = sequence.tokens[index * size : (index + 1) * size].tolist()
            keys.append(self.pool.key(keys[-1].digest if keys else None, tokens, sequence.salt))
        return keys

    def vacate(self, sequence: Sequence) -> None:
        """Take all pages away. The sequence would have to compute its tokens again."""
        self.pool.release(sequence.pages)
        sequence.pages = []
        sequence.computed = sequence.published = 0
        sequence.draft = None
