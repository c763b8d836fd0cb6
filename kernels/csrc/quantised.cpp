// A linear layer of 8-bit or 4-bit weights with scales by groups of inputs (kernels.h, Quantised).
//
// 64 outputs are a panel. It goes over its inputs four at a time: of such four the weights of its outputs lie side by side,
// a byte each. With 4 bits a byte holds two weights: in its lower half one of the first four inputs of eight, in its upper
// half one of the last four. So a panel is read from its begin to its end, and a number of the result has a lane of its own.
//
//   whole   x becomes whole numbers from -127 to 127 with a scale for each row, and sums of products are exact until the
//           end of a group of weights. It is for x of 16 bits, whose own rounding is about as large.
//   exact   weights become fp32, multiplied with x as it is: for x in fp32.
//
// With AMX, `whole` takes 16 outputs by 16 rows of x at a time: four inputs of 16 outputs, as they lie, are a tile's row.
// Weights of 4 bits become bytes first, a panel at a time.
//
// No number of the result depends on which rows are computed together, or by which thread.
#include "blocks.h"
#include "results.h"
#include "scratch.h"

namespace ISA {

constexpr int64_t PANEL = 64, FOUR = 4;
constexpr float MOST = 127;

static thread_local Scratch scratch;

// --- Whole numbers in lanes of 32 bits

#if defined(__AVX512F__)
using Lanes = __m512i;
static inline Lanes all(int32_t x) { return _mm512_set1_epi32(x); }
static inline Lanes load(const uint8_t* p) { return _mm512_loadu_si512(p); }
static inline Lanes both(Lanes a, Lanes b) { return _mm512_and_si512(a, b); }
template <int by>
static inline Lanes down(Lanes a) {
    return _mm512_srli_epi32(a, by);
}
static inline Vec widened(Lanes a) { return {_mm512_cvtepi32_ps(a)}; }
static inline void store_bytes(Vec x, int8_t* p) { _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(x.v))); }
#elif defined(__AVX2__)
using Lanes = __m256i;
static inline Lanes all(int32_t x) { return _mm256_set1_epi32(x); }
static inline Lanes load(const uint8_t* p) { return _mm256_loadu_si256((const __m256i*)p); }
static inline Lanes both(Lanes a, Lanes b) { return _mm256_and_si256(a, b); }
template <int by>
static inline Lanes down(Lanes a) {
    return _mm256_srli_epi32(a, by);
}
static inline Vec widened(Lanes a) { return {_mm256_cvtepi32_ps(a)}; }
static inline void store_bytes(Vec x, int8_t* p) {
    __m256i words = _mm256_cvtps_epi32(x.v);
    __m128i halves = _mm_packs_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
    _mm_storel_epi64((__m128i*)p, _mm_packs_epi16(halves, halves));
}
#else
using Lanes = uint32_t;
static inline Lanes all(int32_t x) { return Lanes(x); }
static inline Lanes load(const uint8_t* p) {
    Lanes x;
    std::memcpy(&x, p, sizeof x);
    return x;
}
static inline Lanes both(Lanes a, Lanes b) { return a & b; }
template <int by>
static inline Lanes down(Lanes a) {
    return a >> by;
}
static inline Vec widened(Lanes a) { return {float(int32_t(a))}; }
static inline void store_bytes(Vec x, int8_t* p) { *p = int8_t(x.v); }
#endif

// Four numbers of a row of x, told to all lanes, and the sum of their products with four weights in each lane.
#if defined(__AVX512VNNI__)
struct Four {
    int32_t x;
    explicit Four(const int8_t* of) { std::memcpy(&x, of, sizeof x); }
};
static inline Lanes dot(Lanes sum, Lanes weights, Four of) { return _mm512_dpbusd_epi32(sum, weights, all(of.x)); }
#elif defined(__AVX2__)
// Products of bytes may be more than 16 bits hold when two are added: the bytes at even and odd places become 16 bits each.
struct Four {
    int32_t even, odd;
    explicit Four(const int8_t* of) : even((of[0] & 0xFFFF) | of[2] * 65536), odd((of[1] & 0xFFFF) | of[3] * 65536) {}
};
static inline Lanes dot(Lanes sum, Lanes weights, Four of) {
#if defined(__AVX512F__)
    Lanes even = _mm512_madd_epi16(both(weights, all(0x00FF00FF)), all(of.even));
    Lanes odd = _mm512_madd_epi16(_mm512_srli_epi16(weights, 8), all(of.odd));
    return _mm512_add_epi32(sum, _mm512_add_epi32(even, odd));
#else
    Lanes even = _mm256_madd_epi16(both(weights, all(0x00FF00FF)), all(of.even));
    Lanes odd = _mm256_madd_epi16(_mm256_srli_epi16(weights, 8), all(of.odd));
    return _mm256_add_epi32(sum, _mm256_add_epi32(even, odd));
#endif
}
#else
struct Four {
    int32_t x[4];
    explicit Four(const int8_t* of) : x{of[0], of[1], of[2], of[3]} {}
};
static inline Lanes dot(Lanes sum, Lanes weights, Four of) {
    for (int i = 0; i < 4; ++i) sum += int32_t(weights >> 8 * i & 255) * of.x[i];
    return sum;
}
#endif

template <int BITS>
static inline Lanes weights_of(Lanes bytes, int half) {
    if (BITS == 8) return bytes;
    return both(half ? down<4>(bytes) : bytes, all(0x0F0F0F0F));
}

static inline Vec load_as(int32_t dtype, const void* from, int64_t at) {
    if (dtype == F32) return Vec::load((const float*)from + at);
    if (dtype == BF16) return Vec::load((const bf16*)from + at);
    return Vec::load((const f16*)from + at);
}

// Some vectors of a panel.
struct Part {
    const Quantised& of;
    const uint8_t* at;
    int64_t scales;  // the place of its first scale
    int64_t first;   // its first output

    Vec scale(int64_t group, int v) const { return load_as(of.dtype, of.scale, scales + group * PANEL + v * Vec::width); }
    // Returns what a weight of zero is as a whole number: the middle where files do not say.
    Vec zero(int64_t group, int v) const {
        if (!of.zero) return Vec::all(float(1 << (of.bits - 1)));
        return load_as(of.dtype, of.zero, scales + group * PANEL + v * Vec::width);
    }
};

// --- whole

// Rows of x as whole numbers, `width` bytes apart, each with its scale, and the sum of its numbers in each group.
struct Whole {
    const int8_t* x;
    const float* scale;
    const int32_t* sums;
    int64_t width, groups;
};

// A row alone takes memory as fast as it comes, and it comes faster where what lies so many bytes further is asked for
// meanwhile: 8 bits by 6 to 15 % on a Zen, 4 bits by a quarter on an Ice Lake. On a Zen 4 bits, with twice the arithmetic
// for a byte, came up to 10 % slower, and of these sets a Zen runs the one that has bf16 and no tiles.
constexpr int64_t FAR = 6144;
#if defined(__AVX512BF16__) && !defined(__AMX_BF16__)
constexpr bool ASKS_FOR_4_BITS = false;
#else
constexpr bool ASKS_FOR_4_BITS = true;
#endif

// Sums the products of V vectors of weights and N rows of x over a group of inputs.
template <int BITS, int V, int N>
static void multiply(const uint8_t* w, const int8_t* x, int64_t width, int64_t inputs, Ahead& ahead, Lanes (&to)[N][V]) {
    constexpr int halves = 8 / BITS;
    Lanes sums[N][V];
    for (int n = 0; n < N; ++n)
        for (int v = 0; v < V; ++v) sums[n][v] = all(0);
    for (const int8_t* end = x + inputs; x < end; w += PANEL * FOUR, x += FOUR * halves) {
        Lanes bytes[V];
        for (int v = 0; v < V; ++v) bytes[v] = load(w + v * Vec::width * FOUR);
        if (N > 1) ahead.ask();
        if (N == 1 && (BITS == 8 || ASKS_FOR_4_BITS))
            for (int v = 0; v < V; ++v) __builtin_prefetch(w + FAR + v * Vec::width * FOUR, 0, 2);
#pragma GCC unroll 2
        for (int half = 0; half < halves; ++half) {
            Lanes weights[V];
            for (int v = 0; v < V; ++v) weights[v] = weights_of<BITS>(bytes[v], half);
#pragma GCC unroll 8
            for (int n = 0; n < N; ++n) {
                Four of(x + n * width + half * FOUR);
                for (int v = 0; v < V; ++v) sums[n][v] = dot(sums[n][v], weights[v], of);
            }
        }
    }
    for (int n = 0; n < N; ++n)
        for (int v = 0; v < V; ++v) to[n][v] = sums[n][v];
}

template <int BITS, int V, int N>
static void block(const Part& part, const Whole& rows, int64_t row, Ahead& ahead, Vec (&out)[N][V]) {
    const int8_t* x = rows.x + row * rows.width;
    int64_t size = part.of.group, bytes = size * PANEL * BITS / 8;
    for (int n = 0; n < N; ++n)
        for (int v = 0; v < V; ++v) out[n][v] = Vec::zero();
    for (int64_t group = 0; group < part.of.groups; ++group) {
        Lanes sums[N][V];
        multiply<BITS>(part.at + group * bytes, x + group * size, rows.width, size, ahead, sums);
        for (int v = 0; v < V; ++v) {
            Vec scale = part.scale(group, v), zero = part.zero(group, v);
            for (int n = 0; n < N; ++n) {
                Vec total = Vec::all(float(rows.sums[(row + n) * rows.groups + group]));
                out[n][v] = fma(widened(sums[n][v]) - zero * total, scale, out[n][v]);
            }
        }
    }
    for (int n = 0; n < N; ++n)
        for (int v = 0; v < V; ++v) out[n][v] = out[n][v] * Vec::all(rows.scale[row + n]);
}

// Writes one row of x, filled up to `width` with zeros, as whole numbers. A row with a number that is not finite gets a NaN
// for its scale.
static float to_whole(float* x, int64_t width, int8_t* out) {
    Vec most = Vec::zero(), doubt = Vec::zero();
    for (int64_t i = 0; i < width; i += Vec::width) {
        Vec of = Vec::load(x + i);
        most = max(most, max(of, Vec::zero() - of));
        doubt = doubt + (of - of);
    }
    float largest = most.largest(), zero = doubt.sum();
    float by = largest > 0 && zero == 0 ? MOST / largest : 0;
    if (!(by <= 0x1p126f)) by = 0x1p126f;  // numbers so small that the inverse is not finite
    for (int64_t i = 0; i < width; i += Vec::width) {
        Vec whole = zero == 0 ? rounded(Vec::load(x + i) * Vec::all(by)) : Vec::zero();
        store_bytes(whole, out + i);
    }
    return zero == 0 ? (by > 0 ? 1 / by : 0) : NAN;
}

// --- exact

// Rows of x in fp32, `width` numbers apart.
struct Exact {
    const float* x;
    int64_t width;
};

template <int BITS, int V, int N>
static void block(const Part& part, const Exact& rows, int64_t row, Ahead&, Vec (&out)[N][V]) {
    constexpr int halves = 8 / BITS;
    const uint8_t* w = part.at;
    const float* x = rows.x + row * rows.width;
    for (int n = 0; n < N; ++n)
        for (int v = 0; v < V; ++v) out[n][v] = Vec::zero();
    for (int64_t group = 0; group < part.of.groups; ++group) {
        Vec sums[N][V], zero[V];
        for (int v = 0; v < V; ++v) {
            zero[v] = part.zero(group, v);
            for (int n = 0; n < N; ++n) sums[n][v] = Vec::zero();
        }
        for (int64_t i = 0; i < part.of.group; i += FOUR * halves, w += PANEL * FOUR, x += FOUR * halves)
            for (int v = 0; v < V; ++v) {
                Lanes bytes = load(w + v * Vec::width * FOUR);
                for (int half = 0; half < halves; ++half) {
                    Lanes weights = weights_of<BITS>(bytes, half);
                    auto one = [&](Lanes shifted, int at) {
                        Vec weight = widened(both(shifted, all(255))) - zero[v];
                        for (int n = 0; n < N; ++n)
                            sums[n][v] = fma(weight, Vec::all(x[n * rows.width + half * FOUR + at]), sums[n][v]);
                    };
                    one(weights, 0), one(down<8>(weights), 1), one(down<16>(weights), 2), one(down<24>(weights), 3);
                }
            }
        for (int v = 0; v < V; ++v)
            for (int n = 0; n < N; ++n) out[n][v] = fma(sums[n][v], part.scale(group, v), out[n][v]);
    }
}

// --- All rows, all outputs

template <int BITS, int V, int N, class Rows, class T>
static void group(const Part& part, const Rows& rows, int64_t row, int64_t count, Ahead& ahead, const Result<T>& result) {
    if (count == N) {
        Vec out[N][V];
        block<BITS>(part, rows, row, ahead, out);
        for (int n = 0; n < N; ++n)
            for (int v = 0; v < V; ++v) result.put_lanes(out[n][v], row + n, part.first + v * Vec::width);
    } else if constexpr (N > 1) {
        group<BITS, V, N - 1>(part, rows, row, count, ahead, result);
    }
}

#if defined(__AVX512F__)
constexpr int MOST_V = 4, MOST_N = 6;
#elif defined(__AVX2__)
constexpr int MOST_V = 2, MOST_N = 4;
#else
constexpr int MOST_V = 1, MOST_N = 4;
#endif

// Multiplies all rows with vectors of a panel, in as few groups of equal size as can be; meanwhile prefetches the next
// panel of `bytes`, if there is one.
template <int BITS, class Rows, class T>
static void all_rows(const Part& part, const Rows& rows, int64_t count, const uint8_t* next, int64_t bytes,
                     const Result<T>& result) {
    int64_t groups = (count + MOST_N - 1) / MOST_N;
    // A single pass over a panel reads it as fast as possible: a prefetch of the next panel would only slow it.
    const char* from = groups > 1 ? (const char*)next : nullptr;
    Ahead ahead{from, from ? from + bytes : from, (MOST_V + groups - 1) / groups};
    for (int64_t i = 0; i < groups; ++i) {
        Range of = share(count, i, groups);
        group<BITS, MOST_V, MOST_N>(part, rows, of.begin, of.end - of.begin, ahead, result);
    }
}

template <int BITS, class Rows, class T>
static void outputs(const Layer& layer, const Rows& rows, int64_t count, const Result<T>& result) {
    constexpr int64_t within = PANEL / (MOST_V * Vec::width);
    const Quantised& of = *layer.quantised;
    int64_t panels = (layer.out + PANEL - 1) / PANEL, panel_bytes = of.groups * of.group * PANEL * BITS / 8;
    Blocks blocks(panels * within);
#pragma omp parallel
    blocks.each(1, [&](int64_t number, int64_t, int64_t last) {
        int64_t panel = number / within, first = number % within * MOST_V * Vec::width;
        const uint8_t* at = (const uint8_t*)layer.weight + panel * panel_bytes;
        const uint8_t* next = within == 1 && number + 1 < last ? at + panel_bytes : nullptr;
        Part part{of, at + first * FOUR, panel * of.groups * PANEL + first, panel * PANEL + first};
        if (part.first < layer.out) all_rows<BITS>(part, rows, count, next, panel_bytes, result);
    });
}

#if defined(__AMX_INT8__)

// --- whole, in tiles

constexpr int64_t SIDE = 16, PAIR = 2 * SIDE;  // rows of a tile; rows of x, and outputs, of a block
constexpr int64_t TILES_FROM = 3;              // rows
constexpr int64_t ASKS = 2;                    // prefetches in a step

// Tiles 0 to 3 hold sums, 4 and 5 rows of x, 6 and 7 weights: `depth` inputs are multiplied in a step.
struct alignas(64) WholeTiles {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t bytes[16] = {64, 64, 64, 64};
    uint8_t rows[16] = {SIDE, SIDE, SIDE, SIDE, SIDE, SIDE};
    explicit WholeTiles(int64_t depth) {
        bytes[4] = bytes[5] = uint16_t(depth), bytes[6] = bytes[7] = 64;
        rows[6] = rows[7] = uint8_t(depth / FOUR);
    }
};

// Returns the most inputs that a step can take: steps divide a group.
static int64_t depth_of(int64_t group) {
    int64_t depth = SIDE * FOUR;
    while (group % depth) depth -= FOUR;
    return depth;
}

// Stores the sums of the products of 32 outputs and 16 * R rows of x over a group of inputs.
template <int R>
static void tile_sums(const uint8_t* w, const int8_t* x, int64_t width, int64_t inputs, int64_t depth, Ahead& ahead,
                      int32_t (&sums)[R * SIDE][PAIR]) {
    constexpr int64_t apart = PANEL * FOUR, right = SIDE * FOUR;
    _tile_zero(0);
    _tile_zero(1);
    if (R > 1) _tile_zero(2);
    if (R > 1) _tile_zero(3);
    for (const int8_t* end = x + inputs; x < end; x += depth, w += depth * PANEL) {
        _tile_loadd(4, x, width);
        _tile_loadd(6, w, apart);
        ahead.ask();
        _tile_dpbsud(0, 4, 6);
        _tile_loadd(7, w + right, apart);
        ahead.ask();
        _tile_dpbsud(1, 4, 7);
        if (R > 1) {
            _tile_loadd(5, x + SIDE * width, width);
            _tile_dpbsud(2, 5, 6);
            _tile_dpbsud(3, 5, 7);
        }
    }
    _tile_stored(0, sums[0], sizeof sums[0]);
    _tile_stored(1, sums[0] + SIDE, sizeof sums[0]);
    if (R > 1) _tile_stored(2, sums[SIDE * (R - 1)], sizeof sums[0]);
    if (R > 1) _tile_stored(3, sums[SIDE * (R - 1)] + SIDE, sizeof sums[0]);
}

// Multiplies 32 outputs with up to 16 * R rows of x. `w` is the first of their weights, as bytes.
template <int R, class T>
static void tile_block(const Part& part, const uint8_t* w, int64_t depth, const Whole& rows, int64_t row, int64_t count,
                       Ahead& ahead, const Result<T>& result) {
    alignas(64) int32_t sums[R * SIDE][PAIR];
    Vec out[R * SIDE][2];
    int64_t size = part.of.group;
    for (int64_t n = 0; n < count; ++n) out[n][0] = out[n][1] = Vec::zero();
    for (int64_t group = 0; group < part.of.groups; ++group) {
        const int8_t* x = rows.x + row * rows.width + group * size;
        tile_sums<R>(w + group * size * PANEL, x, rows.width, size, depth, ahead, sums);
        for (int v = 0; v < 2; ++v) {
            Vec scale = part.scale(group, v), zero = part.zero(group, v);
            for (int64_t n = 0; n < count; ++n) {
                Vec total = Vec::all(float(rows.sums[(row + n) * rows.groups + group]));
                Vec products = widened(load((const uint8_t*)(sums[n] + v * SIDE)));
                out[n][v] = fma(products - zero * total, scale, out[n][v]);
            }
        }
    }
    for (int64_t n = 0; n < count; ++n)
        for (int v = 0; v < 2; ++v)
            result.put_lanes(out[n][v] * Vec::all(rows.scale[row + n]), row + n, part.first + v * SIDE);
}

// Makes a byte of each weight of 4 bits.
static void expand(const uint8_t* panel, int64_t bytes, uint8_t* to) {
    constexpr int64_t line = PANEL * FOUR;
    for (const uint8_t* end = panel + bytes; panel < end; panel += line, to += 2 * line)
        for (int64_t i = 0; i < line; i += 64)
            for (int half = 0; half < 2; ++half)
                _mm512_storeu_si512(to + half * line + i, weights_of<4>(load(panel + i), half));
}

template <int BITS, class T>
static void by_tiles(const Layer& layer, const Whole& rows, int64_t count, const Result<T>& result) {
    static thread_local Scratch expanded;
    const Quantised& of = *layer.quantised;
    int64_t width = of.groups * of.group, depth = depth_of(of.group), bytes = width * PANEL * BITS / 8;
    auto* memory = BITS == 8 ? nullptr : (uint8_t*)expanded.at_least(omp_get_max_threads() * width * PANEL);
    int64_t passes = PANEL / PAIR * ((count + PAIR - 1) / PAIR), steps = passes * (width / depth);
    int64_t lines = bytes / (64 * ASKS * steps) + 1;
    const WholeTiles config(depth);
    Blocks blocks((layer.out + PANEL - 1) / PANEL);
#pragma omp parallel
    {
        _tile_loadconfig(&config);
        blocks.each(1, [&](int64_t panel, int64_t, int64_t last) {
            const uint8_t *at = (const uint8_t*)layer.weight + panel * bytes, *w = at;
            if (BITS == 4) w = memory + omp_get_thread_num() * width * PANEL, expand(at, bytes, (uint8_t*)w);
            const char* next = (const char*)at + bytes;
            Ahead ahead{next, panel + 1 < last ? next + bytes : next, lines};
            for (int64_t first = 0; first < PANEL && panel * PANEL + first < layer.out; first += PAIR) {
                Part part{of, at, panel * of.groups * PANEL + first, panel * PANEL + first};
                for (int64_t row = 0; row < count; row += PAIR) {
                    int64_t left = count - row;
                    auto block = left > SIDE ? tile_block<2, T> : tile_block<1, T>;
                    block(part, w + first * FOUR, depth, rows, row, left < PAIR ? left : PAIR, ahead, result);
                }
            }
        });
        _tile_release();
    }
}

#endif

// Copies a row of x in the order of the weight's columns, with zeros after it.
template <class T>
static void copy_row(const Layer& layer, const T* x, float* to, int64_t width) {
    int64_t i = 0;
    if (const int32_t* order = layer.quantised->order)
        for (; i < layer.in; ++i) to[i] = widen(x[order[i]]);
    for (; i + Vec::width <= layer.in; i += Vec::width) Vec::load(x + i).store(to + i);
    for (; i < layer.in; ++i) to[i] = widen(x[i]);
    for (; i < width; ++i) to[i] = 0;
}

template <class T>
static void by_rows(const Layer& layer, const T* x, int64_t stride, int64_t count, const Result<T>& result) {
    const Quantised& of = *layer.quantised;
    int64_t width = of.groups * of.group, padded = (width + 63) / 64 * 64, bytes = (of.groups * 4 + 63) / 64 * 64;
    if constexpr (std::is_same_v<T, float>) {
        float* copies = (float*)scratch.at_least(count * padded * sizeof(float));
#pragma omp parallel for if (count > 1)
        for (int64_t row = 0; row < count; ++row) copy_row(layer, x + row * stride, copies + row * padded, padded);
        Exact rows{copies, padded};
        of.bits == 8 ? outputs<8>(layer, rows, count, result) : outputs<4>(layer, rows, count, result);
    } else {
        int64_t threads = omp_get_max_threads();
        int64_t rows_of_whole = (count + 31) / 32 * 32;  // tiles read whole blocks of rows
        char* memory = (char*)scratch.at_least(threads * padded * 4 + rows_of_whole * padded + count * (bytes + 4));
        float* copies = (float*)memory;
        int8_t* whole = (int8_t*)(memory + threads * padded * 4);
        int32_t* sums = (int32_t*)(whole + rows_of_whole * padded);
        float* scale = (float*)((char*)sums + count * bytes);
#pragma omp parallel for if (count > 1)
        for (int64_t row = 0; row < count; ++row) {
            float* copy = copies + omp_get_thread_num() * padded;
            copy_row(layer, x + row * stride, copy, padded);
            int8_t* out = whole + row * padded;
            scale[row] = to_whole(copy, padded, out);
            for (int64_t group = 0; group < of.groups; ++group) {
                int32_t sum = 0;
                for (int64_t i = group * of.group; i < (group + 1) * of.group; ++i) sum += out[i];
                sums[row * bytes / 4 + group] = sum;
            }
        }
        Whole rows{whole, scale, sums, padded, bytes / 4};
#if defined(__AMX_INT8__)
        if (count >= TILES_FROM)
            return of.bits == 8 ? by_tiles<8>(layer, rows, count, result) : by_tiles<4>(layer, rows, count, result);
#endif
        of.bits == 8 ? outputs<8>(layer, rows, count, result) : outputs<4>(layer, rows, count, result);
    }
}

void quantised_linear(const Layer* layer, const void* x, int64_t stride, void* out, int64_t rows, int into) {
    if (!rows) return;
    by_dtype(layer->dtype, [&](auto* of) {
        using T = std::remove_pointer_t<decltype(of)>;
        by_rows<T>(*layer, (const T*)x, stride, rows, {(const T*)layer->bias, out, layer->out, into});
    });
}

}  // namespace ISA
