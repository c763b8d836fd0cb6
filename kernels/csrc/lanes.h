// Moves between lanes of vectors: sums of several vectors at once, transposes, pairs of bf16.
#pragma once
#include "vectors.h"

namespace ISA {

#if defined(__AVX512F__)

// Transposes 16 vectors of 16 lanes of 32 bits.
inline void transpose(__m512 v[16]) {
    __m512 t[16];
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_ps(v[i], v[i + 1]);
        t[i + 1] = _mm512_unpackhi_ps(v[i], v[i + 1]);
    }
    for (int i = 0; i < 16; i += 4)
        for (int j = 0; j < 2; ++j) {
            __m512d low = _mm512_castps_pd(t[i + j]), high = _mm512_castps_pd(t[i + j + 2]);
            v[i + 2 * j] = _mm512_castpd_ps(_mm512_unpacklo_pd(low, high));
            v[i + 2 * j + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(low, high));
        }
    for (int i = 0; i < 16; i += 8)
        for (int j = 0; j < 4; ++j) {
            t[i + j] = _mm512_shuffle_f32x4(v[i + j], v[i + j + 4], 0x88);
            t[i + j + 4] = _mm512_shuffle_f32x4(v[i + j], v[i + j + 4], 0xDD);
        }
    for (int j = 0; j < 8; ++j) {
        v[j] = _mm512_shuffle_f32x4(t[j], t[j + 8], 0x88);
        v[j + 8] = _mm512_shuffle_f32x4(t[j], t[j + 8], 0xDD);
    }
}

// Returns a vector whose lane i is what `both` makes of all lanes of v[i]: it takes two vectors, and their order does not
// matter.
template <class Both>
inline Vec across(const Vec v[16], Both both) {
    __m512 t[8];
    for (int i = 0; i < 8; ++i) {  // of each quarter: lanes 0 and 2, 1 and 3 of v[2i], then of v[2i + 1]
        __m512 a = v[2 * i].v, b = v[2 * i + 1].v;
        t[i] = both(Vec{_mm512_unpacklo_ps(a, b)}, Vec{_mm512_unpackhi_ps(a, b)}).v;
    }
    __m512 q[4];
    for (int i = 0; i < 4; ++i) {
        __m512d a = _mm512_castps_pd(t[2 * i]), b = _mm512_castps_pd(t[2 * i + 1]);
        __m512 low = _mm512_castpd_ps(_mm512_unpacklo_pd(a, b)), high = _mm512_castpd_ps(_mm512_unpackhi_pd(a, b));
        q[i] = both(Vec{low}, Vec{high}).v;
    }
    auto halves = [&](__m512 a, __m512 b) {
        return both(Vec{_mm512_shuffle_f32x4(a, b, 0x88)}, Vec{_mm512_shuffle_f32x4(a, b, 0xDD)}).v;
    };
    return {halves(halves(q[0], q[1]), halves(q[2], q[3]))};
}

#elif defined(__AVX2__)

template <class Both>
inline Vec across(const Vec v[8], Both both) {
    __m256 t[4];
    for (int i = 0; i < 4; ++i) {
        __m256 a = v[2 * i].v, b = v[2 * i + 1].v;
        t[i] = both(Vec{_mm256_unpacklo_ps(a, b)}, Vec{_mm256_unpackhi_ps(a, b)}).v;
    }
    __m256 q[2];
    for (int i = 0; i < 2; ++i) {
        __m256d a = _mm256_castps_pd(t[2 * i]), b = _mm256_castps_pd(t[2 * i + 1]);
        __m256 low = _mm256_castpd_ps(_mm256_unpacklo_pd(a, b)), high = _mm256_castpd_ps(_mm256_unpackhi_pd(a, b));
        q[i] = both(Vec{low}, Vec{high}).v;
    }
    return both(Vec{_mm256_permute2f128_ps(q[0], q[1], 0x20)}, Vec{_mm256_permute2f128_ps(q[0], q[1], 0x31)});
}

#else

template <class Both>
inline Vec across(const Vec v[1], Both) {
    return v[0];
}

#endif

// Returns a vector whose lane i is the sum of all lanes of v[i].
inline Vec sums(const Vec v[Vec::width]) {
    return across(v, [](Vec a, Vec b) { return a + b; });
}

#if defined(__AVX512BF16__)

// Loads the first `count` of 32 numbers, with zeros after them; no memory beyond them is touched.
inline __m512i load_bf16(const bf16* from, int64_t count) {
    return count >= 32 ? _mm512_loadu_si512(from) : _mm512_maskz_loadu_epi16((1u << count) - 1, from);
}

inline __m512 dot_pairs(__m512 sum, __m512i a, __m512i b) { return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b); }

// Returns 2 to the power of x, with an error of about 1e-4: far below the rounding of bf16. Exactly 0 where x is very low.
inline __m512 power_of_two(__m512 x) {
    __m512 part = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);  // x - floor(x)
    __m512 sum = _mm512_set1_ps(0.07802452f);
    sum = _mm512_fmadd_ps(sum, part, _mm512_set1_ps(0.22606716f));
    sum = _mm512_fmadd_ps(sum, part, _mm512_set1_ps(0.69583354f));
    sum = _mm512_fmadd_ps(sum, part, _mm512_set1_ps(0.99992522f));
    return _mm512_scalef_ps(sum, x);
}

// Lanes as unpacklo and unpackhi leave them, and back in order: of 32 numbers the first 16, and the last.
inline __m512i in_order_low(__m512i low, __m512i high) {
    return _mm512_permutex2var_epi64(low, _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11), high);
}
inline __m512i in_order_high(__m512i low, __m512i high) {
    return _mm512_permutex2var_epi64(low, _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15), high);
}

#endif

}  // namespace ISA
