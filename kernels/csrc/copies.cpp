// Copies between the blocks of all layers and the rows of a page. Bytes are moved, not numbers: every bit arrives.
//
// Slots that follow each other are one run: a block whose tokens lie in the order of its slots is one copy of each
// layer's K and one of its V. Others go vector by vector.
#include <omp.h>

#include <algorithm>
#include <vector>

#include "crc.h"

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

static void copy(char* to, const char* from, int64_t bytes, bool streamed, Crc* crc) {
    if (crc)
        crc->add(to, from, bytes, streamed);
    else if (streamed)
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

// Copies every run of every layer's K and V, by copy(place in the cache, place in the rows, bytes, streamed, its Crc); where
// `crc` is not null, it becomes the CRC-32 of the rows.
template <class Copy>
static int each_run(const BlockRows& of, const int64_t* slots, uint32_t* crc, Copy copy) {
    if (!inside(of, slots)) return 1;
    const std::vector<Run> runs = runs_of(slots, of.tokens);
    const int64_t halves = of.layers * 2, half_bytes = of.tokens * of.vector, total = halves * half_bytes;
    const bool streamed = total >= 1 << 20, packed = of.row_token == of.vector;
    const int64_t parts = total < 1 << 18 ? 1 : std::min<int64_t>(halves, omp_get_max_threads());
    std::vector<uint32_t> crcs(parts);
    auto end_of = [=](int64_t part) { return halves * (part + 1) / parts; };
#pragma omp parallel for num_threads(int(parts)) schedule(static, 1) if (parts > 1)
    for (int64_t part = 0; part < parts; ++part) {
        Crc own;
        if (streamed) fence();
        for (int64_t half = end_of(part - 1); half < end_of(part); ++half) {
            const int64_t layer = half / 2, is_v = half % 2;
            const int64_t cache = layer * of.cache_layer + is_v * of.v_after * of.vector;
            const int64_t rows = layer * of.row_layer + is_v * of.row_half;
            for (const Run& run : runs) {
                const int64_t pieces = packed ? 1 : run.count, count = run.count / pieces;
                for (int64_t piece = 0; piece < pieces; ++piece)
                    copy(cache + (run.slot + piece) * of.vector, rows + (run.token + piece) * of.row_token,
                         count * of.vector, streamed, crc ? &own : nullptr);
            }
        }
        if (streamed) fence();
        if (crc) crcs[part] = own.value();
    }
    if (!crc) return 0;
    *crc = crcs[0];
    for (int64_t part = 1; part < parts; ++part)
        *crc = join_crcs(*crc, crcs[part], (end_of(part) - end_of(part - 1)) * half_bytes);
    return 0;
}

int gather(const BlockRows* of, const int64_t* slots, const char* cache, char* rows, uint32_t* crc) {
    return each_run(*of, slots, crc, [=](int64_t here, int64_t there, int64_t bytes, bool streamed, Crc* own) {
        copy(rows + there, cache + here, bytes, streamed, own);
    });
}

int scatter(const BlockRows* of, const int64_t* slots, char* cache, const char* rows, uint32_t* crc) {
    return each_run(*of, slots, crc, [=](int64_t here, int64_t there, int64_t bytes, bool streamed, Crc* own) {
        copy(cache + here, rows + there, bytes, streamed, own);
    });
}

}  // namespace ISA
