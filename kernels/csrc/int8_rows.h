// Attention of few queries over K and V that are kept in int8, in whole numbers: a query, and the weights of a row, are
// rounded to 16 bits, pairs of products are added up in 32. That is far finer than the levels of K and V are.
#pragma once
#include "int8_kv.h"
#include "rows.h"

#if defined(__AVX2__)

namespace ISA {

struct Int8Pairs {
    using Number = int8_t;
    using Query = int16_t;
    static constexpr int64_t TOGETHER = 8;

#if defined(__AVX512F__)
    using Sums = __m512i;
    using Levels = __m256i;
    static Levels load(const int8_t* p) { return _mm256_loadu_si256((const __m256i*)p); }
    // Loads the first `count`, with zeros after them; no memory beyond them is touched.
    static Levels load(const int8_t* p, int64_t count) { return _mm256_maskz_loadu_epi8((1u << count) - 1, p); }
    static Sums query(const int16_t* p) { return _mm512_loadu_si512(p); }
    static Sums pairs(Levels levels) { return _mm512_cvtepi8_epi16(levels); }
    // The levels of two tokens side by side, those of half of the numbers each.
    static Sums low(Levels a, Levels b) { return pairs(_mm256_unpacklo_epi8(a, b)); }
    static Sums high(Levels a, Levels b) { return pairs(_mm256_unpackhi_epi8(a, b)); }
    static Sums all(int32_t pair) { return _mm512_set1_epi32(pair); }
    static Sums none() { return _mm512_setzero_si512(); }
    static Vec floats(Sums sum) { return {_mm512_cvtepi32_ps(sum)}; }
    static Sums add(Sums sum, __m512i a, __m512i b) {
#if defined(__AVX512VNNI__)
        return _mm512_dpwssd_epi32(sum, a, b);
#else
        return _mm512_add_epi32(sum, _mm512_madd_epi16(a, b));
#endif
    }
#else
    using Sums = __m256i;
    using Levels = __m128i;
    static Levels load(const int8_t* p) { return _mm_loadu_si128((const __m128i*)p); }
    static Levels load(const int8_t* p, int64_t count) {
        alignas(16) int8_t padded[16] = {};
        std::memcpy(padded, p, count);
        return _mm_load_si128((const __m128i*)padded);
    }
    static Sums query(const int16_t* p) { return _mm256_loadu_si256((const __m256i*)p); }
    static Sums pairs(Levels levels) { return _mm256_cvtepi8_epi16(levels); }
    static Sums low(Levels a, Levels b) { return pairs(_mm_unpacklo_epi8(a, b)); }
    static Sums high(Levels a, Levels b) { return pairs(_mm_unpackhi_epi8(a, b)); }
    static Sums all(int32_t pair) { return _mm256_set1_epi32(pair); }
    static Sums none() { return _mm256_setzero_si256(); }
    static Vec floats(Sums sum) { return {_mm256_cvtepi32_ps(sum)}; }
    static Sums add(Sums sum, __m256i a, __m256i b) { return _mm256_add_epi32(sum, _mm256_madd_epi16(a, b)); }
#endif
    static Sums begin(const float*) { return none(); }
    static void end(Sums sum, const float* step, float* out) {
        fma(floats(sum), Vec::all(*step), Vec::load(out)).store(out);
    }

    template <int ROWS>
    struct WeightPairs {
        const int16_t* rounded;
        explicit WeightPairs(Weights of) : rounded(of.rounded) {}
        int32_t at(int row, int token) const {
            int32_t both;
            std::memcpy(&both, rounded + row * GRAIN + token, 4);
            return both;
        }
    };
};

inline void store_16_bits(Vec x, int16_t* to) {
#if defined(__AVX512F__)
    _mm256_storeu_si256((__m256i*)to, _mm512_cvtepi32_epi16(_mm512_cvtps_epi32(x.v)));
#else
    __m256i words = _mm256_cvtps_epi32(x.v);
    __m128i halves = _mm_packs_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
    _mm_storeu_si128((__m128i*)to, halves);
#endif
}

template <>
struct Rows<int8_t> : PairRows<Int8Pairs> {
    static constexpr float MOST_16 = 32767, LEAST_SIZE = 1e-30f;

    template <class Q>
    static float load_query(const Q* from, int64_t head_dim, Query* to) {
        static thread_local Scratch scratch;
        const int64_t all = width(head_dim);
        float* wide = (float*)scratch.at_least(all * sizeof(float));
        for (int64_t i = 0; i < all; ++i) wide[i] = i < head_dim ? ISA::widen(from[i]) : 0;
        const float fitting = float(INT32_MAX / 128 / head_dim);  // so that no sum of products overflows
        const float most = fitting < MOST_16 ? fitting : MOST_16;
        const float size = largest_size(wide, all), inverse = size > LEAST_SIZE ? most / size : 0;
        for (int64_t i = 0; i < all; i += W) store_16_bits(Vec::load(wide + i) * Vec::all(inverse), to + i);
        return size / most;
    }

    // Rounds the weights of rows to 16 bits, many rows at once. `largest` has of each row a vector with its largest weight.
    static void round(const float* weights, const float* largest, int64_t rows, int16_t* rounded, float* steps) {
        for (int64_t row = 0; row < rows; row += W) {
            const int64_t count = smaller(W, rows - row);
            Vec found[W];
            for (int64_t r = 0; r < W; ++r) found[r] = Vec::load(largest + (row + smaller(r, count - 1)) * W);
            const Vec most = across(found, [](Vec a, Vec b) { return largest_or_nan(a, b); });
            const Vec size = max(Vec::all(LEAST_SIZE), most);  // NaN where `most` is
            alignas(64) float inverse[W];
            (Vec::all(MOST_16) / size).store(inverse);
            (size * Vec::all(1 / MOST_16)).store(steps + row);
            for (int64_t r = 0; r < count; ++r)
                for (int64_t t = (row + r) * GRAIN; t < (row + r + 1) * GRAIN; t += W)
                    store_16_bits(Vec::load(weights + t) * Vec::all(inverse[r]), rounded + t);
        }
    }
};

}  // namespace ISA

#endif
