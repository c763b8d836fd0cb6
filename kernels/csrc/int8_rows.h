// Attention of few queries over K and V that are kept in int8, in whole numbers: a query, and the weights of a row, are
// rounded to 16 bits, pairs of products are added up in 32. That is far finer than the levels of K and V are.
#pragma once
#include "int8_kv.h"
#include "rows.h"

#if defined(__AVX2__)

namespace ISA {

#if defined(__AVX512F__)

using Pairs = __m512i;  // pairs of numbers of 16 bits, or sums of 32

inline Pairs no_pairs() { return _mm512_setzero_si512(); }
inline Pairs load_pairs(const int16_t* p) { return _mm512_loadu_si512(p); }
inline Pairs all_pairs(int32_t pair) { return _mm512_set1_epi32(pair); }
inline Vec to_floats(Pairs sums) { return {_mm512_cvtepi32_ps(sums)}; }
inline Pairs add_products(Pairs sum, Pairs a, Pairs b) {
#if defined(__AVX512VNNI__)
    return _mm512_dpwssd_epi32(sum, a, b);
#else
    return _mm512_add_epi32(sum, _mm512_madd_epi16(a, b));
#endif
}

using Levels = __m256i;  // as many as Pairs has numbers

inline Levels load_levels(const int8_t* p) { return _mm256_loadu_si256((const __m256i*)p); }
// Loads the first `count`, with zeros after them; no memory beyond them is touched.
inline Levels load_levels(const int8_t* p, int64_t count) { return _mm256_maskz_loadu_epi8((1u << count) - 1, p); }
inline Pairs widen(Levels levels) { return _mm512_cvtepi8_epi16(levels); }
// The levels of two tokens side by side, those of half of the numbers each.
inline Pairs low_halves(Levels a, Levels b) { return widen(_mm256_unpacklo_epi8(a, b)); }
inline Pairs high_halves(Levels a, Levels b) { return widen(_mm256_unpackhi_epi8(a, b)); }

#else

using Pairs = __m256i;

inline Pairs no_pairs() { return _mm256_setzero_si256(); }
inline Pairs load_pairs(const int16_t* p) { return _mm256_loadu_si256((const __m256i*)p); }
inline Pairs all_pairs(int32_t pair) { return _mm256_set1_epi32(pair); }
inline Vec to_floats(Pairs sums) { return {_mm256_cvtepi32_ps(sums)}; }
inline Pairs add_products(Pairs sum, Pairs a, Pairs b) { return _mm256_add_epi32(sum, _mm256_madd_epi16(a, b)); }

using Levels = __m128i;

inline Levels load_levels(const int8_t* p) { return _mm_loadu_si128((const __m128i*)p); }
inline Levels load_levels(const int8_t* p, int64_t count) {
    alignas(16) int8_t padded[16] = {};
    std::memcpy(padded, p, count);
    return _mm_load_si128((const __m128i*)padded);
}
inline Pairs widen(Levels levels) { return _mm256_cvtepi8_epi16(levels); }
inline Pairs low_halves(Levels a, Levels b) { return widen(_mm_unpacklo_epi8(a, b)); }
inline Pairs high_halves(Levels a, Levels b) { return widen(_mm_unpackhi_epi8(a, b)); }

#endif

constexpr int LEVELS = 2 * Vec::width;  // the numbers of a Pairs

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
struct Rows<int8_t> {
    using Query = int16_t;
    static constexpr int W = Vec::width, TOKENS = W;
    static constexpr float MOST_16 = 32767, LEAST_SIZE = 1e-30f;

    static int64_t width(int64_t head_dim) { return round_up(head_dim, LEVELS); }

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

    static void scores(const Query* queries, int64_t rows, const int8_t* const* keys, int64_t offset, int64_t head_dim,
                       float* out) {
        const int64_t apart = width(head_dim);
#if defined(__AVX512F__)
        if (rows >= TRANSPOSE_FROM) return transposed_scores(queries, rows, keys, offset, head_dim, out);
#endif
        for (int64_t row = 0; row < rows; ++row)
            scores(queries + row * apart, keys, offset, head_dim, out + row * GRAIN);
    }

    static void scores(const Query* query, const int8_t* const* keys, int64_t offset, int64_t head_dim, float* out) {
        for (int first = 0; first < GRAIN; first += TOKENS) {
            Pairs sum[TOKENS];
            for (Pairs& lane_sum : sum) lane_sum = no_pairs();
            int64_t i = 0;
            for (; i + LEVELS <= head_dim; i += LEVELS) {
                const Pairs part = load_pairs(query + i);
                for (int t = 0; t < TOKENS; ++t)
                    sum[t] = add_products(sum[t], part, widen(load_levels(keys[first + t] + offset + i)));
            }
            if (i < head_dim) {
                const Pairs part = load_pairs(query + i);
                for (int t = 0; t < TOKENS; ++t)
                    sum[t] = add_products(sum[t], part, widen(load_levels(keys[first + t] + offset + i, head_dim - i)));
            }
            Vec floats[TOKENS];
            for (int t = 0; t < TOKENS; ++t) floats[t] = to_floats(sum[t]);
            sums(floats).store(out + first);
        }
    }

#if defined(__AVX512F__)
    // From this many rows of a kv head on, transposing K is worth it: then no row has lanes to add up.
    static constexpr int64_t TRANSPOSE_FROM = 3;

    static void transposed_scores(const Query* queries, int64_t rows, const int8_t* const* keys, int64_t offset,
                                  int64_t head_dim, float* out) {
        const int64_t apart = width(head_dim);
        for (int64_t i = 0; i < head_dim; i += LEVELS) {
            __m512 pairs[GRAIN];  // pairs of 32 numbers of all tokens
            for (int t = 0; t < GRAIN; ++t) {
                const int8_t* from = keys[t] + offset + i;
                const Levels levels = head_dim - i >= LEVELS ? load_levels(from) : load_levels(from, head_dim - i);
                pairs[t] = _mm512_castsi512_ps(widen(levels));
            }
            transpose(pairs);
            by_rows(rows, [&](auto count, int64_t row) {
                add_pairs<decltype(count)::value>(pairs, queries + row * apart + i, apart, i == 0, i + LEVELS >= head_dim,
                                                  out + row * GRAIN);
            });
        }
    }

    // Until the last numbers, `out` holds whole numbers.
    template <int ROWS>
    static void add_pairs(const __m512 (&pairs)[GRAIN], const Query* queries, int64_t apart, bool first, bool last,
                          float* out) {
        Pairs sum[ROWS];
        for (int r = 0; r < ROWS; ++r) sum[r] = first ? no_pairs() : _mm512_loadu_si512(out + r * GRAIN);
        for (int pair = 0; pair < GRAIN; ++pair)
            for (int r = 0; r < ROWS; ++r) {
                int32_t both;
                std::memcpy(&both, queries + r * apart + 2 * pair, 4);
                sum[r] = add_products(sum[r], _mm512_castps_si512(pairs[pair]), all_pairs(both));
            }
        for (int r = 0; r < ROWS; ++r)
            _mm512_storeu_ps(out + r * GRAIN, last ? to_floats(sum[r]).v : _mm512_castsi512_ps(sum[r]));
    }
#endif

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

    template <int ROWS>
    static void add(Weights of, const int8_t* const* values, int64_t offset, int64_t head_dim, float* out) {
        const int64_t apart = width(head_dim);
        int64_t i = 0;
        for (; i + LEVELS <= head_dim; i += LEVELS)
            add_numbers<ROWS>(of, values, offset + i, out + i, apart, [](const int8_t* p) { return load_levels(p); });
        if (i < head_dim)
            add_numbers<ROWS>(of, values, offset + i, out + i, apart,
                              [&](const int8_t* p) { return load_levels(p, head_dim - i); });
    }

    template <int ROWS, class Load>
    static void add_numbers(Weights of, const int8_t* const* values, int64_t offset, float* out, int64_t apart,
                            Load load) {
        Pairs low[ROWS], high[ROWS];
        for (int r = 0; r < ROWS; ++r) low[r] = high[r] = no_pairs();
        for (int t = 0; t < GRAIN; t += 2) {
            const Levels a = load(values[t] + offset), b = load(values[t + 1] + offset);
            const Pairs of_low = low_halves(a, b), of_high = high_halves(a, b);
            for (int r = 0; r < ROWS; ++r) {
                int32_t both;
                std::memcpy(&both, of.rounded + r * GRAIN + t, 4);
                low[r] = add_products(low[r], of_low, all_pairs(both));
                high[r] = add_products(high[r], of_high, all_pairs(both));
            }
        }
        for (int r = 0; r < ROWS; ++r) {
            float* to = out + r * apart;
            const Vec step = Vec::all(of.steps[r]);
            fma(to_floats(low[r]), step, Vec::load(to)).store(to);
            fma(to_floats(high[r]), step, Vec::load(to + W)).store(to + W);
        }
    }

    static Vec weight(Vec x) {
#if defined(__AVX512BF16__)
        return {power_of_two(_mm512_mul_ps(x.v, _mm512_set1_ps(1.44269504f)))};
#else
        return exp(x);
#endif
    }

    // The halves of two tokens' levels come by 128 bits: of 32 numbers, the second and the third eight have changed places.
    static void settle(const float* from, int64_t head_dim, float* out) {
        for (int64_t i = 0; i < head_dim; i += 8) {
            const int64_t eighth = i / 8, at = W == 16 && (eighth % 4 == 1 || eighth % 4 == 2) ? i ^ 24 : i;
            std::memcpy(out + i, from + at, smaller(8, head_dim - i) * sizeof(float));
        }
    }
};

}  // namespace ISA

#endif
