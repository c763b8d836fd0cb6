// Attention of few queries: all heads of a span over 16 tokens, then over the next 16. So the cache is read in the order in
// which it lies, once, and the next tokens are prefetched while the present tokens are computed with.
//
// For 16 tokens, first the scores of all rows are computed, then their weights, then the weighted sums of V: the steps of
// a single row wait for each other, and steps of different rows do not. There is no branch that a CPU could often guess
// wrong: a wrong guess would take back prefetches.
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

// Computes in fp32, whatever the cache holds.
template <class T>
struct Rows {
    using Query = float;
    static constexpr int W = Vec::width, TOKENS = W > 1 ? W : GRAIN;

    static int64_t width(int64_t head_dim) { return head_dim; }

    static void load_query(const T* from, int64_t head_dim, Query* to) {
        for (int64_t i = 0; i < head_dim; ++i) to[i] = widen(from[i]);
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

    // Computes out = out * factor + the sum of weights[t] * values[t] for each of ROWS rows.
    template <int ROWS>
    static void add(const float* weights, const T* const* values, int64_t offset, int64_t head_dim,
                    const float* factors, float* out) {
        int64_t i = 0;
        for (; i + W <= head_dim; i += W) {
            Vec sum[ROWS];
            for (int r = 0; r < ROWS; ++r) sum[r] = Vec::load(out + r * head_dim + i) * Vec::all(factors[r]);
            for (int t = 0; t < GRAIN; ++t) {
                Vec value = Vec::load(values[t] + offset + i);
                for (int r = 0; r < ROWS; ++r) sum[r] = fma(Vec::all(weights[r * GRAIN + t]), value, sum[r]);
            }
            for (int r = 0; r < ROWS; ++r) sum[r].store(out + r * head_dim + i);
        }
        for (; i < head_dim; ++i)
            for (int r = 0; r < ROWS; ++r) {
                float sum = out[r * head_dim + i] * factors[r];
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

    static void load_query(const bf16* from, int64_t head_dim, Query* to) {
        std::memcpy(to, from, head_dim * sizeof(bf16));
        std::memset(to + head_dim, 0, (width(head_dim) - head_dim) * sizeof(bf16));
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
    static void add(const float* weights, const bf16* const* values, int64_t offset, int64_t head_dim,
                    const float* factors, float* out) {
        alignas(32) uint32_t pairs[ROWS][GRAIN / 2];
        for (int r = 0; r < ROWS; ++r)
            _mm256_store_si256((__m256i*)pairs[r], (__m256i)_mm512_cvtneps_pbh(_mm512_loadu_ps(weights + r * GRAIN)));
        int64_t i = 0, apart = width(head_dim);
        for (; i + 32 <= head_dim; i += 32)
            add_32(pairs, values, offset + i, factors, out + i, apart, [](const bf16* p) { return _mm512_loadu_si512(p); });
        if (i < head_dim)
            add_32(pairs, values, offset + i, factors, out + i, apart,
                   [&](const bf16* p) { return load_bf16(p, head_dim - i); });
    }

    template <int ROWS, class Load>
    static void add_32(const uint32_t (&pairs)[ROWS][GRAIN / 2], const bf16* const* values, int64_t offset,
                       const float* factors, float* out, int64_t apart, Load load) {
        __m512 low[ROWS], high[ROWS];
        for (int r = 0; r < ROWS; ++r) {
            low[r] = _mm512_mul_ps(_mm512_loadu_ps(out + r * apart), _mm512_set1_ps(factors[r]));
            high[r] = _mm512_mul_ps(_mm512_loadu_ps(out + r * apart + 16), _mm512_set1_ps(factors[r]));
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

// The slots of 16 tokens. Where there are fewer, the last token stands for the missing, and no unwritten slot is read.
template <class T>
struct Grain {
    const T *keys[GRAIN], *values[GRAIN];

    void find(const Attention& a, const Places& places, int64_t first, int64_t count) {
        int64_t slots[GRAIN];
        places.slots(first, count, slots);
        for (int64_t t = 0; t < GRAIN; ++t) {
            keys[t] = (const T*)a.cache + slots[smaller(t, count - 1)] * a.kv_dim;
            values[t] = keys[t] + places.block_size * a.kv_dim;
        }
    }

    // Prefetches this head's part of the next memory into the second cache: the first cache of a Zen 4 (32 KiB) does not
    // hold the keys or values of a grain of 12 heads beside those that are being read.
    static void prefetch(const T* const* vectors, const Attention& a, int64_t head) {
        constexpr int64_t LINE = 64 / sizeof(T);
#if defined(__AMX_BF16__)
        // On a Xeon the same head of each token: in the order of memory, or into L1, was measured to be slower.
        for (int t = 0; t < GRAIN; ++t)
            for (int64_t i = 0; i < a.head_dim; i += LINE)
                __builtin_prefetch(vectors[t] + head * a.head_dim + i, 0, 2);
#else
        // On an EPYC whole tokens, in the order of memory: the CPU sees where that goes, and fetches ahead of it.
        for (int64_t t = GRAIN * head / a.kv_heads; t < GRAIN * (head + 1) / a.kv_heads; ++t)
            for (int64_t i = 0; i < a.kv_dim; i += LINE) __builtin_prefetch(vectors[t] + i, 0, 2);
#endif
    }
};

// The sums of the rows so far.
template <class T>
struct State {
    using Query = typename Rows<T>::Query;
    int64_t width;
    Query* queries;
    float *out, *max, *sums;  // sums: a vector for each row, to be added up at the end
    float *scores, *factors;  // those of the present 16 tokens

    State(Scratch& scratch, int64_t rows, int64_t head_dim) : width(Rows<T>::width(head_dim)) {
        int64_t floats = rows * (width + 2 + Vec::width + GRAIN);
        scores = (float*)scratch.at_least(floats * sizeof(float) + rows * width * sizeof(Query));
        out = scores + rows * GRAIN;
        sums = out + rows * width;
        max = sums + rows * Vec::width;
        factors = max + rows;
        queries = (Query*)(factors + rows);
        std::memset(out, 0, rows * (width + Vec::width) * sizeof(float));
        for (int64_t row = 0; row < rows; ++row) max[row] = NOTHING_SEEN;
    }
};

// The tokens of a grain that a row sees.
struct Seen {
    int64_t first, end;
    bool all() const { return first <= 0 && end >= GRAIN; }
    bool none() const { return first >= end; }
    void put_elsewhere(float value, float* to) const {
        for (int t = 0; t < GRAIN; ++t)
            if (t < first || t >= end) to[t] = value;
    }
};

// A weight is e to the power of score - `most`, where `most` is about the largest score so far. A score may be a little
// above it: so `most` seldom changes, and the sums are seldom multiplied anew.
constexpr float PASSED_BY = 8;

// Turns scores into weights; returns the factor by which the sums so far are to be multiplied.
template <class T>
static float weigh(float* scores, float scale, Seen seen, float& most, float* sums) {
    constexpr int W = Vec::width;
    if (!seen.all()) seen.put_elsewhere(NOTHING_SEEN, scores);
    Vec largest = Vec::all(NOTHING_SEEN);
    for (int t = 0; t < GRAIN; t += W) {
        Vec scaled = Vec::load(scores + t) * Vec::all(scale);
        scaled.store(scores + t);
        largest = max(largest, scaled);
    }
    float factor = 1;
    if (any_above(largest, Vec::all(most + PASSED_BY))) {
        float now = largest.largest();
        factor = std::exp(most - now);
        most = now;
    }
    for (int t = 0; t < GRAIN; t += W) Rows<T>::weight(Vec::load(scores + t) - Vec::all(most)).store(scores + t);
    if (!seen.all()) seen.put_elsewhere(0, scores);
    Vec sum = Vec::load(sums) * Vec::all(factor);
    for (int t = 0; t < GRAIN; t += W) sum = sum + Vec::load(scores + t);
    sum.store(sums);
    return factor;
}

template <class T>
static void load_queries(const Attention& a, const Unit& unit, const State<T>& state) {
    int64_t row = 0;
    for (int64_t head = 0; head < a.kv_heads; ++head)
        for (int64_t query = 0; query < unit.queries; ++query)
            for (int64_t member = 0; member < a.group; ++member, ++row) {
                int64_t at = unit.row(a, query) * a.row_stride + (head * a.group + member) * a.head_stride;
                Rows<T>::load_query((const T*)a.query + at, a.head_dim, state.queries + row * state.width);
            }
}

// Calls action(first row of a query, the tokens it sees) for the queries of one kv head that see any of these tokens.
template <class Action>
static void each_query(const Attention& a, const Unit& unit, int64_t head, int64_t token, int64_t count,
                       Action action) {
    for (int64_t query = 0; query < unit.queries; ++query) {
        int64_t position = unit.position + query;
        Seen seen{first_seen(a, position) - token, smaller(count, position + 1 - token)};
        if (!seen.none()) action((head * unit.queries + query) * a.group, seen);
    }
}

// Prefetches the values of a grain beside its keys, and the next keys beside its values: on an EPYC, lines that were
// prefetched earlier were gone again when they were needed. On a Xeon it prefetches a whole grain ahead, as measured.
#if defined(__AMX_BF16__)
constexpr bool A_GRAIN_AHEAD = true;
#else
constexpr bool A_GRAIN_AHEAD = false;
#endif

// Computes all rows over the tokens of a grain, and prefetches the next memory.
template <class T>
static void attend_grain(const Attention& a, const Unit& unit, const Grain<T>& grain, const Grain<T>& next,
                         int64_t token, int64_t count, const State<T>& state) {
    for (int64_t head = 0; head < a.kv_heads; ++head) {
        Grain<T>::prefetch(A_GRAIN_AHEAD ? next.keys : grain.values, a, head);
        each_query(a, unit, head, token, count, [&](int64_t first, Seen) {
            Rows<T>::scores(state.queries + first * state.width, a.group, grain.keys, head * a.head_dim, a.head_dim,
                            state.scores + first * GRAIN);
        });
    }
    for (int64_t head = 0; head < a.kv_heads; ++head)
        each_query(a, unit, head, token, count, [&](int64_t first, Seen seen) {
            for (int64_t row = first; row < first + a.group; ++row)
                state.factors[row] = weigh<T>(state.scores + row * GRAIN, a.scale, seen, state.max[row],
                                              state.sums + row * Vec::width);
        });
    for (int64_t head = 0; head < a.kv_heads; ++head) {
        Grain<T>::prefetch(A_GRAIN_AHEAD ? next.values : next.keys, a, head);
        each_query(a, unit, head, token, count, [&](int64_t first, Seen) {
            by_rows(a.group, [&](auto rows, int64_t at) {
                Rows<T>::template add<decltype(rows)::value>(
                    state.scores + (first + at) * GRAIN, grain.values, head * a.head_dim, a.head_dim,
                    state.factors + first + at, state.out + (first + at) * state.width);
            });
        });
    }
}

template <class T>
static void settle(const Attention& a, const State<T>& state, int64_t rows, Partial out) {
    for (int64_t row = 0; row < rows; ++row) {
        out.max[row] = state.max[row];
        out.sum[row] = Vec::load(state.sums + row * Vec::width).sum();
        Rows<T>::settle(state.out + row * state.width, a.head_dim, out.out + row * a.head_dim);
    }
}

int64_t row_cost(int64_t rows) { return 8 + (Vec::width > 1 ? 4 : 40) * rows; }

void attend_rows(const Attention& a, const Unit& unit, int64_t from, int64_t to, Partial out) {
    static thread_local Scratch scratch;
    by_dtype(a.dtype, [&](auto* of) {
        using T = std::remove_pointer_t<decltype(of)>;
        State<T> state(scratch, unit.rows(a), a.head_dim);
        load_queries(a, unit, state);
        Places places(a.spans, unit.span);
        Grain<T> grain, next;
        next.find(a, places, from, smaller(GRAIN, to - from));
        for (int64_t token = from; token < to; token += GRAIN) {
            int64_t left = to - token;
            grain = next;
            if (left > GRAIN) next.find(a, places, token + GRAIN, smaller(GRAIN, left - GRAIN));
            attend_grain(a, unit, grain, next, token, smaller(GRAIN, left), state);
        }
        settle(a, state, unit.rows(a), out);
    });
}

}  // namespace ISA
