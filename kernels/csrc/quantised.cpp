// A linear layer of 8-bit or 4-bit weights with scales by groups of inputs (kernels.h, Quantised).
//
// 64 outputs are a panel. It goes over its inputs four at a time: of such four the weights of its outputs lie side by side,
// a byte each. With 4 bits a byte holds two weights: in its lower half one of the first four inputs of eight, in its upper
// half one of the last four. So a panel is read from its begin to its end, and a number of the result has a lane of its own.
//
//   whole   x becomes whole numbers from -127 to 127 with a scale for each block of at most 32 inputs, and sums of
//           products are exact until the end of a block. It is for x of 16 bits.
//   exact   weights become fp32, multiplied with x as it is: for x in fp32.
//   tiles   weights become bf16, a panel at a time, which holds their whole numbers exactly: AMX multiplies 16 outputs by
//           16 rows of x. It is for x of 16 bits and 24 rows or more.
//
// Some inputs of a real model are a hundred times as large as most. With one scale for a row, these would round all others
// away; with blocks, a block of theirs still has most of the row's error. So a block whose step is well above the row's
// others is multiplied twice: `fine` is what its rounding left, in steps a 254th as large.
//
// No number of the result depends on which rows are computed together, or by which thread, except that AMX rounds x of
// fewer than 24 rows, and not of more.
#include <algorithm>

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
    Vec middle() const { return Vec::all(float(1 << (of.bits - 1))); }
    // Returns what a weight of zero is as a whole number: the middle where files do not say.
    Vec zero(int64_t group, int v) const {
        if (!of.zero) return middle();
        return load_as(of.dtype, of.zero, scales + group * PANEL + v * Vec::width);
    }
};

// --- whole

constexpr int64_t BLOCK = 32;    // most inputs that share a scale of x
constexpr float FINE_FROM = 2.5f;  // times the root of the mean square of the other blocks' steps: above it, a block is fine
constexpr float FINER = 2 * MOST;

// Rows of x as whole numbers: x[row][width] and scale[row][blocks]. Added to the products with a block, `start` makes
// weights count from the middle of their range.
struct Rounded {
    int8_t* x;
    float *scale, *start;  // a scale of 0: the block has no numbers but zeros
};
struct Whole {
    Rounded coarse, fine;
    float* total;  // [row][groups]: the sum of the row's numbers in a group, as they are rounded
    int64_t width, block, blocks, groups;
};

// Returns how many inputs share a scale of x: as many as can be, and blocks divide a group of weights.
static int64_t block_of(int64_t group) {
    int64_t block = BLOCK;
    while (group % block) block -= 8;
    return block;
}

#define UNROLLED _Pragma("GCC unroll 8") for
#define INLINED inline __attribute__((always_inline))

// GCC would store a sum after each addition, in an array that it keeps beside the registers.
template <class Register>
static INLINED void stays_in_register(Register& sum) {
#if defined(__AVX512F__)
    asm("" : "+v"(sum));
#elif defined(__AVX2__)
    asm("" : "+x"(sum));
#else
    (void)sum;
#endif
}

// Vectors of a panel, and rows of x, that are multiplied at a time. In whole numbers each has two sums.
#if defined(__AVX512F__)
constexpr int MOST_V = 4, MOST_EXACT = 6, MOST_WHOLE = 3;
#elif defined(__AVX2__)
constexpr int MOST_V = 2, MOST_EXACT = 4, MOST_WHOLE = 2;
#else
constexpr int MOST_V = 1, MOST_EXACT = 4, MOST_WHOLE = 4;
#endif

constexpr int64_t ASKED = 2;  // lines that are prefetched beside four inputs of a panel

// A row alone takes memory as fast as it comes, and it comes faster where what lies some bytes further is asked for
// meanwhile: 8 bits by 6 to 15 % on a Zen, 4 bits by a quarter on an Ice Lake. On a Zen 4 bits, with twice the arithmetic
// for a byte, came up to 10 % slower, and of these sets a Zen runs the one that has bf16 and no tiles.
constexpr int64_t FAR = 6144;
#if defined(__AVX512BF16__) && !defined(__AMX_BF16__)
constexpr bool ASKS_FOR_4_BITS = false;
#else
constexpr bool ASKS_FOR_4_BITS = true;
#endif

// Adds to `out` the products of V vectors of weights, of these scales, and N rows of x over a block of inputs. Meanwhile it
// prefetches memory from `next` on.
template <int BITS, int V, int N>
static INLINED void multiply(const uint8_t* w, const Vec (&scales)[V], const Rounded& of, const Whole& rows, int64_t at,
                             int64_t place, const char* next, Vec (&out)[N][V]) {
    constexpr int halves = 8 / BITS;
    const int64_t width = rows.width, blocks = rows.blocks;
    const int8_t* x = of.x + place;
    Lanes sums[N][V];
    UNROLLED (int n = 0; n < N; ++n)
        UNROLLED (int v = 0; v < V; ++v) sums[n][v] = all(0);
    for (const int8_t* end = x + rows.block; x < end; w += PANEL * FOUR, x += FOUR * halves) {
        Lanes bytes[V];
        UNROLLED (int v = 0; v < V; ++v) bytes[v] = load(w + v * Vec::width * FOUR);
        if (N > 1) {
            UNROLLED (int i = 0; i < ASKED; ++i, next += 64) __builtin_prefetch(next, 0, 2);
        } else if (BITS == 8 || ASKS_FOR_4_BITS) {
            UNROLLED (int v = 0; v < V; ++v) __builtin_prefetch(w + FAR + v * Vec::width * FOUR, 0, 2);
        }
        UNROLLED (int half = 0; half < halves; ++half) {
            Lanes weights[V];
            UNROLLED (int v = 0; v < V; ++v) {
                weights[v] = weights_of<BITS>(bytes[v], half);
                stays_in_register(weights[v]);
            }
            UNROLLED (int n = 0; n < N; ++n) {
                Four four(x + n * width + half * FOUR);
                UNROLLED (int v = 0; v < V; ++v) sums[n][v] = dot(sums[n][v], weights[v], four);
            }
        }
        UNROLLED (int n = 0; n < N; ++n)
            UNROLLED (int v = 0; v < V; ++v) stays_in_register(sums[n][v]);
    }
    UNROLLED (int n = 0; n < N; ++n) {
        const Vec scale = Vec::all(of.scale[at + n * blocks]), start = Vec::all(of.start[at + n * blocks]);
        UNROLLED (int v = 0; v < V; ++v) {
            out[n][v] = fma(fma(widened(sums[n][v]), scale, start), scales[v], out[n][v]);
            stays_in_register(out[n][v].v);
        }
    }
}

template <int BITS, int V, int N>
static void block(const Part& part, const Whole& rows, int64_t row, Ahead& ahead, Vec (&out)[N][V]) {
    const int64_t bytes = rows.block * PANEL * BITS / 8, asked = bytes / (PANEL * FOUR) * 64 * ASKED;
    const uint8_t* w = part.at;
    int64_t at = row * rows.blocks, x = row * rows.width;  // the places of a block of the first row
    Vec sums[N][V];
    UNROLLED (int n = 0; n < N; ++n)
        UNROLLED (int v = 0; v < V; ++v) sums[n][v] = Vec::zero();
    for (int64_t group = 0; group < part.of.groups; ++group) {
        Vec scales[V];
        UNROLLED (int v = 0; v < V; ++v) scales[v] = part.scale(group, v);
        for (int64_t i = 0; i < part.of.group; i += rows.block, ++at, x += rows.block, w += bytes) {
            multiply<BITS>(w, scales, rows.coarse, rows, at, x, ahead.take(asked, w), sums);
            bool is_fine = false;
            UNROLLED (int n = 0; n < N; ++n) is_fine |= rows.fine.scale[at + n * rows.blocks] != 0;
            if (is_fine) multiply<BITS>(w, scales, rows.fine, rows, at, x, (const char*)w, sums);
        }
        if (!part.of.zero) continue;
        UNROLLED (int v = 0; v < V; ++v) {
            const Vec zero = (part.middle() - part.zero(group, v)) * scales[v];
            UNROLLED (int n = 0; n < N; ++n)
                sums[n][v] = fma(zero, Vec::all(rows.total[(row + n) * rows.groups + group]), sums[n][v]);
        }
    }
    UNROLLED (int n = 0; n < N; ++n)
        UNROLLED (int v = 0; v < V; ++v) out[n][v] = sums[n][v];
}

// Writes numbers as the nearest whole ones of these steps, and returns their sum.
static INLINED float round_block(const float* x, float by, int64_t inputs, int8_t* to) {
    int8_t out[BLOCK];
    Vec sum = Vec::zero();
    UNROLLED (int64_t i = 0; i < BLOCK; i += Vec::width) {
        const Vec whole = rounded(Vec::load(x + i) * Vec::all(by));
        store_bytes(whole, out + i);
        sum = sum + whole;
    }
    std::memcpy(to, out, inputs);
    return sum.sum();
}

// Returns the step above which a block is to be fine. Those that are fine do not count among the others.
static float fine_above(const float* steps, int64_t blocks) {
    float bound = INFINITY;
    for (int round = 0; round < 3; ++round) {
        double squares = 0;
        int64_t count = 0;
        for (int64_t i = 0; i < blocks; ++i)
            if (steps[i] <= bound) squares += double(steps[i]) * steps[i], ++count;
        bound = FINE_FROM * float(std::sqrt(squares / (count ? count : 1)));
    }
    return bound;
}

// Writes one row of x as whole numbers. A row with a number that is not finite gets NaNs for its scales.
template <bool WHOLE_BLOCKS>
static void to_whole(const float* x, int64_t row, float middle, const Whole& to) {
    const int64_t first = row * to.blocks, in_group = to.blocks / to.groups, block = WHOLE_BLOCKS ? BLOCK : to.block;
    float *coarse = to.coarse.scale + first, *fine = to.fine.scale + first, *total = to.total + row * to.groups;
    float filled[BLOCK] = {}, left[BLOCK];
    auto numbers = [&](int64_t i) {
        if (WHOLE_BLOCKS) return x + i * BLOCK;
        return (const float*)std::memcpy(filled, x + i * block, block * sizeof(float));
    };
    Vec doubt = Vec::zero();
    for (int64_t i = 0; i < to.blocks; ++i) {
        const float* of = numbers(i);
        Vec most = Vec::zero();
        UNROLLED (int64_t j = 0; j < BLOCK; j += Vec::width) {
            const Vec number = Vec::load(of + j);
            most = max(most, max(number, Vec::zero() - number));
            doubt = doubt + number * Vec::zero();
        }
        const float largest = most.largest();
        coarse[i] = largest == 0 ? 0 : std::max(largest / MOST, 0x1p-100f);  // the inverse of smaller ones is not finite
    }
    const bool finite = doubt.sum() == 0;
    const float bound = fine_above(coarse, to.blocks);
    std::fill(total, total + to.groups, 0.0f);
    std::fill(to.fine.x + row * to.width, to.fine.x + (row + 1) * to.width, int8_t(0));
    for (int64_t i = 0; i < to.blocks; ++i) {
        const float *of = numbers(i), step = coarse[i], by = step > 0 && finite ? 1 / step : 0;
        int8_t* whole = to.coarse.x + row * to.width + i * block;
        float sum = 0, rest = 0;
        if (finite) sum = round_block(of, by, block, whole);
        fine[i] = finite && step > bound ? step / FINER : 0;
        if (fine[i] > 0) {
            for (int64_t j = 0; j < block; ++j) left[j] = of[j] - step * whole[j];
            for (int64_t j = block; j < BLOCK; ++j) left[j] = 0;
            rest = round_block(left, by * FINER, block, to.fine.x + row * to.width + i * block);
        }
        if (!finite) coarse[i] = NAN;
        to.coarse.start[first + i] = -middle * step * sum;
        to.fine.start[first + i] = -middle * fine[i] * rest;
        total[i / in_group] += step * sum + fine[i] * rest;
    }
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

// Multiplies all rows with vectors of a panel, in as few groups of equal size as can be; meanwhile prefetches the next
// panel of `bytes`, if there is one.
template <int BITS, class Rows, class T>
static void all_rows(const Part& part, const Rows& rows, int64_t count, const uint8_t* next, int64_t bytes,
                     const Result<T>& result) {
    constexpr int most = std::is_same_v<Rows, Whole> ? MOST_WHOLE : MOST_EXACT;
    int64_t groups = (count + most - 1) / most;
    // A single pass over a panel reads it as fast as possible: a prefetch of the next panel would only slow it.
    const char* from = groups > 1 ? (const char*)next : nullptr;
    Ahead ahead{from, from ? from + bytes : from, (MOST_V + groups - 1) / groups};
    for (int64_t i = 0; i < groups; ++i) {
        Range of = share(count, i, groups);
        group<BITS, MOST_V, most>(part, rows, of.begin, of.end - of.begin, ahead, result);
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

#if defined(__AMX_BF16__)

// --- tiles

constexpr int64_t SIDE = 16, PAIR = 2 * SIDE;  // rows of a tile; rows of x, and outputs, of a block
constexpr int64_t TILES_FROM = 24;             // rows: for fewer it takes longer to make bf16 of the weights
constexpr int64_t ASKS = 2;                    // prefetches in a step

// Rows of x in bf16, `width` numbers apart, and the sum of each row's numbers in a group.
struct Halves {
    const bf16* x;
    const float* total;
    int64_t width;
};

// Tiles 0 to 3 hold sums, 4 and 5 rows of x, 6 and 7 weights: `depth` inputs are multiplied in a step.
struct alignas(64) TileShapes {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t bytes[16] = {64, 64, 64, 64};
    uint8_t rows[16] = {SIDE, SIDE, SIDE, SIDE, SIDE, SIDE};
    explicit TileShapes(int64_t depth) {
        bytes[4] = bytes[5] = uint16_t(2 * depth), bytes[6] = bytes[7] = 64;
        rows[6] = rows[7] = uint8_t(depth / 2);
    }
};

// Returns the most inputs that a step can take: steps divide a group.
static int64_t depth_of(int64_t group) {
    int64_t depth = 2 * SIDE;
    while (group % depth) depth -= 2;
    return depth;
}

// Stores the sums of the products of 32 outputs and 16 * R rows of x over a group of inputs. Two inputs of a panel's
// outputs are a row of `w`.
template <int R>
static void tile_sums(const bf16* w, const bf16* x, int64_t width, int64_t inputs, int64_t depth, Ahead& ahead,
                      float (&sums)[R * SIDE][PAIR]) {
    constexpr int64_t apart = PANEL * 2 * sizeof(bf16), right = SIDE * 2;
    const int64_t x_apart = width * sizeof(bf16);
    _tile_zero(0);
    _tile_zero(1);
    if (R > 1) _tile_zero(2);
    if (R > 1) _tile_zero(3);
    for (const bf16* end = x + inputs; x < end; x += depth, w += depth * PANEL) {
        _tile_loadd(4, x, x_apart);
        _tile_loadd(6, w, apart);
        ahead.ask();
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, w + right, apart);
        ahead.ask();
        _tile_dpbf16ps(1, 4, 7);
        if (R > 1) {
            _tile_loadd(5, x + SIDE * width, x_apart);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, sums[0], sizeof sums[0]);
    _tile_stored(1, sums[0] + SIDE, sizeof sums[0]);
    if (R > 1) _tile_stored(2, sums[SIDE * (R - 1)], sizeof sums[0]);
    if (R > 1) _tile_stored(3, sums[SIDE * (R - 1)] + SIDE, sizeof sums[0]);
}

// Multiplies 32 outputs with up to 16 * R rows of x. `w` is the first of their weights.
template <int R, class T>
static void tile_block(const Part& part, const bf16* w, int64_t depth, const Halves& rows, int64_t row, int64_t count,
                       Ahead& ahead, const Result<T>& result) {
    alignas(64) float sums[R * SIDE][PAIR];
    Vec out[R * SIDE][2];
    int64_t size = part.of.group;
    for (int64_t n = 0; n < count; ++n) out[n][0] = out[n][1] = Vec::zero();
    for (int64_t group = 0; group < part.of.groups; ++group) {
        const bf16* x = rows.x + row * rows.width + group * size;
        tile_sums<R>(w + group * size * PANEL, x, rows.width, size, depth, ahead, sums);
        for (int v = 0; v < 2; ++v) {
            Vec scale = part.scale(group, v), zero = part.middle() - part.zero(group, v);
            for (int64_t n = 0; n < count; ++n) {
                Vec total = Vec::all(rows.total[(row + n) * part.of.groups + group]);
                out[n][v] = fma(fma(zero, total, Vec::load(sums[n] + v * SIDE)), scale, out[n][v]);
            }
        }
    }
    for (int64_t n = 0; n < count; ++n)
        for (int v = 0; v < 2; ++v) result.put_lanes(out[n][v], row + n, part.first + v * SIDE);
}

// Makes two rows of a tile from four inputs of 16 outputs: how far each weight is from the middle, in bf16.
template <int BITS>
static void expand(__m512i fours, bf16* first, bf16* second);
template <>
void expand<4>(__m512i fours, bf16* first, bf16* second) {
    alignas(64) static const uint16_t numbers[32] = {  // -8 to 7
        0xC100, 0xC0E0, 0xC0C0, 0xC0A0, 0xC080, 0xC040, 0xC000, 0xBF80,
        0x0000, 0x3F80, 0x4000, 0x4040, 0x4080, 0x40A0, 0x40C0, 0x40E0};
    const __m512i table = _mm512_load_si512(numbers), low = all(0xFF), high = all(0xFF0000);
    auto pair = [&](__m512i a, __m512i b) {
        return _mm512_permutexvar_epi16(_mm512_or_si512(both(a, low), both(b, high)), table);
    };
    _mm512_storeu_si512(first, pair(fours, _mm512_slli_epi32(fours, 8)));
    _mm512_storeu_si512(second, pair(down<16>(fours), down<8>(fours)));
}
template <>
void expand<8>(__m512i fours, bf16* first, bf16* second) {
    fours = _mm512_xor_si512(fours, all(int32_t(0x80808080)));  // the middle becomes 0, and numbers have signs
    auto number = [](__m512i in_upper_byte) {  // whole numbers of 8 bits: the lower half of their fp32 is 0
        return _mm512_castps_si512(_mm512_cvtepi32_ps(_mm512_srai_epi32(in_upper_byte, 24)));
    };
    auto pair = [&](__m512i a, __m512i b) { return _mm512_or_si512(down<16>(number(a)), number(b)); };
    _mm512_storeu_si512(first, pair(_mm512_slli_epi32(fours, 24), _mm512_slli_epi32(fours, 16)));
    _mm512_storeu_si512(second, pair(_mm512_slli_epi32(fours, 8), fours));
}

// Makes rows of two inputs of a panel's outputs, in bf16.
template <int BITS>
static void expand_panel(const uint8_t* panel, int64_t bytes, bf16* to) {
    constexpr int64_t line = PANEL * FOUR, row = PANEL * 2;
    for (const uint8_t* end = panel + bytes; panel < end; panel += line)
        for (int half = 0; half < 8 / BITS; ++half, to += 2 * row)
            for (int64_t i = 0; i < line; i += 64)
                expand<BITS>(weights_of<BITS>(load(panel + i), half), to + i / 2, to + row + i / 2);
}

template <int BITS, class T>
static void by_tiles(const Layer& layer, const Halves& rows, int64_t count, const Result<T>& result) {
    static thread_local Scratch expanded;
    const Quantised& of = *layer.quantised;
    int64_t width = of.groups * of.group, depth = depth_of(of.group), bytes = width * PANEL * BITS / 8;
    auto* memory = (bf16*)expanded.at_least(omp_get_max_threads() * width * PANEL * sizeof(bf16));
    int64_t passes = PANEL / PAIR * ((count + PAIR - 1) / PAIR), steps = passes * (width / depth);
    int64_t lines = bytes / (64 * ASKS * steps) + 1;
    const TileShapes config(depth);
    Blocks blocks((layer.out + PANEL - 1) / PANEL);
#pragma omp parallel
    {
        _tile_loadconfig(&config);
        bf16* w = memory + omp_get_thread_num() * width * PANEL;
        blocks.each(1, [&](int64_t panel, int64_t, int64_t last) {
            const uint8_t* at = (const uint8_t*)layer.weight + panel * bytes;
            expand_panel<BITS>(at, bytes, w);
            const char* next = (const char*)at + bytes;
            Ahead ahead{next, panel + 1 < last ? next + bytes : next, lines};
            for (int64_t first = 0; first < PANEL && panel * PANEL + first < layer.out; first += PAIR) {
                Part part{of, at, panel * of.groups * PANEL + first, panel * PANEL + first};
                for (int64_t row = 0; row < count; row += PAIR) {
                    int64_t left = count - row;
                    auto block = left > SIDE ? tile_block<2, T> : tile_block<1, T>;
                    block(part, w + first * 2, depth, rows, row, left < PAIR ? left : PAIR, ahead, result);
                }
            }
        });
        _tile_release();
    }
}

static void to_halves(const float* x, const Quantised& of, int64_t row, int64_t width, bf16* to, float* total) {
    for (int64_t i = 0; i < width; i += Vec::width) Vec::load(x + i).store(to + row * width + i);
    for (int64_t group = 0; group < of.groups; ++group) {
        float sum = 0;
        for (int64_t i = group * of.group; i < (group + 1) * of.group; ++i) sum += widen(to[row * width + i]);
        total[row * of.groups + group] = sum;
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

// Memory for several arrays, each at a line of its own.
class Arrays {
    char* at;

  public:
    explicit Arrays(void* memory) : at((char*)memory) {}
    static int64_t bytes(int64_t wanted) { return (wanted + 63) / 64 * 64; }
    template <class T>
    T* take(int64_t count) {
        T* of = (T*)at;
        at += bytes(count * sizeof(T));
        return of;
    }
};

// Calls use(copy, row) with each row of x in fp32, in the order of the weight's columns.
template <class T, class Use>
static void each_row(const Layer& layer, const T* x, int64_t stride, int64_t count, float* copies, int64_t padded, Use use) {
#pragma omp parallel for if (count > 1)
    for (int64_t row = 0; row < count; ++row) {
        float* copy = copies + omp_get_thread_num() * padded;
        copy_row(layer, x + row * stride, copy, padded);
        use(copy, row);
    }
}

template <class T>
static void by_rows(const Layer& layer, const T* x, int64_t stride, int64_t count, const Result<T>& result) {
    const Quantised& of = *layer.quantised;
    const int64_t width = of.groups * of.group, padded = (width + 63) / 64 * 64, threads = omp_get_max_threads();
    auto multiply = [&](const auto& rows) {
        of.bits == 8 ? outputs<8>(layer, rows, count, result) : outputs<4>(layer, rows, count, result);
    };
    if constexpr (std::is_same_v<T, float>) {
        float* copies = (float*)scratch.at_least(count * padded * sizeof(float));
#pragma omp parallel for if (count > 1)
        for (int64_t row = 0; row < count; ++row) copy_row(layer, x + row * stride, copies + row * padded, padded);
        return multiply(Exact{copies, padded});
    }
    const int64_t of_copies = Arrays::bytes(threads * padded * sizeof(float));
    const int64_t of_totals = Arrays::bytes(count * of.groups * sizeof(float));
#if defined(__AMX_BF16__)
    if (count >= TILES_FROM) {
        const int64_t filled = (count + PAIR - 1) / PAIR * PAIR;  // tiles read whole blocks of rows
        Arrays arrays(scratch.at_least(of_copies + of_totals + filled * padded * sizeof(bf16)));
        float *copies = arrays.take<float>(threads * padded), *total = arrays.take<float>(count * of.groups);
        bf16* halves = arrays.take<bf16>(filled * padded);
        each_row(layer, x, stride, count, copies, padded,
                 [&](const float* copy, int64_t row) { to_halves(copy, of, row, padded, halves, total); });
        const Halves rows{halves, total, padded};
        return of.bits == 8 ? by_tiles<8>(layer, rows, count, result) : by_tiles<4>(layer, rows, count, result);
    }
#endif
    const int64_t block = block_of(of.group), blocks = width / block;
    const int64_t of_rounded = Arrays::bytes(count * padded) + 2 * Arrays::bytes(count * blocks * sizeof(float));
    Arrays arrays(scratch.at_least(of_copies + of_totals + 2 * of_rounded));
    float *copies = arrays.take<float>(threads * padded), *total = arrays.take<float>(count * of.groups);
    auto rounded = [&] {
        auto* whole = arrays.take<int8_t>(count * padded);
        auto* scale = arrays.take<float>(count * blocks);
        return Rounded{whole, scale, arrays.take<float>(count * blocks)};
    };
    const Rounded coarse = rounded(), fine = rounded();
    const Whole rows{coarse, fine, total, padded, block, blocks, of.groups};
    auto round = block == BLOCK ? to_whole<true> : to_whole<false>;
    each_row(layer, x, stride, count, copies, padded,
             [&](const float* copy, int64_t row) { round(copy, row, float(1 << (of.bits - 1)), rows); });
    multiply(rows);
}

void quantised_linear(const Layer* layer, const void* x, int64_t stride, void* out, int64_t rows, int into) {
    if (!rows) return;
    by_dtype(layer->dtype, [&](auto* of) {
        using T = std::remove_pointer_t<decltype(of)>;
        by_rows<T>(*layer, (const T*)x, stride, rows, {(const T*)layer->bias, out, layer->out, into});
    });
}

}  // namespace ISA
