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

#if defined(__AVX2__)

// Computes with two numbers at a time: two of a vector for the scores, one of each of two tokens for the sum. P has the
// numbers in the cache (Number), as queries have them (Query), and two vectors' worth of them as they are loaded and as they
// are multiplied (Pairs); and the sums of a vector's lanes (Sums).
template <class P>
struct PairRows {
    using Number = typename P::Number;
    using Query = typename P::Query;
    using Sums = typename P::Sums;
    static constexpr int W = Vec::width, NUMBERS = 2 * W;

    static int64_t width(int64_t head_dim) { return round_up(head_dim, NUMBERS); }

    // Calls action(i, load) for each part of a vector: load(p) has the numbers at p, with zeros after the last part's.
    template <class Action>
    __attribute__((always_inline)) static void each_part(int64_t head_dim, Action action) {
        int64_t i = 0;
        for (; i + NUMBERS <= head_dim; i += NUMBERS) action(i, [](const Number* p) { return P::load(p); });
        if (i < head_dim) action(i, [left = head_dim - i](const Number* p) { return P::load(p, left); });
    }

    static void scores(const Query* queries, int64_t rows, const Number* const* keys, int64_t offset, int64_t head_dim,
                       float* out) {
        const int64_t apart = width(head_dim);
#if defined(__AVX512F__)
        if (rows >= TRANSPOSE_FROM) return transposed_scores(queries, rows, keys, offset, head_dim, out);
#endif
        for (int64_t row = 0; row < rows; ++row)
            scores(queries + row * apart, keys, offset, head_dim, out + row * GRAIN);
    }

    static void scores(const Query* query, const Number* const* keys, int64_t offset, int64_t head_dim, float* out) {
        for (int first = 0; first < GRAIN; first += W) {
            Sums sum[W];
            for (Sums& lane_sum : sum) lane_sum = P::none();
            each_part(head_dim, [&](int64_t i, auto load) __attribute__((always_inline)) {
                const auto part = P::query(query + i);
                for (int t = 0; t < W; ++t) sum[t] = P::add(sum[t], part, P::pairs(load(keys[first + t] + offset + i)));
            });
            Vec floats[W];
            for (int t = 0; t < W; ++t) floats[t] = P::floats(sum[t]);
            sums(floats).store(out + first);
        }
    }

#if defined(__AVX512F__)
    // From this many rows of a kv head on, transposing K is worth it: then no row has lanes to add up.
    static constexpr int64_t TRANSPOSE_FROM = 3;

    static void transposed_scores(const Query* queries, int64_t rows, const Number* const* keys, int64_t offset,
                                  int64_t head_dim, float* out) {
        const int64_t apart = width(head_dim);
        for (int64_t i = 0; i < head_dim; i += NUMBERS) {
            __m512 pairs[GRAIN];  // pairs of 32 numbers of all tokens
            for (int t = 0; t < GRAIN; ++t) {
                const Number* from = keys[t] + offset + i;
                const auto numbers = head_dim - i >= NUMBERS ? P::load(from) : P::load(from, head_dim - i);
                pairs[t] = _mm512_castsi512_ps(P::pairs(numbers));
            }
            transpose(pairs);
            by_rows(rows, [&](auto count, int64_t row) {
                add_pairs<decltype(count)::value>(pairs, queries + row * apart + i, apart, i == 0, i + NUMBERS >= head_dim,
                                                  out + row * GRAIN);
            });
        }
    }

    // Until the last numbers, `out` holds sums as they are.
    template <int ROWS>
    static void add_pairs(const __m512 (&pairs)[GRAIN], const Query* queries, int64_t apart, bool first, bool last,
                          float* out) {
        Sums sum[ROWS];
        for (int r = 0; r < ROWS; ++r) {
            sum[r] = P::none();
            if (!first) std::memcpy(&sum[r], out + r * GRAIN, sizeof sum[r]);
        }
        for (int pair = 0; pair < GRAIN; ++pair)
            for (int r = 0; r < ROWS; ++r) {
                int32_t both;
                std::memcpy(&both, queries + r * apart + 2 * pair, 4);
                sum[r] = P::add(sum[r], _mm512_castps_si512(pairs[pair]), P::all(both));
            }
        for (int r = 0; r < ROWS; ++r)
            if (last)
                P::floats(sum[r]).store(out + r * GRAIN);
            else
                std::memcpy(out + r * GRAIN, &sum[r], sizeof sum[r]);
    }
#endif

    template <int ROWS>
    static void add(Weights of, const Number* const* values, int64_t offset, int64_t head_dim, float* out) {
        const typename P::template WeightPairs<ROWS> weights(of);
        const int64_t apart = width(head_dim);
        each_part(head_dim, [&](int64_t i, auto load) __attribute__((always_inline)) {
            Sums low[ROWS], high[ROWS];
            for (int r = 0; r < ROWS; ++r) {
                low[r] = P::begin(out + r * apart + i);
                high[r] = P::begin(out + r * apart + i + W);
            }
            for (int t = 0; t < GRAIN; t += 2) {
                const auto a = load(values[t] + offset + i), b = load(values[t + 1] + offset + i);
                const auto of_low = P::low(a, b), of_high = P::high(a, b);
                for (int r = 0; r < ROWS; ++r) {
                    const auto both = P::all(weights.at(r, t));
                    low[r] = P::add(low[r], of_low, both);
                    high[r] = P::add(high[r], of_high, both);
                }
            }
            for (int r = 0; r < ROWS; ++r) {
                P::end(low[r], of.steps + r, out + r * apart + i);
                P::end(high[r], of.steps + r, out + r * apart + i + W);
            }
        });
    }

    static Vec weight(Vec x) {
#if defined(__AVX512BF16__)
        return {power_of_two(_mm512_mul_ps(x.v, _mm512_set1_ps(1.44269504f)))};
#else
        return exp(x);
#endif
    }

    // The halves of two tokens' numbers come by 128 bits: P::TOGETHER numbers in `low`, as many in `high`, and so on.
    static void settle(const float* from, int64_t head_dim, float* out) {
        constexpr int64_t TOGETHER = P::TOGETHER;
        for (int64_t i = 0; i < head_dim; i += NUMBERS) {
            alignas(64) float last[NUMBERS];
            float* to = i + NUMBERS <= head_dim ? out + i : last;
            for (int64_t k = 0; k < NUMBERS / TOGETHER; ++k)
                std::memcpy(to + k * TOGETHER, from + i + k % 2 * W + k / 2 * TOGETHER, TOGETHER * sizeof(float));
            if (to == last) std::memcpy(out + i, last, (head_dim - i) * sizeof(float));
        }
    }
};

#endif

#if defined(__AVX512BF16__)

struct Bf16Pairs {
    using Number = bf16;
    using Query = bf16;
    using Sums = __m512;
    static constexpr int64_t TOGETHER = 4;

    static __m512i load(const bf16* p) { return _mm512_loadu_si512(p); }
    static __m512i load(const bf16* p, int64_t count) { return load_bf16(p, count); }
    static __m512i query(const bf16* p) { return load(p); }
    static __m512i pairs(__m512i numbers) { return numbers; }
    static __m512i low(__m512i a, __m512i b) { return _mm512_unpacklo_epi16(a, b); }
    static __m512i high(__m512i a, __m512i b) { return _mm512_unpackhi_epi16(a, b); }
    static __m512i all(int32_t pair) { return _mm512_set1_epi32(pair); }
    static Sums none() { return _mm512_setzero_ps(); }
    static Sums add(Sums sum, __m512i a, __m512i b) { return dot_pairs(sum, a, b); }
    static Vec floats(Sums sum) { return {sum}; }
    static Sums begin(const float* out) { return _mm512_loadu_ps(out); }
    static void end(Sums sum, const float*, float* out) { _mm512_storeu_ps(out, sum); }

    template <int ROWS>
    struct WeightPairs {
        alignas(32) uint32_t pairs[ROWS][GRAIN / 2];
        explicit WeightPairs(Weights of) {
            for (int r = 0; r < ROWS; ++r)
                _mm256_store_si256((__m256i*)pairs[r], (__m256i)_mm512_cvtneps_pbh(_mm512_loadu_ps(of.all + r * GRAIN)));
        }
        int32_t at(int row, int token) const { return int32_t(pairs[row][token / 2]); }
    };
};

template <>
struct Rows<bf16> : PairRows<Bf16Pairs> {
    static float load_query(const bf16* from, int64_t head_dim, Query* to) {
        std::memcpy(to, from, head_dim * sizeof(bf16));
        std::memset(to + head_dim, 0, (width(head_dim) - head_dim) * sizeof(bf16));
        return 1;
    }
};

#endif

}  // namespace ISA
