// Where the products of a linear layer go.
#pragma once
#include "kernels.h"

namespace ISA {

#if defined(__AVX512BF16__)
inline __m128 load4(const float* p) { return _mm_loadu_ps(p); }
inline __m128 load4(const f16* p) { return _mm_cvtph_ps(_mm_loadl_epi64((const __m128i*)p)); }
inline __m128 load4(const bf16* p) {
    return _mm_castsi128_ps(_mm_slli_epi32(_mm_cvtepu16_epi32(_mm_loadl_epi64((const __m128i*)p)), 16));
}
inline void store4(__m128 v, float* p) { _mm_storeu_ps(p, v); }
inline void store4(__m128 v, f16* p) { _mm_storel_epi64((__m128i*)p, _mm_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT)); }
inline void store4(__m128 v, bf16* p) { _mm_storel_epi64((__m128i*)p, (__m128i)_mm_cvtneps_pbh(v)); }

inline __m128 sums_of(__m512 a, __m512 b, __m512 c, __m512 d) {
    __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
    __m512d low = _mm512_unpacklo_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd));
    __m512d high = _mm512_unpackhi_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd));
    __m512 all = _mm512_add_ps(_mm512_castpd_ps(low), _mm512_castpd_ps(high));
    __m256 half = _mm256_add_ps(_mm512_castps512_ps256(all), _mm512_extractf32x8_ps(all, 1));
    return _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
}
#endif

// Where the products go: rounded once, after bias and what was there before; or not at all.
template <class T>
struct Result {
    const T* bias;
    void* out;
    int64_t width;
    int into;

    bool adds() const { return into == ADDED; }
    bool wide() const { return into == WIDE; }
    T* at(int64_t row, int64_t column) const { return (T*)out + row * width + column; }
    float* wide_at(int64_t row, int64_t column) const { return (float*)out + row * width + column; }

    void put(float value, int64_t row, int64_t column) const {
        if (bias) value += widen(bias[column]);
        if (wide()) {
            *wide_at(row, column) = value;
            return;
        }
        T* to = at(row, column);
        if (adds()) value += widen(*to);
        narrow(value, *to);
    }

    // The products of one row of x with O weight rows.
    template <int O>
    void put(const Vec (&sums)[O], int64_t row, int64_t column) const {
#if defined(__AVX512BF16__)
        if constexpr (O == 4) {
            __m128 value = sums_of(sums[0].v, sums[1].v, sums[2].v, sums[3].v);
            if (bias) value = _mm_add_ps(value, load4(bias + column));
            if (wide()) return _mm_storeu_ps(wide_at(row, column), value);
            T* to = at(row, column);
            if (adds()) value = _mm_add_ps(value, load4(to));
            return store4(value, to);
        }
#endif
        for (int o = 0; o < O; ++o) put(sums[o].sum(), row, column + o);
    }

    // The products of one row of x with as many weight rows as a vector has lanes.
    void put_lanes(Vec value, int64_t row, int64_t column) const {
        if (column + Vec::width > width) {
            float lanes[Vec::width];
            value.store(lanes);
            for (int64_t lane = 0; column + lane < width; ++lane) put(lanes[lane], row, column + lane);
            return;
        }
        if (bias) value = value + Vec::load(bias + column);
        if (wide()) return value.store(wide_at(row, column));
        T* to = at(row, column);
        if (adds()) value = value + Vec::load(to);
        value.store(to);
    }
};

}  // namespace ISA
