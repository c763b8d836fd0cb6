"""Other prompts may evict pages of a waiting prompt before it gets its seat."""

from __future__ import annotations

from dataclasses import replace

from alignedserve.protocol.page_names import chained_hashes
from alignedserve.scheduling.dues import promise
from alignedserve.scheduling.policy import Policy
from alignedserve.worker.step.blocks import NamedBlocks
from alignedserve.worker.step.device_pages import DevicePages, NextPages
from alignedserve.worker.step.request import WorkerRequest
from tests.samples import request

SIZE, NUM_BLOCKS = 2, 4


def names_of(prompt: WorkerRequest, tokens: int) -> tuple[int, ...]:
    return chained_hashes(prompt.request.prompt[: tokens - tokens % SIZE], SIZE)


def asks(name: str, prompt: range) -> WorkerRequest:
    """Return a prompt with four pages in the pool."""
    asked = replace(request(name), prompt=tuple(prompt))
    waiting = WorkerRequest(asked, promise(asked, Policy()), [], known=(0, 1, 2, 3))
    waiting.block_names = names_of(waiting, 8)
    return waiting


def test_what_prompts_begin_with_is_fetched_for_one_and_the_others_wait() -> None:
    pages = DevicePages(NamedBlocks(NUM_BLOCKS), SIZE, SIZE, names_of)
    fetching = NextPages(pages, [asks("first", range(9))])
    assert fetching.holds_up(asks("alike", range(9)))
    assert not fetching.holds_up(asks("other", range(9, 18)))


def test_a_prompt_is_fetched_whose_pages_were_evicted_after_it_was_looked_up() -> None:
    """Else it counts as computed chunk by chunk while its memory is found, and is fetched as a whole when it gets that:
    a choice took more than there was (fuzz seed 99100412)."""
    store, waiting = NamedBlocks(NUM_BLOCKS), asks("a", range(9))
    pages = DevicePages(store, SIZE, SIZE, names_of)
    blocks = store.take(NUM_BLOCKS)
    assert blocks is not None
    store.publish(waiting.block_names, blocks)
    store.give(blocks)
    assert not pages.has_to_fetch(waiting)
    assert store.take(NUM_BLOCKS) is not None
    assert pages.has_to_fetch(waiting)


def test_a_prompt_shares_only_the_pages_that_a_layer_still_reads() -> None:
    store, waiting = NamedBlocks(NUM_BLOCKS), replace(asks("a", range(9)), known=())
    blocks = store.take(NUM_BLOCKS)
    assert blocks is not None
    store.publish(waiting.block_names, blocks)
    store.give(blocks)
    pages = DevicePages(store, SIZE, SIZE, names_of, unread=lambda tokens: tokens - 2 * SIZE)
    pages.look(waiting)
    assert (waiting.prefix, waiting.num_lost) == (8, 4)
    assert pages.share(waiting) == blocks[2:]
    assert store.num_free == 2
