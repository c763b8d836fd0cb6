// Packed weights: 64 outputs are a panel, and the last panel has as many vectors of 16 as are left. A panel goes over its
// inputs two at a time: of each pair the weights of its outputs lie side by side. So it is read from its begin to its end.
#pragma once
#include "kernels.h"

namespace ISA {

#if defined(__AVX512BF16__)

constexpr int64_t LANES = 16, PANEL = 4;  // outputs of a vector, vectors of a panel
constexpr int64_t FAR = 16384;            // bytes that a single pass over a panel prefetches ahead
#if defined(__AMX_BF16__)
constexpr bool ALONE_ASKS = true;
#else
constexpr bool ALONE_ASKS = false;
#endif

// A range of vectors of a panel.
struct Part {
    const bf16* at;
    int64_t first;   // its first output
    int64_t count;   // the number of its vectors
    int64_t apart;   // vectors from a pair of inputs to the next: all vectors of the panel
};

inline Part panel_of(const Layer& layer, int64_t number) {
    int64_t first = number * PANEL * LANES, left = (layer.out - first) / LANES;
    int64_t count = left < PANEL ? left : PANEL;
    return {(const bf16*)layer.weight + first * layer.in, first, count, count};
}

inline int64_t panels_of(const Layer& layer) { return (layer.out / LANES + PANEL - 1) / PANEL; }

inline __m512 widen16(__m256i bits) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}
inline __m512 widen16(const bf16* p) { return widen16(_mm256_loadu_si256((const __m256i*)p)); }

struct Rows {
    const bf16* x;
    int64_t stride;
    void* out;
    int64_t width;  // the row width of out
    const bf16* bias;
    int into;

    void put(__m512 value, int64_t row, int64_t at) const {
        int64_t place = row * width + at;
        if (bias) value = _mm512_add_ps(value, widen16(bias + at));
        if (into == WIDE) return _mm512_storeu_ps((float*)out + place, value);
        bf16* to = (bf16*)out + place;
        if (into == ADDED) value = _mm512_add_ps(value, widen16(to));
        _mm256_storeu_si256((__m256i*)to, (__m256i)_mm512_cvtneps_pbh(value));
    }
};

// packed_tiles.cpp, for CPUs with AMX
constexpr int64_t TILES_FROM = 2;  // rows
void packed_tiles(const Layer& layer, const Rows& x, int64_t rows);

#endif

}  // namespace ISA
