"""The page pool: reference counts, and a hash-chained prefix cache over pages nobody uses any more.

A page id names `page_size` token positions in the target's KV pool and in the drafter's (ARCHITECTURE.md,
"One page table, two pools"). A page is in exactly one of three places: held (reference count above 0),
cached (count 0, its content still findable, evicted least recently used first), or free.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b


class OutOfPages(RuntimeError):
    """More pages were asked for than are free or evictable."""


@dataclass(frozen=True, slots=True)
class PageKey:
    """Content of a full page: its tokens, and the key of the page before it (None: first page).

    `digest` covers the whole chain and the salt, but equal digests prove nothing: a hit also compares the
    tokens, the salt and the parent's digest with those of the page found.
    """

    digest: int
    parent: int | None
    tokens: tuple[int, ...]
    salt: str


def _hash(parent: int | None, tokens: tuple[int, ...], salt: str) -> int:
    """128 bits that nobody can make collide: a child knows its ancestors by their digest alone."""
    return int.from_bytes(blake2b(repr((parent, tokens, salt)).encode(), digest_size=16).digest())


class PagePool:
    """Allocates pages of one fixed size and finds shared prefixes again."""

    def __init__(
        self,
        num_pages: int,
        page_size: int = 16,
        hash_fn: Callable[[int | None, tuple[int, ...], str], int] = _hash,
    ) -> None:
        if num_pages < 1 or page_size < 1:
            raise ValueError("a pool needs at least one page of at least one token")
        self.num_pages = num_pages
        self.page_size = page_size
        self._hash = hash_fn
        # A stack with the lowest id on top: a fresh pool hands out runs of consecutive pages, which the
        # torch executor reads without copying.
        self._free: list[int] = list(range(num_pages - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._refs: list[int] = [0] * num_pages
        self._keys: list[PageKey | None] = [None] * num_pages
        self._by_digest: dict[int, int] = {}

    # ---- counting

    @property
    def available(self) -> int:
        """Pages that `allocate` could hand out now."""
        return len(self._free) + len(self._cached)

    @property
    def free_count(self) -> int:
        return len(self._free)

    @property
    def cached_count(self) -> int:
        return len(self._cached)

    def pages_for(self, tokens: int) -> int:
        """How many pages hold that many tokens."""
        return -(-tokens // self.page_size)

    def references(self, page: int) -> int:
        return self._refs[page]

    # ---- taking and giving back

    def allocate(self, count: int) -> list[int]:
        """Take `count` blank pages, evicting cached ones if need be; all or nothing.

        Raises OutOfPages without taking any.
        """
        if count > self.available:
            raise OutOfPages(f"{count} pages wanted, {self.available} available")
        taken = []
        for _ in range(count):
            if self._free:
                page = self._free.pop()
            else:
                page, _ = self._cached.popitem(last=False)
                self._forget(page)
            self._refs[page] = 1
            taken.append(page)
        return taken

    def retain(self, pages: Sequence[int]) -> None:
        """Add a reference to pages found by `match`, which protects them from eviction."""
        for page in pages:
            if self._refs[page] == 0:
                del self._cached[page]
            self._refs[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """Drop a reference to each. A page that nobody holds goes to the cache if it has a key.

        Released last to first, so that the tail of a text is evicted before what it hangs from.
        """
        for page in reversed(pages):
            if self._refs[page] <= 0:
                raise RuntimeError(f"page {page} released more often than taken")
            self._refs[page] -= 1
            if self._refs[page] == 0:
                if self._keys[page] is None:
                    self._free.append(page)
                else:
                    self._cached[page] = None

    # ---- prefix cache

    def match(self, keys: Sequence[PageKey]) -> list[int]:
        """Pages that hold the longest cached prefix of a chain of page contents; takes no reference."""
        found: list[int] = []
        for key in keys:
            page = self._by_digest.get(key.digest)
            if page is None or self._keys[page] != key:
                break
            found.append(page)
        return found

    def key(self, parent: int | None, tokens: Sequence[int], salt: str) -> PageKey:
        content = tuple(int(token) for token in tokens)
        return PageKey(self._hash(parent, content, salt), parent, content, salt)

    def publish(self, page: int, key: PageKey) -> None:
        """Make a full, committed page findable. The first page with a given content wins."""
        if self._keys[page] is None and key.digest not in self._by_digest:
            self._keys[page] = key
            self._by_digest[key.digest] = page

    def forget(self, pages: Sequence[int]) -> None:
        """Make pages that are held unfindable, because their content cannot be trusted."""
        for page in pages:
            self._forget(page)

    def flush(self) -> int:
        """Forget every cached page; returns how many became free."""
        dropped = len(self._cached)
        for page in self._cached:
            self._forget(page)
            self._free.append(page)
        self._cached.clear()
        return dropped

    def _forget(self, page: int) -> None:
        key = self._keys[page]
        if key is not None:
            del self._by_digest[key.digest]
            self._keys[page] = None

    # ---- for humans and tests

    def check(self) -> None:
        """Raise AssertionError unless every page is in exactly one place and every index agrees."""
        held = {page for page, refs in enumerate(self._refs) if refs > 0}
        free, cached = set(self._free), set(self._cached)
        assert len(free) == len(self._free), "a page is free twice"
        for one, other in ((held, free), (held, cached), (free, cached)):
            assert not one & other, "a page is in two places"
        assert len(held) + len(free) + len(cached) == self.num_pages, "a page is lost"
        assert all(self._keys[page] is None for page in free), "a free page still has content"
        assert all(self._keys[page] is not None for page in cached), "a cached page has no content"
        for digest, page in self._by_digest.items():
            key = self._keys[page]
            assert key is not None, "the index points at a page without content"
            assert key.digest == digest, "the index points at other content"

    def dump(self) -> str:
        """One line a page that is not free: id, references, content."""
        lines = [f"{len(self._free)} free, {len(self._cached)} cached, {self.num_pages} in all"]
        for page, refs in enumerate(self._refs):
            key = self._keys[page]
            if refs or key:
                text = "unpublished" if key is None else f"{key.digest:#x} after {key.parent} {key.tokens}"
                lines.append(f"  page {page}: {refs} refs, {text}")
        return "\n".join(lines)
