// The arithmetic of few queries over the K and V of 16 tokens; int8_rows.h has that of int8.
#pragma once
#include "attention.h"
#include "lanes.h"

namespace ISA {

constexpr int GRAIN = int(ROW_GRAIN);

// Calls action(number, first row) for `rows` rows, up to 8 at a time, with their number known to the compiler.
template <int MOST = 8, class Action>
static void by_rows(int64_t rows, Action action, int64_t first = 0) {
    for (; rows - first >= MOST; first += MOST) action(std::integral_constant<int, MOST>(), first);
    if constexpr (MOST > 1)
        if (first < rows) by_rows<MOST - 1>(rows, action, first);
}

// The weights of rows over 16 tokens; for int8 they are whole numbers, and each row has a step.
struct Weights {
    const float* all;
    const int16_t* rounded;
    const float* steps;
    Weights from(int64_t row) const { return {all + row * GRAIN, rounded + row * GRAIN, steps + row}; }
};

// The arithmetic of rows, by the type T of K and V in the cache: in fp32, where no other is defined below.
template <class T>
struct Rows {
    using Query = float;
    static constexpr int W = Vec::width, TOKENS = W > 1 ? W : GRAIN;

    static int64_t width(int64_t head_dim) { return head_dim; }

    // Returns what the scores of this query are to be multiplied with.
    template <class Q>
    static float load_query(const Q* from, int64_t head_dim, Query* to) {
        for (int64_t i = 0; i < head_dim; ++i) to[i] = widen(from[i]);
        return 1;
    }

    // Computes the scores of each of ROWS rows.
    static void scores(const Query* queries, int64_t rows, const T* const* keys, int64_t offset, int64_t head_dim,
                       float* out) {
        for (int64_t row = 0; row < rows; ++row)
            scores(queries + row * head_dim, keys, offset, head_dim, out + row * GRAIN);
    }

    static void scores(const Query* query, const T* const* keys, int64_t offset, int64_t head_dim, float* out) {
        for (int first = 0; first < GRAIN; first += TOKENS) {
            Vec sum[TOKENS];
            for (Vec& lane_sum : sum) lane_sum = Vec::zero();
            int64_t i = 0;
            for (; i + W <= head_dim; i += W) {
                Vec part = Vec::load(query + i);
                for (int t = 0; t < TOKENS; ++t)
                    sum[t] = fma(part, Vec::load(keys[first + t] + offset + i), sum[t]);
            }
            for (int t = 0; t < TOKENS; t += W) sums(sum + t).store(out + first + t);
            for (; i < head_dim; ++i)
                for (int t = 0; t < TOKENS; ++t) out[first + t] += query[i] * widen(keys[first + t][offset + i]);
        }
    }

    // Where weights stay as they are, there is nothing to round.
    static void round(const float*, const float*, int64_t, int16_t*, float*) {}

    // Adds the sum of weights[t] * values[t] for each of ROWS rows.
    template <int ROWS>
    static void add(Weights of, const T* const* values, int64_t offset, int64_t head_dim, float* out) {
        const float* weights = of.all;
        int64_t i = 0;
        for (; i + W <= head_dim; i += W) {
            Vec sum[ROWS];
            for (int r = 0; r < ROWS; ++r) sum[r] = Vec::load(out + r * head_dim + i);
            for (int t = 0; t < GRAIN; ++t) {
                Vec value = Vec::load(values[t] + offset + i);
                for (int r = 0; r < ROWS; ++r) sum[r] = fma(Vec::all(weights[r * GRAIN + t]), value, sum[r]);
            }
            for (int r = 0; r < ROWS; ++r) sum[r].store(out + r * head_dim + i);
        }
        for (; i < head_dim; ++i)
            for (int r = 0; r < ROWS; ++r) {
                float sum = out[r * head_dim + i];
                for (int t = 0; t < GRAIN; ++t) sum += weights[r * GRAIN + t] * widen(values[t][offset + i]);
                out[r * head_dim + i] = sum;
            }
    }

    static Vec weight(Vec x) { return exp(x); }

    static void settle(const float* from, int64_t head_dim, float* out) {
        std::memcpy(out, from, head_dim * sizeof(float));
    }
};

#if defined(__AVX512BF16__)

// Computes with two numbers at a time: two of a vector for the scores, one of each of two tokens for the sum.
template <>
struct Rows<bf16> {
    using Query = bf16;

    static int64_t width(int64_t head_dim) { return round_up(head_dim, 32); }

    static float load_query(const bf16* from, int64_t head_dim, Query* to) {
        std::memcpy(to, from, head_dim * sizeof(bf16));
        std::memset(to + head_dim, 0, (width(head_dim) - head_dim) * sizeof(bf16));
        return 1;
    }

    // From this many rows of a kv head on, transposing K is worth it: then no row has lanes to add up.
    static constexpr int64_t TRANSPOSE_FROM = 3;

    static void scores(const Query* queries, int64_t rows, const bf16* const* keys, int64_t offset, int64_t head_dim,
                       float* out) {
        int64_t apart = width(head_dim);
        if (rows < TRANSPOSE_FROM) {
            for (int64_t row = 0; row < rows; ++row)
                scores(queries + row * apart, keys, offset, head_dim, out + row * GRAIN);
            return;
        }
        for (int64_t i = 0; i < head_dim; i += 32) {
            __m512 pairs[GRAIN];  // pairs of 32 numbers of all tokens
            for (int t = 0; t < GRAIN; ++t)
                pairs[t] = _mm512_castsi512_ps(load_bf16(keys[t] + offset + i, head_dim - i));
            transpose(pairs);
            by_rows(rows, [&](auto count, int64_t row) {
                add_products<decltype(count)::value>(pairs, queries + row * apart + i, apart, i == 0, out + row * GRAIN);
            });
        }
    }

    template <int ROWS>
    static void add_products(const __m512 (&pairs)[GRAIN], const Query* queries, int64_t apart, bool first, float* out) {
        __m512 sum[ROWS];
        for (int r = 0; r < ROWS; ++r) sum[r] = first ? _mm512_setzero_ps() : _mm512_loadu_ps(out + r * GRAIN);
        for (int pair = 0; pair < GRAIN; ++pair)
            for (int r = 0; r < ROWS; ++r) {
                int32_t both;
                std::memcpy(&both, queries + r * apart + 2 * pair, 4);
                sum[r] = dot_pairs(sum[r], _mm512_castps_si512(pairs[pair]), _mm512_set1_epi32(both));
            }
        for (int r = 0; r < ROWS; ++r) _mm512_storeu_ps(out + r * GRAIN, sum[r]);
    }

    static void scores(const Query* query, const bf16* const* keys, int64_t offset, int64_t head_dim, float* out) {
        Vec sum[GRAIN];
        for (Vec& lane_sum : sum) lane_sum = Vec::zero();
        int64_t i = 0;
        for (; i + 32 <= head_dim; i += 32) {
            __m512i part = _mm512_loadu_si512(query + i);
            for (int t = 0; t < GRAIN; ++t)
                sum[t].v = dot_pairs(sum[t].v, part, _mm512_loadu_si512(keys[t] + offset + i));
        }
        if (i < head_dim) {
            __m512i part = load_bf16(query + i, head_dim - i);
            for (int t = 0; t < GRAIN; ++t)
                sum[t].v = dot_pairs(sum[t].v, part, load_bf16(keys[t] + offset + i, head_dim - i));
        }
        sums(sum).store(out);
    }

    template <int ROWS>
    static void add(Weights of, const bf16* const* values, int64_t offset, int64_t head_dim, float* out) {
        alignas(32) uint32_t pairs[ROWS][GRAIN / 2];
        for (int r = 0; r < ROWS; ++r)
            _mm256_store_si256((__m256i*)pairs[r], (__m256i)_mm512_cvtneps_pbh(_mm512_loadu_ps(of.all + r * GRAIN)));
        int64_t i = 0, apart = width(head_dim);
        for (; i + 32 <= head_dim; i += 32)
            add_32(pairs, values, offset + i, out + i, apart, [](const bf16* p) { return _mm512_loadu_si512(p); });
        if (i < head_dim)
            add_32(pairs, values, offset + i, out + i, apart,
                   [&](const bf16* p) { return load_bf16(p, head_dim - i); });
    }

    template <int ROWS, class Load>
    static void add_32(const uint32_t (&pairs)[ROWS][GRAIN / 2], const bf16* const* values, int64_t offset, float* out,
                       int64_t apart, Load load) {
        __m512 low[ROWS], high[ROWS];
        for (int r = 0; r < ROWS; ++r) {
            low[r] = _mm512_loadu_ps(out + r * apart);
            high[r] = _mm512_loadu_ps(out + r * apart + 16);
        }
        for (int t = 0; t < GRAIN; t += 2) {
            __m512i a = load(values[t] + offset), b = load(values[t + 1] + offset);
            __m512i of_low = _mm512_unpacklo_epi16(a, b), of_high = _mm512_unpackhi_epi16(a, b);
            for (int r = 0; r < ROWS; ++r) {
                __m512i weight = _mm512_set1_epi32(int(pairs[r][t / 2]));
                low[r] = dot_pairs(low[r], of_low, weight);
                high[r] = dot_pairs(high[r], of_high, weight);
            }
        }
        for (int r = 0; r < ROWS; ++r) {
            _mm512_storeu_ps(out + r * apart, low[r]);
            _mm512_storeu_ps(out + r * apart + 16, high[r]);
        }
    }

    static Vec weight(Vec x) { return {power_of_two(_mm512_mul_ps(x.v, _mm512_set1_ps(1.44269504f)))}; }

    static void settle(const float* from, int64_t head_dim, float* out) {
        for (int64_t i = 0; i < head_dim; i += 32) {
            __m512i low = _mm512_loadu_si512(from + i), high = _mm512_loadu_si512(from + i + 16);
            alignas(64) float ordered[32];
            _mm512_store_si512(ordered, in_order_low(low, high));
            _mm512_store_si512(ordered + 16, in_order_high(low, high));
            std::memcpy(out + i, ordered, smaller(32, head_dim - i) * sizeof(float));
        }
    }
};

#endif

}  // namespace ISA
