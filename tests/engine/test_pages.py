"""The page pool against a plain model, and the bookkeeping between sequences and pages."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from engine.batch import DraftBlock
from engine.page_table import PageTable
from engine.pages import OutOfPages, PageKey, PagePool
from engine.params import SamplingParams
from engine.sampling import SamplingState
from engine.sequence import Sequence
from engine.text import TextStream
from tests.engine.harness import VOCAB

PAGES, SIZE = 5, 2  # few, so that pages are evicted all the time

# Two tokens and two salts, so that prefixes are often shared and often nearly so.
PAGE = st.tuples(st.integers(0, 1), st.integers(0, 1))
TEXT = st.lists(PAGE, min_size=1, max_size=4)
SALT = st.sampled_from(["", "other"])


@dataclass
class Holder:
    """Stands for a sequence: whole pages of text, and the pages that it holds for them."""

    keys: list[PageKey]
    contents: list[tuple[str, tuple[tuple[int, int], ...]]]
    pages: list[int] = field(default_factory=list)


class PoolAgainstModel(RuleBasedStateMachine):
    """`content`: what is really written in a page that was published; everything else follows."""

    collide = False

    @initialize()
    def start(self) -> None:
        self.pool = PagePool(PAGES, SIZE, hash_fn=lambda *_: 7) if self.collide else PagePool(PAGES, SIZE)
        self.refs = dict.fromkeys(range(PAGES), 0)
        self.free = set(range(PAGES))
        self.cached: list[int] = []  # the next to be evicted comes first
        self.content: dict[int, tuple] = {}  # of published pages
        self.holders: list[Holder] = []

    # ---- the model

    def take(self, count: int) -> list[int]:
        """Allocate in both; the model says which pages are allowed."""
        if count > len(self.free) + len(self.cached):
            with pytest.raises(OutOfPages):
                self.pool.allocate(count)
            raise OutOfPages
        evicted = self.cached[: max(0, count - len(self.free))]
        taken = self.pool.allocate(count)
        assert len(set(taken)) == count
        if evicted:
            assert set(taken) == self.free | set(evicted), "evicted while some were free, or not the oldest"
        else:
            assert set(taken) <= self.free
        for page in taken:
            self.refs[page] = 1
            self.content.pop(page, None)
        self.free -= set(taken)
        self.cached = [page for page in self.cached if page not in evicted]
        return taken

    def drop(self, pages: list[int]) -> None:
        self.pool.release(pages)
        for page in reversed(pages):
            self.refs[page] -= 1
            if not self.refs[page]:
                if page in self.content:
                    self.cached.append(page)
                else:
                    self.free.add(page)

    def found(self, holder: Holder) -> list[int]:
        """Match; what is found must hold the right text, and all of it that is published."""
        pages = self.pool.match(holder.keys)
        for page, content in zip(pages, holder.contents, strict=False):
            assert self.content[page] == content, "a page with other content was found"
        if not self.collide:
            published = set(self.content.values())
            known = [content in published for content in holder.contents]
            assert len(pages) == [*known, False].index(False)
        return pages

    # ---- what can happen

    @rule(count=st.integers(0, PAGES + 1))
    def allocate(self, count: int) -> None:
        try:
            pages = self.take(count)
        except OutOfPages:
            return
        self.holders.append(Holder([], [], pages))

    def sit(self, text: list[tuple[int, int]], salt: str) -> Holder | None:
        keys: list[PageKey] = []
        for page in text:
            keys.append(self.pool.key(keys[-1].digest if keys else None, page, salt))
        holder = Holder(keys, [(salt, tuple(text[: i + 1])) for i in range(len(text))])
        hit = self.found(holder)
        self.pool.retain(hit)
        for page in hit:
            self.refs[page] += 1
        self.cached = [page for page in self.cached if page not in hit]
        try:
            holder.pages = hit + self.take(len(text) - len(hit))
        except OutOfPages:
            self.drop(hit)
            return None
        self.holders.append(holder)
        return holder

    @rule(text=TEXT, salt=SALT)
    def seat(self, text: list[tuple[int, int]], salt: str) -> None:
        self.sit(text, salt)

    @rule(text=TEXT, salt=SALT)
    def live(self, text: list[tuple[int, int]], salt: str) -> None:
        """A whole life: come, be published, go."""
        holder = self.sit(text, salt)
        if holder is not None:
            self.fill(holder, len(text))
            self.drop(self.holders.pop().pages)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        """Some of a holder's first pages are full now."""
        holder = data.draw(st.sampled_from(self.holders))
        self.fill(holder, data.draw(st.integers(0, len(holder.keys))))

    def fill(self, holder: Holder, count: int) -> None:
        for page, key, content in zip(holder.pages[:count], holder.keys, holder.contents, strict=False):
            taken = bool(self.content) if self.collide else content in self.content.values()
            self.pool.publish(page, key)
            if page not in self.content and not taken:
                self.content[page] = content

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.drop(self.holders.pop(data.draw(st.integers(0, len(self.holders) - 1))).pages)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def retain(self, data: st.DataObject) -> None:
        """A second reference to pages that somebody holds."""
        holder = data.draw(st.sampled_from(self.holders))
        self.pool.retain(holder.pages)
        for page in holder.pages:
            self.refs[page] += 1
        self.holders.append(Holder(holder.keys, holder.contents, list(holder.pages)))

    @rule()
    def flush(self) -> None:
        assert self.pool.flush() == len(self.cached)
        for page in self.cached:
            del self.content[page]
        self.free |= set(self.cached)
        self.cached = []

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        pages = data.draw(st.sampled_from(self.holders)).pages
        self.pool.forget(pages)
        for page in pages:
            self.content.pop(page, None)

    @precondition(lambda self: self.free)
    @rule(data=st.data())
    def release_too_often(self, data: st.DataObject) -> None:
        with pytest.raises(RuntimeError, match="more often"):
            self.pool.release([data.draw(st.sampled_from(sorted(self.free)))])

    @invariant()
    def agrees(self) -> None:
        self.pool.check()
        assert {page: self.pool.references(page) for page in range(PAGES)} == self.refs
        assert self.pool.free_count == len(self.free)
        assert self.pool.cached_count == len(self.cached)
        assert self.pool.available == len(self.free) + len(self.cached)


class PoolWithConstantHash(PoolAgainstModel):
    collide = True


@pytest.mark.parametrize("machine", [PoolAgainstModel, PoolWithConstantHash])
def test_the_pool_agrees_with_a_plain_model(machine):
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=100,
            stateful_step_count=30,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


def chain(pool: PagePool, *texts: tuple[int, ...], salt: str = "") -> list[PageKey]:
    keys: list[PageKey] = []
    for text in texts:
        keys.append(pool.key(keys[-1].digest if keys else None, text, salt))
    return keys


def publish(pool: PagePool, keys: list[PageKey]) -> list[int]:
    pages = pool.allocate(len(keys))
    for page, key in zip(pages, keys, strict=True):
        pool.publish(page, key)
    return pages


def test_allocation_is_all_or_nothing():
    pool = PagePool(4)
    pool.allocate(2)
    with pytest.raises(OutOfPages, match="3 pages wanted, 2 available"):
        pool.allocate(3)
    assert pool.available == 2
    assert len(pool.allocate(2)) == 2
    pool.check()


def test_a_fresh_pool_hands_out_consecutive_pages():
    pool = PagePool(8)
    assert pool.allocate(3) + pool.allocate(2) == [0, 1, 2, 3, 4]


def test_the_tail_of_a_text_is_evicted_before_its_head_and_the_oldest_text_first():
    pool = PagePool(6, 2)
    old, new = chain(pool, (1, 1), (2, 2), (3, 3)), chain(pool, (4, 4), (5, 5), (6, 6))
    old_pages, new_pages = publish(pool, old), publish(pool, new)
    pool.release(old_pages)
    pool.release(new_pages)
    for left in (2, 1, 0):
        pool.allocate(1)
        assert pool.match(old) == old_pages[:left]
        assert pool.match(new) == new_pages
    pool.allocate(1)
    assert pool.match(new) == new_pages[:2]
    pool.check()


def test_a_hit_makes_a_text_the_last_to_be_evicted():
    pool = PagePool(2, 2)
    first, second = chain(pool, (1, 1)), chain(pool, (2, 2))
    pages = [publish(pool, first)[0], publish(pool, second)[0]]
    pool.release(pages[:1])
    pool.release(pages[1:])
    pool.retain(pool.match(first))
    pool.release(pages[:1])
    pool.allocate(1)
    assert pool.match(first) == pages[:1]
    assert pool.match(second) == []


def test_a_held_page_is_never_evicted():
    pool = PagePool(2, 2)
    key = chain(pool, (1, 1))
    [page] = publish(pool, key)
    pool.release([page])
    pool.retain(pool.match(key))
    assert pool.allocate(1) != [page]
    with pytest.raises(OutOfPages):
        pool.allocate(1)
    assert pool.match(key) == [page]


def test_salts_and_parents_keep_equal_tokens_apart():
    pool = PagePool(8, 2)
    publish(pool, chain(pool, (1, 1), (2, 2), salt="mine"))
    assert len(pool.match(chain(pool, (1, 1), (2, 2), salt="mine"))) == 2
    assert pool.match(chain(pool, (1, 1), (2, 2), salt="yours")) == []
    assert pool.match(chain(pool, (2, 2), salt="mine")) == []
    assert len(pool.match(chain(pool, (1, 1), (2, 1), salt="mine"))) == 1


def test_the_first_page_with_a_given_content_wins_and_a_second_one_is_free_once_released():
    pool = PagePool(4, 2)
    key = chain(pool, (1, 1))
    [first], [second] = publish(pool, key), publish(pool, key)
    assert pool.match(key) == [first]
    pool.release([second])
    assert (pool.free_count, pool.cached_count) == (3, 0)
    pool.release([first])
    assert (pool.free_count, pool.cached_count) == (3, 1)


def test_digests_are_too_long_to_collide_by_chance_or_by_design():
    pool = PagePool(1, 2)
    digests = {
        pool.key(parent, (a, b), salt).digest
        for parent in (None, 0, 1)
        for a in range(20)
        for b in range(20)
        for salt in ("", "0", "1")
    }
    assert len(digests) == 3 * 20 * 20 * 3
    assert max(digests).bit_length() > 100


def test_a_pool_needs_pages():
    for sizes in ((0, 4), (4, 0)):
        with pytest.raises(ValueError, match="at least one page"):
            PagePool(*sizes)


def test_the_dump_names_what_is_not_free():
    pool = PagePool(3, 2)
    publish(pool, chain(pool, (1, 2)))
    pool.allocate(1)
    first, *lines = pool.dump().splitlines()
    assert first == "1 free, 0 cached, 3 in all"
    assert "(1, 2)" in lines[0]
    assert "unpublished" in lines[1]


# ---- page tables


def make(tokens: list[int], salt: str = "", key: int = 0) -> Sequence:
    state = SamplingState(SamplingParams(), VOCAB, frozenset())
    return Sequence(key, 0, np.asarray(tokens, dtype=np.int32), state, TextStream([b"x"] * VOCAB), salt)


def table(pages: int = 16, size: int = 4, max_tokens: int = 40) -> PageTable:
    return PageTable(PagePool(pages, size), max_tokens)


def compute(pages: PageTable, sequence: Sequence, *emitted: int) -> None:
    """As if a step had run all known tokens and emitted these."""
    sequence.computed = sequence.length
    sequence.extend(emitted)
    pages.publish(sequence)


def test_seating_gives_pages_for_every_known_token():
    pages = table()
    sequence = make(list(range(9)))
    assert pages.probe(sequence) == (9, 3)
    pages.seat(sequence)
    assert (len(sequence.pages), sequence.computed) == (3, 0)
    assert [pages.missing(sequence, rows) for rows in (9, 12, 13, 17)] == [0, 0, 1, 2]


def test_missing_pages_end_at_the_context_limit():
    pages = table(max_tokens=10)
    sequence = make(list(range(9)))
    pages.seat(sequence)
    assert pages.missing(sequence, 100) == 0
    pages.grow(sequence, 100)
    assert len(sequence.pages) == 3


def test_growing_takes_what_is_missing_or_nothing():
    pages = table(pages=4)
    sequence = make(list(range(9)))
    pages.seat(sequence)
    with pytest.raises(OutOfPages):
        pages.grow(sequence, 17)
    assert len(sequence.pages) == 3
    pages.grow(sequence, 16)
    assert len(sequence.pages) == 4
    assert pages.pool.available == 0


def test_shedding_gives_back_only_what_is_reserved_for_drafts_and_drops_the_draft():
    pages = table()
    sequence = make(list(range(9)))
    pages.seat(sequence)
    pages.grow(sequence, 20)
    sequence.draft = DraftBlock((1, 2, 3))
    assert (len(sequence.pages), pages.surplus(sequence), pages.reclaimable(sequence)) == (5, 2, 5)
    pages.shed(sequence)
    assert (len(sequence.pages), pages.surplus(sequence), pages.pool.available) == (3, 0, 13)
    assert sequence.draft is None


def test_shedding_keeps_a_draft_that_needs_no_page_of_its_own():
    pages = table()
    sequence = make(list(range(9)))
    pages.seat(sequence)
    sequence.draft = DraftBlock((1, 2, 3))
    pages.shed(sequence)
    assert sequence.draft is not None


def test_only_full_pages_of_computed_and_committed_tokens_are_published():
    pages = table()
    sequence = make(list(range(8)))
    pages.seat(sequence)
    sequence.computed = 7
    pages.publish(sequence)
    assert pages.probe(make(list(range(20)))) == (16, 4)  # the first page only
    sequence.computed = 11  # verified further than what was kept behind a stop string
    pages.publish(sequence)
    assert pages.probe(make(list(range(20)))) == (12, 3)
    assert sequence.published == 2


def test_the_last_token_is_always_computed_anew():
    pages = table()
    sequence = make(list(range(8)))
    pages.seat(sequence)
    compute(pages, sequence)
    same, longer = make(list(range(8))), make([*range(8), 30])
    pages.seat(same)
    assert (same.computed, same.pending) == (4, 4)
    pages.seat(longer)
    assert (longer.computed, longer.pending) == (8, 1)
    assert same.pages[:1] == longer.pages[:1] == sequence.pages[:1]
    assert longer.pages[:2] == sequence.pages[:2]
    assert same.pages[1] != sequence.pages[1]


def test_a_probe_counts_cached_pages_that_nobody_holds_as_taken():
    pages = table(pages=4)
    sequence = make(list(range(8)))
    pages.seat(sequence)
    compute(pages, sequence)
    other = make([*range(8), 30])
    assert pages.probe(other) == (1, 1)  # two are shared with the one that runs
    pages.vacate(sequence)
    assert pages.probe(other) == (1, 3)  # the same two must be taken out of the cache
    pages.seat(other)
    assert pages.pool.available == 4 - 3


def test_preempted_sequences_find_their_pages_again():
    pages = table()
    sequence = make(list(range(9)))
    pages.seat(sequence)
    compute(pages, sequence, 20, 21, 22, 23)
    held = list(sequence.pages)
    sequence.draft = DraftBlock((1,))
    pages.vacate(sequence)
    assert (sequence.pages, sequence.computed, sequence.published, sequence.draft) == ([], 0, 0, None)
    assert pages.pool.available == 16
    pages.seat(sequence)
    assert sequence.computed == 8
    assert sequence.pages[:2] == held[:2]
    assert len(sequence.pages) == 4
    pages.pool.check()


def test_generated_tokens_are_found_by_the_next_turn():
    pages = table()
    sequence = make(list(range(6)))
    pages.seat(sequence)
    pages.grow(sequence, 12)
    compute(pages, sequence, 20, 21)
    compute(pages, sequence, 22)
    pages.vacate(sequence)
    turn = make([*range(6), 20, 21, 22, 40, 41])
    pages.seat(turn)
    assert turn.computed == 8


def test_sequences_with_other_salts_share_nothing():
    pages = table()
    mine, yours = make(list(range(9)), "mine"), make(list(range(9)), "yours")
    pages.seat(mine)
    compute(pages, mine)
    pages.seat(yours)
    assert yours.computed == 0
    assert not set(mine.pages) & set(yours.pages)
