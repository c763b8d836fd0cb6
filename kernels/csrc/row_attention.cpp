// Attention of few queries: all heads of a span over 16 tokens, then over the next 16. So the cache is read in the order in
// which it lies, once, and the next tokens are prefetched while the present tokens are computed with.
//
// For 16 tokens, first the scores of all rows are computed, then their weights, then the weighted sums of V: the steps of
// a single row wait for each other, and steps of different rows do not. There is no branch that a CPU could often guess
// wrong: a wrong guess would take back prefetches.
#include "int8_rows.h"
#include "rows.h"

namespace ISA {

// The slots of 16 tokens. Where there are fewer, the last token stands for the missing, and no unwritten slot is read.
template <class T>
struct Grain {
    const T *keys[GRAIN], *values[GRAIN];

    // Finds the grain that begins at token `first` and, at the latest, ends at `end`.
    void find(const Attention& a, const Places& places, int64_t first, int64_t end) {
        const int64_t count = smaller(GRAIN, end - first);
        int64_t slots[GRAIN];
        places.slots(first, count, slots);
        for (int64_t t = 0; t < GRAIN; ++t) {
            keys[t] = (const T*)a.cache + slots[smaller(t, count - 1)] * a.vector;
            values[t] = keys[t] + places.block_size * a.vector;
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
            for (int64_t i = 0; i < a.vector; i += LINE) __builtin_prefetch(vectors[t] + i, 0, 2);
#endif
    }
};

// The sums of the rows so far.
template <class T>
struct State {
    using Query = typename Rows<T>::Query;
    static constexpr bool IN_INT8 = std::is_same_v<T, int8_t>;
    int64_t width;
    Query* queries;
    float *out, *max, *sums;  // sums: a vector for each row, to be added up at the end
    float* scores;            // those of the present 16 tokens, then their weights
    float* scales;            // what each row's scores are multiplied with
    // In int8: of each kv head the scales of the present 16 tokens; of each row a vector with its largest weight, the step
    // between its rounded weights, and these.
    float *key_scales, *value_scales, *largest, *steps;
    int16_t* rounded;

    State(Scratch& scratch, int64_t rows, int64_t head_dim, int64_t kv_heads, bool begins)
        : width(Rows<T>::width(head_dim)) {
        constexpr int64_t W = Vec::width;
        const int64_t heads = IN_INT8 ? round_up(kv_heads, GRAIN) : 0, in_int8 = IN_INT8 ? round_up(rows, W) : 0;
        const int64_t of_row = width + 2 + W + GRAIN, floats = rows * of_row + 2 * heads * GRAIN + in_int8 * (W + 1);
        scores = (float*)scratch.at_least(floats * sizeof(float) + in_int8 * GRAIN * 2 + rows * width * sizeof(Query));
        key_scales = scores + rows * GRAIN;
        value_scales = key_scales + heads * GRAIN;
        largest = value_scales + heads * GRAIN;
        sums = largest + in_int8 * W;
        rounded = (int16_t*)(sums + rows * W);
        out = (float*)(rounded + in_int8 * GRAIN);
        steps = out + rows * width;
        max = steps + in_int8;
        scales = max + rows;
        queries = (Query*)(scales + rows);
        if (!begins) return;
        std::memset(out, 0, rows * width * sizeof(float));
        std::memset(sums, 0, rows * W * sizeof(float));
        for (int64_t row = 0; row < rows; ++row) max[row] = NOTHING_SEEN;
    }

    Weights weights(int64_t row) const { return Weights{scores, rounded, steps}.from(row); }
};

// The tokens of a grain that a row sees.
struct Seen {
    int64_t first, end;
    bool all() const { return first <= 0 && end >= GRAIN; }
    void put_elsewhere(float value, float* to) const {
        for (int t = 0; t < GRAIN; ++t)
            if (t < first || t >= end) to[t] = value;
    }
};

// A weight is e to the power of score - `most`, where `most` is about the largest score so far. A score may be a little
// above it: so `most` seldom changes, and the sums are seldom multiplied anew.
constexpr float PASSED_BY = 8;

static void multiply(float* numbers, int64_t count, float factor) {
    for (int64_t i = 0; i < count; ++i) numbers[i] *= factor;
}

// Turns the products or the scores of a row into weights; those of int8 come to be multiplied with the scales of their tokens' V.
template <bool ARE_SCORES, class T>
static void weigh(const State<T>& state, int64_t row, int64_t head, Seen seen) {
    constexpr int W = Vec::width;
    float *scores = state.scores + row * GRAIN, *sums = state.sums + row * W, &most = state.max[row];
    if (!seen.all()) seen.put_elsewhere(NOTHING_SEEN, scores);
    Vec largest = Vec::all(NOTHING_SEEN);
    for (int t = 0; t < GRAIN; t += W) {
        Vec scaled = Vec::load(scores + t);
        if constexpr (!ARE_SCORES) scaled = scaled * Vec::all(state.scales[row]);
        if constexpr (!ARE_SCORES && State<T>::IN_INT8) scaled = scaled * Vec::load(state.key_scales + head * GRAIN + t);
        scaled.store(scores + t);
        largest = max(largest, scaled);
    }
    if (any_above(largest, Vec::all(most + PASSED_BY))) {
        float now = largest.largest();
        multiply(sums, W, std::exp(most - now));
        multiply(state.out + row * state.width, state.width, std::exp(most - now));
        most = now;
    }
    for (int t = 0; t < GRAIN; t += W) Rows<T>::weight(Vec::load(scores + t) - Vec::all(most)).store(scores + t);
    if (!seen.all()) seen.put_elsewhere(0, scores);
    Vec sum = Vec::load(sums);
    for (int t = 0; t < GRAIN; t += W) sum = sum + Vec::load(scores + t);
    sum.store(sums);
    if constexpr (State<T>::IN_INT8) {
        Vec size = Vec::zero();
        for (int t = 0; t < GRAIN; t += W) {
            const Vec weight = Vec::load(scores + t) * Vec::load(state.value_scales + head * GRAIN + t);
            weight.store(scores + t);
            size = largest_or_nan(size, weight);
        }
        size.store(state.largest + row * W);
    }
}

template <class Q, class T>
static void load_queries(const Attention& a, const Unit& unit, const State<T>& state) {
    int64_t row = 0;
    for (int64_t head = 0; head < a.kv_heads; ++head)
        for (int64_t query = 0; query < unit.queries; ++query)
            for (int64_t member = 0; member < a.group; ++member, ++row) {
                int64_t at = unit.row(a, query) * a.row_stride + (head * a.group + member) * a.head_stride;
                state.scales[row] =
                    a.scoring.scale * Rows<T>::load_query((const Q*)a.query + at, a.head_dim, state.queries + row * state.width);
            }
}

// The queries that see any of these tokens: [first, end) of the unit's.
struct Seeing {
    int64_t first, end;
    Seeing(const Attention& a, const Unit& unit, int64_t token, int64_t count)
        : first(larger(0, token - unit.position)),
          end(smaller(unit.queries, token + count + a.scoring.window - 1 - unit.position)) {}
    int64_t rows(const Attention& a) const { return (end - first) * a.group; }
    int64_t first_row(const Attention& a, const Unit& unit, int64_t head) const {
        return (head * unit.queries + first) * a.group;
    }
};

// Prefetches the values of a grain beside its keys, and the next keys beside its values: on an EPYC, lines that were
// prefetched earlier were gone again when they were needed. On a Xeon it prefetches a whole grain ahead, as measured.
#if defined(__AMX_BF16__)
constexpr bool A_GRAIN_AHEAD = true;
#else
constexpr bool A_GRAIN_AHEAD = false;
#endif

#if defined(__AVX512F__)
// Finds the scales of four heads from `head` on. Of each token 8 bytes are read, those of four heads from `from` on: they
// end with the vector, and begin among the levels where it has fewer heads than four.
static void find_four(const int8_t* const* vectors, int64_t levels, int64_t head, int64_t from, float* scales) {
    const int64_t place = levels + from * SCALE_BYTES;
    auto two = [&](int t) {
        auto of_token = [&](int t) { return _mm_loadl_epi64((const __m128i*)(vectors[t] + place)); };
        return _mm_unpacklo_epi64(of_token(t), of_token(t + 1));
    };
    auto eight = [&](int t) {
        const __m256i low = _mm256_set_m128i(two(t + 2), two(t)), high = _mm256_set_m128i(two(t + 6), two(t + 4));
        return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
    };
    const __m512i first = eight(0), second = eight(8);
    // A scale of bf16 is the upper half of a float: word 4 * t + i goes to word 2 * t + 1.
    const __m512i words = _mm512_mullo_epi32(_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15),
                                             _mm512_set1_epi32(4 << 16));
    for (int64_t i = 0; i < 4; ++i) {
        const __m512i at = _mm512_add_epi32(words, _mm512_set1_epi32(int(head - from + i) << 16));
        _mm512_storeu_si512(scales + i * GRAIN, _mm512_maskz_permutex2var_epi16(0xAAAAAAAA, first, at, second));
    }
}
#endif

// Finds the scales of a grain's tokens: each kv head's side by side.
static void find_scales(const Attention& a, const int8_t* const* vectors, float* scales) {
    const int64_t levels = a.kv_heads * a.head_dim;
#if defined(__AVX512F__)
    if (a.vector >= 8) {
        for (int64_t head = 0; head < a.kv_heads; head += 4)
            find_four(vectors, levels, head, smaller(head, a.kv_heads - 4), scales + head * GRAIN);
        return;
    }
#endif
    for (int64_t head = 0; head < a.kv_heads; ++head)
        for (int t = 0; t < GRAIN; ++t) scales[head * GRAIN + t] = scale_at(vectors[t] + levels, head);
}

// Makes scores of the products of a query's rows with a grain's tokens.
template <class T>
__attribute__((noinline)) static void change(const Attention& a, const State<T>& state, int64_t first, int64_t head) {
    for (int64_t member = 0; member < a.group; ++member) {
        float* scores = state.scores + (first + member) * GRAIN;
        for (int t = 0; t < GRAIN; t += Vec::width) {
            Vec product = Vec::load(scores + t);
            if constexpr (State<T>::IN_INT8) product = product * Vec::load(state.key_scales + head * GRAIN + t);
            score_of(a.scoring, product, state.scales[first + member]).store(scores + t);
        }
    }
}

// Computes all rows over the tokens of a grain, and prefetches the next memory.
template <class T>
static void attend_grain(const Attention& a, const Unit& unit, const Grain<T>& grain, const Grain<T>& next,
                         int64_t token, int64_t count, const State<T>& state) {
    const Seeing seeing(a, unit, token, count);
    const bool changes = a.scoring.changes();
    if constexpr (State<T>::IN_INT8) find_scales(a, grain.keys, state.key_scales);
    for (int64_t head = 0; head < a.kv_heads; ++head) {
        Grain<T>::prefetch(A_GRAIN_AHEAD ? next.keys : grain.values, a, head);
        const int64_t first = seeing.first_row(a, unit, head);
        Rows<T>::scores(state.queries + first * state.width, seeing.rows(a), grain.keys, head * a.head_dim, a.head_dim,
                        state.scores + first * GRAIN);
    }
    if constexpr (State<T>::IN_INT8) find_scales(a, grain.values, state.value_scales);
    for (int64_t head = 0; head < a.kv_heads; ++head)
        for (int64_t query = seeing.first; query < seeing.end; ++query) {
            const int64_t first = (head * unit.queries + query) * a.group, position = unit.position + query;
            const Seen seen{first_seen(a, position) - token, smaller(count, position + 1 - token)};
            if (changes) change(a, state, first, head);
            for (int64_t row = first; row < first + a.group; ++row)
                changes ? weigh<true>(state, row, head, seen) : weigh<false>(state, row, head, seen);
        }
    if constexpr (State<T>::IN_INT8)
        Rows<T>::round(state.scores, state.largest, unit.rows(a), state.rounded, state.steps);
    for (int64_t head = 0; head < a.kv_heads; ++head) {
        Grain<T>::prefetch(A_GRAIN_AHEAD ? next.values : next.keys, a, head);
        const int64_t first = seeing.first_row(a, unit, head);
        by_rows(seeing.rows(a), [&](auto rows, int64_t at) {
            Rows<T>::template add<decltype(rows)::value>(state.weights(first + at), grain.values, head * a.head_dim,
                                                         a.head_dim, state.out + (first + at) * state.width);
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

// T is the type of K and V in the cache, Q that of the queries.
template <class T, class Q>
static void attend_rows_of(const Attention& a, const Unit& unit, Slice slice, Scratch& scratch, Partial out) {
    State<T> state(scratch, unit.rows(a), a.head_dim, a.kv_heads, slice.begins);
    if (slice.begins) load_queries<Q>(a, unit, state);
    Places places(a.spans, unit.span);
    Grain<T> grain, next;
    next.find(a, places, slice.from, slice.to);
    for (int64_t token = slice.from; token < slice.to; token += GRAIN) {
        int64_t left = slice.to - token;
        grain = next;
        if (left > GRAIN)
            next.find(a, places, token + GRAIN, slice.to);
        else if (slice.next)
            next.find(a, Places(a.spans, slice.next->unit.span), slice.next->from, slice.next->to);
        attend_grain(a, unit, grain, next, token, smaller(GRAIN, left), state);
    }
    if (slice.ends) settle(a, state, unit.rows(a), out);
}

void attend_rows(const Attention& a, const Unit& unit, Slice slice, Scratch& scratch, Partial out) {
    by_dtype(a.dtype, [&](auto* of) {
        using Q = std::remove_pointer_t<decltype(of)>;
        a.kept == INT8 ? attend_rows_of<int8_t, Q>(a, unit, slice, scratch, out)
                       : attend_rows_of<Q, Q>(a, unit, slice, scratch, out);
    });
}

}  // namespace ISA
