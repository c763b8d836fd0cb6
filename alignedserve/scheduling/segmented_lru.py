"""The order in which idle pages are evicted (segmented LRU), and the names of pages that were."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

PROTECTED_SHARE = 0.8  # most of all pages that are protected from eviction
_REMEMBERED = 4  # names of evicted pages, times the pages that there are


class SegmentedLru:
    """Idle pages in the order of eviction: pages on probation, then protected pages, each by when they became idle.

    A page is protected once it was used again. At most a share of all pages is protected: beyond that, the page that
    has been idle longest goes back on probation.
    """

    def __init__(self, most_protected: int) -> None:
        self._most_protected = most_protected
        # A plain dict finds its first key only behind all deleted keys: the time of an eviction would grow with the
        # number of pages.
        self._probation: OrderedDict[int, None] = OrderedDict()
        self._protected: OrderedDict[int, None] = OrderedDict()
        self._returning: set[int] = set()  # in use again: protected when idle next

    def __len__(self) -> int:
        return len(self._probation) + len(self._protected)

    def __iter__(self) -> Iterator[int]:
        yield from self._probation
        yield from self._protected

    def __contains__(self, page: int) -> bool:
        return page in self._probation or page in self._protected

    def add(self, page: int) -> None:
        if page not in self._returning:
            self._probation[page] = None
            return
        self._returning.discard(page)
        self._protected[page] = None
        if len(self._protected) > self._most_protected:
            oldest = next(iter(self._protected))
            del self._protected[oldest]
            self._probation[oldest] = None

    def again(self, page: int) -> bool:
        """Note that an entry uses the page again; return whether the page was idle."""
        self._returning.add(page)
        return self.discard(page)

    def forget_return(self, page: int) -> bool:
        """Forget that the page was used again; return whether it was."""
        had = page in self._returning
        self._returning.discard(page)
        return had

    def forget(self, page: int) -> bool:
        """Forget the page for good; return whether the page was idle."""
        self._returning.discard(page)
        return self.discard(page)

    def discard(self, page: int) -> bool:
        """Take the page out of the idle pages; return whether the page was idle."""
        for segment in (self._probation, self._protected):
            if page in segment:
                del segment[page]
                return True
        return False

    def first(self) -> tuple[bool, int]:
        """Return whether the page that is evicted next is protected, and the page."""
        segment = self._probation or self._protected
        return segment is self._protected, next(iter(segment))

    def pop(self) -> int:
        _, page = self.first()
        self.discard(page)
        return page


class EvictedNames:
    """The names of pages that were evicted lately.

    A page that comes again counts as used again, however many pages that are used once came between. Without these
    names a scan would keep all pages that come as seldom out of the protected pages (2Q, Johnson and Shasha 1994).
    """

    def __init__(self, num_pages: int) -> None:
        self._most = _REMEMBERED * num_pages
        self._names: OrderedDict[int, None] = OrderedDict()

    def note(self, name: int) -> None:
        self._names[name] = None
        if len(self._names) > self._most:
            self._names.popitem(last=False)

    def has_back(self, name: int) -> bool:
        """Note that the page is here again; return whether the page was evicted lately."""
        was_here = name in self._names
        self._names.pop(name, None)
        return was_here
