// Copies between the blocks of all layers and the rows of a page. Bytes are moved, not numbers: every bit arrives.
//
// Slots that follow each other are one run: a block that is filled from its left end is one copy of each layer's K and
// one of its V. A block that is filled from its right end goes vector by vector.
#include <algorithm>
#include <vector>

#include "kernels.h"

namespace ISA {

struct Run {
    int64_t slot, token, count;
};

static std::vector<Run> runs_of(const int64_t* slots, int64_t tokens) {
    std::vector<Run> runs;
    for (int64_t token = 0; token < tokens; ++token) {
        if (!runs.empty() && slots[token] == runs.back().slot + runs.back().count)
            ++runs.back().count;
        else
            runs.push_back({slots[token], token, 1});
    }
    return runs;
}

// Writes past the caches: the data is not read before other data has pushed it out of them. Such stores keep no order with
// other stores, and a page's header relies on an order: hence the fences before and after.
static void stream(char* to, const char* from, int64_t bytes) {
#if defined(__AVX2__)
    int64_t head = std::min(bytes, -int64_t(reinterpret_cast<uintptr_t>(to)) & 63);
    std::memcpy(to, from, head);
    to += head, from += head, bytes -= head;
    for (; bytes >= 256; to += 256, from += 256, bytes -= 256) {
#if defined(__AVX512F__)
        for (int i = 0; i < 256; i += 64) _mm512_stream_si512((__m512i*)(to + i), _mm512_loadu_si512(from + i));
#else
        for (int i = 0; i < 256; i += 32)
            _mm256_stream_si256((__m256i*)(to + i), _mm256_loadu_si256((const __m256i*)(from + i)));
#endif
    }
#endif
    std::memcpy(to, from, bytes);
}

static void copy(char* to, const char* from, int64_t bytes, bool streamed) {
    if (streamed)
        stream(to, from, bytes);
    else
        std::memcpy(to, from, bytes);
}

static void fence() {
#if defined(__AVX2__)
    _mm_sfence();
#endif
}

static bool inside(const BlockRows& of, const int64_t* slots) {
    for (int64_t token = 0; token < of.tokens; ++token)
        if (slots[token] < 0 || slots[token] >= of.slots - of.v_after) return false;
    return true;
}

// Calls action(place in the cache, place in the rows, bytes, streamed) for every run of every layer's K and V.
template <class Action>
static int each_run(const BlockRows& of, const int64_t* slots, Action action) {
    if (!inside(of, slots)) return 1;
    const std::vector<Run> runs = runs_of(slots, of.tokens);
    const int64_t total = of.layers * 2 * of.tokens * of.vector;
    const bool streamed = total >= 1 << 20, packed = of.row_token == of.vector;
#pragma omp parallel for if (total >= 1 << 18)
    for (int64_t half = 0; half < of.layers * 2; ++half) {
        const int64_t layer = half / 2, is_v = half % 2;
        const int64_t cache = layer * of.cache_layer + is_v * of.v_after * of.vector;
        const int64_t rows = layer * of.row_layer + is_v * of.row_half;
        if (streamed) fence();
        for (const Run& run : runs) {
            const int64_t pieces = packed ? 1 : run.count, count = run.count / pieces;
            for (int64_t piece = 0; piece < pieces; ++piece)
                action(cache + (run.slot + piece) * of.vector, rows + (run.token + piece) * of.row_token,
                       count * of.vector, streamed);
        }
        if (streamed) fence();
    }
    return 0;
}

int gather(const BlockRows* of, const int64_t* slots, const char* cache, char* rows) {
    return each_run(*of, slots, [=](int64_t here, int64_t there, int64_t bytes, bool streamed) {
        copy(rows + there, cache + here, bytes, streamed);
    });
}

int scatter(const BlockRows* of, const int64_t* slots, char* cache, const char* rows) {
    return each_run(*of, slots, [=](int64_t here, int64_t there, int64_t bytes, bool streamed) {
        copy(cache + here, rows + there, bytes, streamed);
    });
}

}  // namespace ISA
