// Attention of many queries: tiles of queries, one in each lane of a vector, over tiles of 64 tokens.
//
// Scores are computed transposed, a vector of queries for each token,
//
//     scores[token][query] = sum over i of keys[token][i] * queries[i][query]
//     out[i][query]       += sum over tokens of values[token][i] * weights[token][query]
//
// so that the softmax of a query stays in its lane, and both products multiply a number of K or V, the same for all
// lanes, with a vector. A tile of K and V is packed once, with zeros for tokens that are not there, and serves all tiles
// of queries of the unit.
#include "attention.h"
#include "int8_kv.h"
#include "lanes.h"

namespace ISA {

constexpr int KEYS = int(TILE_GRAIN), LANES = Vec::width;
constexpr float HIDDEN = -1e37f;  // the score of a token that a query does not see: far below NOTHING_SEEN

// A tile of queries: what each lane's query sees, and its sums so far.
struct Lanes {
    alignas(64) int32_t last_seen[LANES], first_seen[LANES];
    alignas(64) float max[LANES], sum[LANES];

    bool see_all(int64_t first, int64_t end) const {
        return end - 1 <= last_seen[0] && first >= first_seen[LANES - 1];
    }
    bool see_any(int64_t first, int64_t end) const {
        return first <= last_seen[LANES - 1] && end > first_seen[0];
    }
};

// Makes scores of the products with tokens.
__attribute__((noinline)) static void change(const Scoring& scoring, float factor, int tokens, float (*scores)[LANES]) {
    for (int t = 0; t < tokens; ++t) score_of(scoring, Vec::load(scores[t]), factor).store(scores[t]);
}

static void hide(float (*scores)[LANES], const Lanes& lanes, int64_t first, int tokens) {
    for (int t = 0; t < tokens; ++t)
        for (int lane = 0; lane < LANES; ++lane) {
            int32_t token = int32_t(first) + t;
            bool seen = token <= lanes.last_seen[lane] && token >= lanes.first_seen[lane];
            scores[t][lane] = seen ? scores[t][lane] : HIDDEN;
        }
}

// Computes in fp32, whatever the cache holds.
template <class T>
struct Tiles {
    using Number = float;
    static constexpr int TOGETHER = LANES == 16 ? 16 : 8, STEP = TOGETHER;  // sums that are held in registers
    static constexpr bool SCALES_QUERIES = true;

    // Return how many numbers a packed key or query has, and a packed value or output.
    static int64_t key_width(int64_t head_dim) { return head_dim; }
    static int64_t value_width(int64_t head_dim) { return round_up(head_dim, TOGETHER); }

    static void begin() {}
    static void end() {}
    static float final_max(float max, float) { return max; }

    static void pack_queries(const T* const* from, int64_t head_dim, float scale, float* to) {
        for (int lane = 0; lane < LANES; ++lane)
            for (int64_t i = 0; i < head_dim; ++i) to[i * LANES + lane] = widen(from[lane][i]) * scale;
    }

    static void pack_row(const T* from, int64_t count, int64_t width, float* to) {
        int64_t i = 0;
        for (; i + LANES <= count; i += LANES) Vec::load(from + i).store(to + i);
        for (; i < count; ++i) to[i] = widen(from[i]);
        for (; i < width; ++i) to[i] = 0;
    }
    static void pack_keys(const T* const* from, int tokens, int64_t head_dim, float* to) {
        for (int t = 0; t < tokens; ++t) pack_row(from[t], head_dim, head_dim, to + t * head_dim);
        std::memset(to + tokens * head_dim, 0, (round_up(tokens, STEP) - tokens) * head_dim * sizeof(float));
    }
    static void pack_values(const T* const* from, int tokens, int64_t head_dim, float* to) {
        int64_t width = value_width(head_dim);
        for (int t = 0; t < tokens; ++t) pack_row(from[t], head_dim, width, to + t * width);
        std::memset(to + tokens * width, 0, (round_up(tokens, STEP) - tokens) * width * sizeof(float));
    }

    static void scores(const float* query, const float* keys, int tokens, int64_t head_dim, float (*out)[LANES]) {
        for (int first = 0; first < tokens; first += TOGETHER) {
            Vec sum[TOGETHER];
            for (Vec& lane_sum : sum) lane_sum = Vec::zero();
            const float* key = keys + first * head_dim;
            for (int64_t i = 0; i < head_dim; ++i) {
                Vec part = Vec::load(query + i * LANES);
                for (int t = 0; t < TOGETHER; ++t) sum[t] = fma(Vec::all(key[t * head_dim + i]), part, sum[t]);
            }
            for (int t = 0; t < TOGETHER; ++t) sum[t].store(out[first + t]);
        }
    }

    static void weigh(float (*scores)[LANES], int tokens, bool hidden, float, Lanes& lanes, float* out, int64_t width) {
        Vec before = Vec::load(lanes.max), most = before;
        for (int t = 0; t < tokens; ++t) most = max(most, Vec::load(scores[t]));
        most.store(lanes.max);
        Vec factor = exp(before - most), sum = Vec::load(lanes.sum) * factor;
        for (int t = 0; t < tokens; ++t) {
            Vec weight = exp(Vec::load(scores[t]) - most);
            weight.store(scores[t]);
        }
        if (hidden) forget_hidden(scores, tokens);
        for (int t = 0; t < tokens; ++t) sum = sum + Vec::load(scores[t]);
        sum.store(lanes.sum);
        for (int64_t i = 0; i < width; ++i) (Vec::load(out + i * LANES) * factor).store(out + i * LANES);
    }
    // The smallest result of exp is not zero, but tokens that are not seen must weigh exactly nothing.
    static void forget_hidden(float (*weights)[LANES], int tokens) {
        for (int t = 0; t < tokens; ++t)
            for (int lane = 0; lane < LANES; ++lane) weights[t][lane] = weights[t][lane] < 1e-37f ? 0 : weights[t][lane];
    }

    static void add(float (*weights)[LANES], const float* values, int tokens, int64_t width, float* out) {
        for (int64_t first = 0; first < width; first += TOGETHER) {
            Vec sum[TOGETHER];
            for (int i = 0; i < TOGETHER; ++i) sum[i] = Vec::load(out + (first + i) * LANES);
            for (int t = 0; t < tokens; ++t) {
                Vec weight = Vec::load(weights[t]);
                const float* value = values + t * width + first;
                for (int i = 0; i < TOGETHER; ++i) sum[i] = fma(Vec::all(value[i]), weight, sum[i]);
            }
            for (int i = 0; i < TOGETHER; ++i) sum[i].store(out + (first + i) * LANES);
        }
    }
};

#if defined(__AVX512BF16__)

// Multiplies pairs of bf16: two numbers of a vector for the scores, two tokens for the sum. Weights are bf16 too.
// Scores, and the max of a lane, are before scaling.
template <>
struct Tiles<bf16> {
    using Number = uint32_t;  // a pair
    static constexpr bool SCALES_QUERIES = false;

    static int64_t key_width(int64_t head_dim) { return round_up(head_dim, 32); }  // in bf16
    static int64_t value_width(int64_t head_dim) { return round_up(head_dim, 16); }
    static float final_max(float max, float scale) { return max * scale; }

    // Packs pairs of the vectors' numbers as [key_width / 2][LANES].
    static void pack_queries(const bf16* const* from, int64_t head_dim, float, Number* to) {
        for (int64_t i = 0; i < head_dim; i += 32) {
            __m512 rows[16];
            for (int lane = 0; lane < 16; ++lane)
                rows[lane] = _mm512_castsi512_ps(load_bf16(from[lane] + i, head_dim - i));
            transpose(rows);
            for (int pair = 0; pair < 16; ++pair) _mm512_storeu_ps(to + (i / 2 + pair) * LANES, rows[pair]);
        }
    }

    // Loads 32 numbers of each of two tokens, zeros for missing tokens.
    static void load_pair(const bf16* const* from, int t, int tokens, int64_t i, int64_t head_dim, __m512i& low,
                          __m512i& high) {
        __m512i a = t < tokens ? load_bf16(from[t] + i, head_dim - i) : _mm512_setzero_si512();
        __m512i b = t + 1 < tokens ? load_bf16(from[t + 1] + i, head_dim - i) : _mm512_setzero_si512();
        low = _mm512_unpacklo_epi16(a, b);
        high = _mm512_unpackhi_epi16(a, b);
    }

    static void weigh(float (*scores)[LANES], int tokens, bool, float scale, Lanes& lanes, float* out, int64_t width) {
        __m512 before = _mm512_load_ps(lanes.max), most[4] = {before, before, before, before};
        for (int t = 0; t < tokens; t += 4)
            for (int i = 0; i < 4; ++i) most[i] = _mm512_max_ps(most[i], _mm512_loadu_ps(scores[t + i]));
        __m512 now = _mm512_max_ps(_mm512_max_ps(most[0], most[1]), _mm512_max_ps(most[2], most[3]));
        __m512 unit = _mm512_set1_ps(scale * 1.44269504f), lowered = _mm512_mul_ps(now, unit);
        if (_mm512_cmp_ps_mask(now, before, _CMP_GT_OQ)) {
            // Not before * unit - lowered: that is not 0, but the rounding of 1e30, for a lane that has seen nothing.
            __m512 factor = power_of_two(_mm512_mul_ps(_mm512_sub_ps(before, now), unit));
            _mm512_store_ps(lanes.max, now);
            _mm512_store_ps(lanes.sum, _mm512_mul_ps(_mm512_load_ps(lanes.sum), factor));
            for (int64_t i = 0; i < width; ++i)
                _mm512_storeu_ps(out + i * LANES, _mm512_mul_ps(_mm512_loadu_ps(out + i * LANES), factor));
        }
        // Weights of two tokens, side by side in each lane.
        alignas(64) static const int16_t side_by_side[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                             8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
        __m512i order = _mm512_load_si512(side_by_side);
        __m512 sum[2] = {_mm512_load_ps(lanes.sum), _mm512_setzero_ps()};
        for (int t = 0; t < tokens; t += 2) {
            __m512 a = power_of_two(_mm512_fmsub_ps(_mm512_loadu_ps(scores[t]), unit, lowered));
            __m512 b = power_of_two(_mm512_fmsub_ps(_mm512_loadu_ps(scores[t + 1]), unit, lowered));
            sum[0] = _mm512_add_ps(sum[0], a);
            sum[1] = _mm512_add_ps(sum[1], b);
            __m512i both = (__m512i)_mm512_cvtne2ps_pbh(b, a);
            _mm512_storeu_si512(scores[t / 2], _mm512_permutexvar_epi16(order, both));
        }
        _mm512_store_ps(lanes.sum, _mm512_add_ps(sum[0], sum[1]));
    }

#if defined(__AMX_BF16__)
    // All tiles are of 16 rows of 64 bytes: 0 to 3 hold sums, 4 and 5 keys or values, 6 queries or weights.
    static constexpr int STEP = 32;

    static void begin() {
        struct {
            uint8_t palette = 1, start_row = 0, reserved[14] = {};
            uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
            uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
        } config;
        _tile_loadconfig(&config);
    }
    static void end() { _tile_release(); }

    // [token][key_width]
    static void pack_keys(const bf16* const* from, int tokens, int64_t head_dim, Number* out) {
        int64_t width = key_width(head_dim);
        bf16* to = (bf16*)out;
        for (int t = 0; t < tokens; ++t)
            for (int64_t i = 0; i < width; i += 32)
                _mm512_storeu_si512(to + t * width + i, load_bf16(from[t] + i, head_dim - i));
        std::memset(to + tokens * width, 0, (round_up(tokens, STEP) - tokens) * width * sizeof(bf16));
    }

    // Transposed, [number][token], which is how AMX takes its left factor.
    static void pack_values(const bf16* const* from, int tokens, int64_t head_dim, Number* to) {
        for (int first = 0; first < tokens; first += 32)
            for (int64_t i = 0; i < head_dim; i += 32) {
                __m512 low[16], high[16];
                for (int pair = 0; pair < 16; ++pair) {
                    __m512i a, b;
                    load_pair(from, first + 2 * pair, tokens, i, head_dim, a, b);
                    low[pair] = _mm512_castsi512_ps(a);
                    high[pair] = _mm512_castsi512_ps(b);
                }
                transpose(low);
                transpose(high);
                for (int row = 0; row < 16; ++row) {
                    int64_t number = i + row / 4 * 8 + row % 4;  // as unpacklo orders them; unpackhi has those 4 further
                    Number* at = to + number * (KEYS / 2) + first / 2;
                    if (number < value_width(head_dim)) _mm512_storeu_ps(at, low[row]);
                    if (number + 4 < value_width(head_dim)) _mm512_storeu_ps(at + 4 * (KEYS / 2), high[row]);
                }
            }
    }

    static void scores(const Number* query, const Number* packed, int tokens, int64_t head_dim, float (*out)[LANES]) {
        const bf16* keys = (const bf16*)packed;
        int64_t width = key_width(head_dim), stride = width * int64_t(sizeof(bf16));
        bool more = tokens > 32;
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (int64_t i = 0; i < width; i += 32) {
            _tile_loadd(6, query + i / 2 * LANES, 64);
            _tile_loadd(4, keys + i, stride);
            _tile_dpbf16ps(0, 4, 6);
            _tile_loadd(5, keys + 16 * width + i, stride);
            _tile_dpbf16ps(1, 5, 6);
            if (!more) continue;
            _tile_loadd(4, keys + 32 * width + i, stride);
            _tile_dpbf16ps(2, 4, 6);
            _tile_loadd(5, keys + 48 * width + i, stride);
            _tile_dpbf16ps(3, 5, 6);
        }
        _tile_stored(0, out[0], 64);
        _tile_stored(1, out[16], 64);
        if (!more) return;
        _tile_stored(2, out[32], 64);
        _tile_stored(3, out[48], 64);
    }

    static void add(float (*weights)[LANES], const Number* values, int tokens, int64_t width, float* out) {
        int64_t first = 0;
        for (; first + 64 <= width; first += 64) add_numbers<4>(weights, values, tokens, first, out);
        for (; first + 32 <= width; first += 32) add_numbers<2>(weights, values, tokens, first, out);
        for (; first < width; first += 16) add_numbers<1>(weights, values, tokens, first, out);
    }

    template <int TILES>
    static void add_numbers(float (*weights)[LANES], const Number* values, int tokens, int64_t first, float* out) {
        const Number* value = values + first * (KEYS / 2);
        float* sum = out + first * LANES;
        constexpr int VALUES = 16 * KEYS / 2, SUMS = 16 * LANES, STRIDE = KEYS * sizeof(bf16);  // of one tile
        _tile_loadd(0, sum, 64);
        if (TILES > 1) _tile_loadd(1, sum + SUMS, 64);
        if (TILES > 2) _tile_loadd(2, sum + 2 * SUMS, 64);
        if (TILES > 3) _tile_loadd(3, sum + 3 * SUMS, 64);
        for (int t = 0; t < tokens; t += 32, value += 16) {
            _tile_loadd(6, weights[t / 2], 64);
            _tile_loadd(4, value, STRIDE);
            _tile_dpbf16ps(0, 4, 6);
            if (TILES > 1) _tile_loadd(5, value + VALUES, STRIDE);
            if (TILES > 1) _tile_dpbf16ps(1, 5, 6);
            if (TILES > 2) _tile_loadd(4, value + 2 * VALUES, STRIDE);
            if (TILES > 2) _tile_dpbf16ps(2, 4, 6);
            if (TILES > 3) _tile_loadd(5, value + 3 * VALUES, STRIDE);
            if (TILES > 3) _tile_dpbf16ps(3, 5, 6);
        }
        _tile_stored(0, sum, 64);
        if (TILES > 1) _tile_stored(1, sum + SUMS, 64);
        if (TILES > 2) _tile_stored(2, sum + 2 * SUMS, 64);
        if (TILES > 3) _tile_stored(3, sum + 3 * SUMS, 64);
    }
#else
    static constexpr int STEP = 16;

    static void begin() {}
    static void end() {}

    // [16 tokens][pair][token]: scores() reads them from begin to end.
    static void pack_keys(const bf16* const* from, int tokens, int64_t head_dim, Number* to) {
        for (int first = 0; first < tokens; first += LANES)
            for (int64_t i = 0; i < key_width(head_dim); i += 32) {
                __m512 rows[LANES];
                for (int t = 0; t < LANES; ++t)
                    rows[t] = _mm512_castsi512_ps(first + t < tokens ? load_bf16(from[first + t] + i, head_dim - i)
                                                                     : _mm512_setzero_si512());
                transpose(rows);
                for (int pair = 0; pair < LANES; ++pair, to += LANES) _mm512_storeu_ps(to, rows[pair]);
            }
    }

    // [pair of tokens][value_width]
    static void pack_values(const bf16* const* from, int tokens, int64_t head_dim, Number* to) {
        int64_t width = value_width(head_dim);
        for (int t = 0; t < round_up(tokens, STEP); t += 2)
            for (int64_t i = 0; i < width; i += 32) {
                __m512i low, high;
                load_pair(from, t, tokens, i, head_dim, low, high);
                Number* at = to + t / 2 * width + i;
                _mm512_storeu_si512(at, in_order_low(low, high));
                if (i + 16 < width) _mm512_storeu_si512(at + 16, in_order_high(low, high));
            }
    }

    static void scores(const Number* query, const Number* keys, int tokens, int64_t head_dim, float (*out)[LANES]) {
        for (int first = 0; first < tokens; first += 16) {
            __m512 sum[16] = {};
            for (int64_t i = 0; i < key_width(head_dim) / 2; ++i, keys += LANES) {
                __m512i part = _mm512_loadu_si512(query + i * LANES);
                for (int t = 0; t < 16; ++t) sum[t] = dot_pairs(sum[t], part, _mm512_set1_epi32(int(keys[t])));
            }
            for (int t = 0; t < 16; ++t) _mm512_storeu_ps(out[first + t], sum[t]);
        }
    }

    static void add(float (*weights)[LANES], const Number* values, int tokens, int64_t width, float* out) {
        for (int64_t first = 0; first < width; first += 16) {
            __m512 sum[16];
            for (int i = 0; i < 16; ++i) sum[i] = _mm512_loadu_ps(out + (first + i) * LANES);
            for (int t = 0; t < tokens; t += 2) {
                __m512i weight = _mm512_loadu_si512(weights[t / 2]);
                const Number* value = values + t / 2 * width + first;
                for (int i = 0; i < 16; ++i) sum[i] = dot_pairs(sum[i], weight, _mm512_set1_epi32(int(value[i])));
            }
            for (int i = 0; i < 16; ++i) _mm512_storeu_ps(out + (first + i) * LANES, sum[i]);
        }
    }
#endif
};

#endif

// The working memory of one unit.
template <class T>
struct Workplace {
    using Number = typename Tiles<T>::Number;
    int64_t tiles, query_size, out_size;
    Lanes* lanes;
    float* out;                    // [tile][value_width][LANES]
    Number *queries, *keys, *values;  // queries: [tile][key_width][LANES]
    float (*scores)[LANES];  // the scores of two tiles
    T* expanded;             // a tile of K or V of int8, or of compressed vectors put together: [token][head_dim]

    Workplace(Scratch& scratch, int64_t rows, int64_t head_dim, int64_t value_dim)
        : tiles((rows + LANES - 1) / LANES),
          query_size(Tiles<T>::key_width(head_dim) * LANES),
          out_size(Tiles<T>::value_width(value_dim) * LANES) {
        int64_t numbers = KEYS * larger(Tiles<T>::key_width(head_dim), Tiles<T>::value_width(head_dim));
        char* at = (char*)scratch.at_least(tiles * (sizeof(Lanes) + 4 * (query_size + out_size)) +
                                           4 * (2 * numbers + 2 * KEYS * LANES) + KEYS * head_dim * int64_t(sizeof(T)));
        auto take = [&](int64_t bytes) {
            char* taken = at;
            at += bytes;
            return taken;
        };
        scores = (float (*)[LANES])take(4 * 2 * KEYS * LANES);
        keys = (Number*)take(4 * numbers);
        values = (Number*)take(4 * numbers);
        lanes = (Lanes*)take(tiles * sizeof(Lanes));
        out = (float*)take(4 * tiles * out_size);
        queries = (Number*)take(4 * tiles * query_size);
        expanded = (T*)take(KEYS * head_dim * sizeof(T));
    }
};

// Returns what scores are multiplied with when they become weights.
template <class T>
static float scale_after(const Attention& a) {
    return Tiles<T>::SCALES_QUERIES || a.scoring.changes() ? 1 : a.scoring.scale;
}

// Lanes beyond the last row repeat it; their results are not used.
template <class T>
static void load_queries(const Attention& a, const Unit& unit, Workplace<T>& work) {
    int64_t rows = unit.queries * a.group;
    for (int64_t tile = 0; tile < work.tiles; ++tile) {
        const T* from[LANES];
        Lanes& lanes = work.lanes[tile];
        for (int lane = 0; lane < LANES; ++lane) {
            int64_t row = smaller(tile * LANES + lane, rows - 1), query = row / a.group, member = row % a.group;
            from[lane] = (const T*)a.query + unit.row(a, query) * a.row_stride +
                         (unit.first_kv_head * a.group + member) * a.head_stride;
            lanes.last_seen[lane] = int32_t(last_seen(a, unit.position + query, unit.end_token));
            lanes.first_seen[lane] = int32_t(first_seen(a, unit.position + query));
            lanes.max[lane] = NOTHING_SEEN;
            lanes.sum[lane] = 0;
        }
        Tiles<T>::pack_queries(from, a.head_dim, a.scoring.scale, work.queries + tile * work.query_size);
    }
    std::memset(work.out, 0, work.tiles * work.out_size * sizeof(float));
}

// Finds the numbers of the unit's head in these slots; those of int8 are expanded.
template <class T>
static void find_head(const Attention& a, const Unit& unit, const int64_t* slots, int tokens, Workplace<T>& work,
                      const T** out) {
    const int64_t head = unit.first_kv_head, head_dim = a.head_dim;
    for (int t = 0; t < tokens; ++t) {
        if (a.kept != INT8) {
            out[t] = (const T*)a.cache + slots[t] * a.vector + head * head_dim;
            continue;
        }
        const int8_t* vector = (const int8_t*)a.cache + slots[t] * a.vector;
        const float scale = scale_at(vector + a.kv_heads * head_dim, head);
        dequantise_head(vector + head * head_dim, scale, head_dim, work.expanded + t * head_dim);
        out[t] = work.expanded + t * head_dim;
    }
}

// Puts the halves of compressed vectors together.
template <class T>
static void find_latent(const Attention& a, const Places& places, const int64_t* slots, int tokens, Workplace<T>& work,
                        const T** out) {
    for (int t = 0; t < tokens; ++t) {
        const T* first = (const T*)a.cache + slots[t] * a.vector;
        T* whole = work.expanded + t * a.head_dim;
        std::memcpy(whole, first, a.vector * sizeof(T));
        std::memcpy(whole + a.vector, first + places.block_size * a.vector, a.vector * sizeof(T));
        out[t] = whole;
    }
}

// Packs K and V of a text, which lie as the step made them.
template <class T>
static void pack_text(const Attention& a, const Unit& unit, int64_t token, int tokens, Workplace<T>& work) {
    const T *keys[KEYS], *values[KEYS];
    const int64_t row = a.spans.rows[unit.span] + token, head = unit.first_kv_head;
    for (int t = 0; t < tokens; ++t) {
        keys[t] = a.keys.at<T>(row + t, head);
        values[t] = a.values.at<T>(row + t, head);
    }
    Tiles<T>::pack_keys(keys, tokens, a.head_dim, work.keys);
    Tiles<T>::pack_values(values, tokens, a.head_dim, work.values);
}

template <class T>
static void pack(const Attention& a, const Unit& unit, int64_t token, int tokens, Workplace<T>& work) {
    if (a.both_ways()) return pack_text(a, unit, token, tokens, work);
    const Places places(a.spans, unit.span);
    int64_t slots[KEYS];
    const T* vectors[KEYS];
    places.slots(token, tokens, slots);
    if (a.latent_rank) {
        find_latent(a, places, slots, tokens, work, vectors);
        Tiles<T>::pack_keys(vectors, tokens, a.head_dim, work.keys);
        return Tiles<T>::pack_values(vectors, tokens, a.latent_rank, work.values);
    }
    find_head(a, unit, slots, tokens, work, vectors);
    Tiles<T>::pack_keys(vectors, tokens, a.head_dim, work.keys);
    for (int t = 0; t < tokens; ++t) slots[t] += places.block_size;
    find_head(a, unit, slots, tokens, work, vectors);
    Tiles<T>::pack_values(vectors, tokens, a.head_dim, work.values);
}

// Computes tiles of queries over the packed tokens [token, end). The scores of the next tile are begun before the weights
// of the present tile: where products have a unit of their own (AMX), it works on them meanwhile.
template <class T>
struct Pass {
    const Attention& a;
    int64_t token, end;
    Workplace<T>& work;

    // Returns the first tile, from `tile` on, that sees any of the tokens.
    int64_t seeing(int64_t tile) const {
        while (tile < work.tiles && !work.lanes[tile].see_any(token, end)) ++tile;
        return tile;
    }
    // The end of the tokens for this tile: those beyond its last query are left out.
    int64_t end_of(int64_t tile) const { return smaller(end, work.lanes[tile].last_seen[LANES - 1] + 1); }
    int tokens(int64_t tile) const { return int(round_up(end_of(tile) - token, Tiles<T>::STEP)); }
    float (*scores_of(int64_t tile) const)[LANES] { return work.scores + tile % 2 * KEYS; }

    void score(int64_t tile) const {
        const auto* query = work.queries + tile * work.query_size;
        Tiles<T>::scores(query, work.keys, tokens(tile), a.head_dim, scores_of(tile));
    }

    void weigh_and_add(int64_t tile) const {
        Lanes& lanes = work.lanes[tile];
        int64_t width = Tiles<T>::value_width(a.value_dim());
        float(*scores)[LANES] = scores_of(tile), *out = work.out + tile * work.out_size;
        bool hidden = token + tokens(tile) > end_of(tile) || !lanes.see_all(token, end_of(tile));
        if (a.scoring.changes())
            change(a.scoring, Tiles<T>::SCALES_QUERIES ? 1 : a.scoring.scale, tokens(tile), scores);
        if (hidden) hide(scores, lanes, token, tokens(tile));
        Tiles<T>::weigh(scores, tokens(tile), hidden, scale_after<T>(a), lanes, out, width);
        Tiles<T>::add(scores, work.values, tokens(tile), width, out);
    }

    void run() const {
        int64_t tile = seeing(0);
        if (tile < work.tiles) score(tile);
        while (tile < work.tiles) {
            int64_t next = seeing(tile + 1);
            if (next < work.tiles) score(next);
            weigh_and_add(tile);
            tile = next;
        }
    }
};

static void settle_tile(const float* from, int64_t rows, int64_t head_dim, float* out) {
#if defined(__AVX512F__)
    for (int64_t i = 0; i < head_dim; i += 16) {
        __m512 v[16];
        for (int j = 0; j < 16; ++j) v[j] = _mm512_loadu_ps(from + (i + j) * LANES);
        transpose(v);
        __mmask16 mask = __mmask16((1u << smaller(16, head_dim - i)) - 1);
        for (int64_t row = 0; row < rows; ++row) _mm512_mask_storeu_ps(out + row * head_dim + i, mask, v[row]);
    }
#else
    for (int64_t row = 0; row < rows; ++row)
        for (int64_t i = 0; i < head_dim; ++i) out[row * head_dim + i] = from[i * LANES + row];
#endif
}

template <class T>
static void settle(const Attention& a, const Unit& unit, const Workplace<T>& work, Partial out) {
    for (int64_t tile = 0; tile < work.tiles; ++tile) {
        int64_t first = tile * LANES, rows = smaller(LANES, unit.queries * a.group - first);
        for (int64_t row = 0; row < rows; ++row) {
            out.max[first + row] = Tiles<T>::final_max(work.lanes[tile].max[row], scale_after<T>(a));
            out.sum[first + row] = work.lanes[tile].sum[row];
        }
        settle_tile(work.out + tile * work.out_size, rows, a.value_dim(), out.out + first * a.value_dim());
    }
}

// Measured on a Zen with each instruction set; AMX, and the costs in the units of row_cost, on a Xeon.
constexpr int64_t LEAST_ROWS = LANES > 1 ? 32 : 6, TILE_COST = LANES == 16 ? 17 : 25, PACKING_COST = 8;
#if defined(__AMX_BF16__)
constexpr int64_t LEAST_ROWS_BF16 = 6, TILE_COST_BF16 = 5;
#elif defined(__AVX512BF16__)
constexpr int64_t LEAST_ROWS_BF16 = LEAST_ROWS, TILE_COST_BF16 = 20;
#else
constexpr int64_t LEAST_ROWS_BF16 = LEAST_ROWS, TILE_COST_BF16 = TILE_COST;
#endif

int64_t least_rows_for_tiles(int dtype) { return dtype == BF16 ? LEAST_ROWS_BF16 : LEAST_ROWS; }

int64_t tile_cost(int dtype, int64_t rows) {
    return PACKING_COST + (dtype == BF16 ? TILE_COST_BF16 : TILE_COST) * ((rows + LANES - 1) / LANES);
}

void attend_tiles(const Attention& a, const Unit& unit, int64_t from, int64_t to, Partial out) {
    static thread_local Scratch scratch;
    by_dtype(a.dtype, [&](auto* of) {
        using T = std::remove_pointer_t<decltype(of)>;
        Workplace<T> work(scratch, unit.queries * a.group, a.head_dim, a.value_dim());
        load_queries(a, unit, work);
        Tiles<T>::begin();
        for (int64_t token = from; token < to; token += KEYS) {
            int64_t end = smaller(to, token + KEYS);
            pack(a, unit, token, int(end - token), work);
            Pass<T>{a, token, end, work}.run();
        }
        Tiles<T>::end();
        settle(a, unit, work, out);
    });
}

}  // namespace ISA
