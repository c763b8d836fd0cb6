// The blocks of a layer's weights, divided among threads, and how the next is fetched beside the present one.
#pragma once
#include <omp.h>

#include <cstdint>

namespace ISA {

struct Range {
    int64_t begin, end;
};
// Returns a part of `count` items that are divided into `parts` parts.
inline Range share(int64_t count, int64_t part, int64_t parts) { return {count * part / parts, count * (part + 1) / parts}; }
inline Range share(int64_t count) { return share(count, omp_get_thread_num(), omp_get_num_threads()); }

// The weight blocks of a layer, a contiguous part for each thread. A thread that has finished its part helps the others:
// threads are not equally fast where other work runs on the same cores, or where two of them share a core.
class Blocks {
   public:
    Blocks(int64_t count) : parts(omp_get_max_threads() < MOST ? omp_get_max_threads() : MOST), count(count) { reset(); }

    void reset() {
        for (int64_t part = 0; part < parts; ++part) {
            Range of = share(count, part, parts);
            left[part].next = of.begin, left[part].end = of.end;
        }
    }

    // Returns the part of this thread.
    Range own() const { return share(count, omp_get_thread_num() % parts, parts); }

    // Calls action(first, end, end of their part) for `step` blocks at a time, until no part has any left.
    template <class Action>
    void each(int64_t step, Action action) {
        for (int64_t i = 0; i < parts; ++i) {
            Left& of = left[(omp_get_thread_num() + i) % parts];
            for (int64_t at; (at = __atomic_fetch_add(&of.next, step, __ATOMIC_RELAXED)) < of.end;)
                action(at, at + step < of.end ? at + step : of.end, of.end);
        }
    }

   private:
    static constexpr int64_t MOST = 64;
    struct alignas(64) Left {
        int64_t next, end;
    } left[MOST];
    int64_t parts, count;
};

struct Stretch {
    const char *begin, *end;
};
struct Stretches {
    Stretch *next = nullptr, *last = nullptr;
};

// Memory that is prefetched bit by bit beside the products. A core has few places for lines that are under way, and what
// comes from the second cache needs them too. Measured, a prefetch of all lines at once between products overlaps with
// nothing, and prefetches of four lines overlap with nearly all products.
struct Ahead {
    const char *at = nullptr, *end = nullptr;
    int64_t lines = 0;  // at a time
    Stretches* more = nullptr;  // what comes after, or null
    void ask() {
        if (at >= end) {
            if (!more || more->next == more->last) return;
            at = more->next->begin, end = more->next->end, ++more->next;
        }
        for (const char* to = at + lines * 64; at < to; at += 64) __builtin_prefetch(at, 0, 2);
    }
    // Returns the place of the next bytes, for a caller that prefetches them itself; where there are none, `other`.
    const char* take(int64_t bytes, const void* other) {
        if (at >= end) return (const char*)other;
        return (at += bytes) - bytes;
    }
};

}  // namespace ISA
