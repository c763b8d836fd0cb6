// A linear layer, out = x W^T + bias, for few rows of x: each weight is read once, row-major as torch has it.
//
// A weight row and a row of x are both contiguous along `in`, so a number of the result is a dot product, and the
// kernels keep several weight rows by several rows of x in registers:
//
//   dot    RO weight rows by RN rows of x, one vector accumulator each; the only kernel but for bf16 on AMX.
//   tiles  AMX: 16 weight rows by 32 inputs are one tile as they lie in memory, the left operand of the product. x is the
//          right one, packed beforehand: its pairs of inputs below each other, 16 rows of x side by side.
//
// Where weights lie otherwise than as torch has them, packed.cpp has the kernel.
//
// Where there are more rows of x than the second cache holds, all weights are multiplied with some, then with the next.
// Each thread has a contiguous range of weight rows and prefetches the next block beside the present block.
#include "blocks.h"
#include "dot.h"
#include "kernels.h"
#include "scratch.h"

namespace ISA {

// Memory for packed activations, so that a call allocates nothing.
static thread_local Scratch scratch;

// --- dot

constexpr int64_t DOT_AHEAD = 4;  // blocks of weights: a single block of a narrow layer would not keep memory busy

constexpr int64_t DOT_BYTES = 1 << 14;  // bytes of weights that a thread takes at a time
constexpr int64_t DOT_ROWS = 3 << 17;   // bytes of rows of x that all weights are multiplied with: they stay in the second cache

template <class T>
static Rows<typename Dot<T>::X> pack_rows(const T* x, int64_t stride, int64_t rows, int64_t in) {
    using X = typename Dot<T>::X;
    constexpr int chunk = Dot<T>::chunk;
    if constexpr (std::is_same_v<T, X>)
        if (in % chunk == 0) return {x, stride};
    int64_t padded = (in + chunk - 1) / chunk * chunk;
    X* packed = (X*)scratch.at_least(rows * padded * sizeof(X));
#pragma omp parallel for if (rows * in > 32768)
    for (int64_t row = 0; row < rows; ++row) pack_row<T>(x + row * stride, in, packed + row * padded);
    return {packed, padded};
}

template <class T>
static void by_dot(const Layer& layer, const T* x, int64_t stride, const Result<T>& result, int64_t rows) {
    const T* weight = (const T*)layer.weight;
    int64_t in = layer.in;
    Rows<typename Dot<T>::X> packed = pack_rows<T>(x, stride, rows, in);
    int64_t at_once = 1 + DOT_BYTES / (RO * in * int64_t(sizeof(T)));
    int64_t most = (1 + DOT_ROWS / (RN * in * int64_t(sizeof(*packed.x)))) * RN;
    for (int64_t row = 0; row < rows; row += most) {
        int64_t count = rows - row < most ? rows - row : most;
        Blocks blocks((layer.out + RO - 1) / RO);
#pragma omp parallel
        blocks.each(at_once, [&](int64_t block, int64_t end, int64_t last) {
            for (; block < end; ++block) {
                int64_t at = block * RO, ahead = block + DOT_AHEAD < last ? DOT_AHEAD * RO * in : 0;
                if (at + RO <= layer.out)
                    dot_rows<T, RO>(weight + at * in, in, ahead, packed, result, row, count, at);
                else
                    for (; at < layer.out; ++at)
                        dot_rows<T, 1>(weight + at * in, in, 0, packed, result, row, count, at);
            }
        });
    }
}

// --- tiles

#if defined(__AMX_BF16__)

constexpr int64_t LINE = 32;           // inputs in a tile's row
constexpr int64_t SIDE = 16;           // rows of a tile
constexpr int64_t TILE = SIDE * LINE;  // numbers in it
constexpr int64_t PACKED_ROWS = 256;   // rows of x that are packed at a time: they stay in the second cache
constexpr int64_t TILES_FROM = 3;      // rows: with fewer, `dot` is a little faster

struct alignas(64) TileConfig {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

static inline void transpose(__m512i r[16]) {  // 16 x 16 numbers of 32 bits
    __m512i t[16];
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
        r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
        r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
        r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
        r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    for (int i = 0; i < 16; i += 8)
        for (int j = 0; j < 4; ++j) {
            t[i + j] = _mm512_shuffle_i32x4(r[i + j], r[i + j + 4], 0x88);
            t[i + j + 4] = _mm512_shuffle_i32x4(r[i + j], r[i + j + 4], 0xDD);
        }
    for (int i = 0; i < 8; ++i) {
        r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
        r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xDD);
    }
}

// Packs one tile of x: `rows` rows side by side, `inputs` of each, zeros beyond.
static void pack_tile(const bf16* x, int64_t stride, int64_t rows, int64_t inputs, bf16* to) {
    __mmask32 mask = inputs >= LINE ? ~0u : (1u << inputs) - 1;
    __m512i r[16];
    for (int i = 0; i < 16; ++i)
        r[i] = i < rows ? _mm512_maskz_loadu_epi16(mask, x + i * stride) : _mm512_setzero_si512();
    transpose(r);
    for (int i = 0; i < 16; ++i) _mm512_store_si512(to + i * LINE, r[i]);
}

// Copies the weights of a tile that reaches over the matrix's edge, with zeros beyond.
static void edge_tile(const bf16* w, int64_t in, int64_t rows, int64_t inputs, bf16* to) {
    __mmask32 mask = inputs >= LINE ? ~0u : (1u << inputs) - 1;
    for (int i = 0; i < 16; ++i)
        _mm512_store_si512(to + i * LINE, i < rows ? _mm512_maskz_loadu_epi16(mask, w + i * in) : _mm512_setzero_si512());
}

// Stores the products of a tile, [16 weight rows, 16 rows of x], without those beyond the edges.
static void put_tile(const float* sums, const Result<bf16>& result, int64_t row, int64_t rows, int64_t at,
                     int64_t outs) {
    __m512i r[16];
    for (int i = 0; i < 16; ++i) r[i] = _mm512_load_si512(sums + i * 16);
    transpose(r);
    __mmask16 mask = outs >= SIDE ? 0xFFFF : (1u << outs) - 1;
    auto load = [mask](const bf16* p) {
        __m512i wide = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, p));
        return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
    };
    __m512 bias = result.bias ? load(result.bias + at) : _mm512_setzero_ps();
    for (int64_t i = 0; i < rows && i < SIDE; ++i) {
        __m512 value = _mm512_add_ps(_mm512_castsi512_ps(r[i]), bias);
        if (result.wide()) {
            _mm512_mask_storeu_ps(result.wide_at(row + i, at), mask, value);
            continue;
        }
        bf16* to = result.at(row + i, at);
        if (result.adds()) value = _mm512_add_ps(value, load(to));
        _mm256_mask_storeu_epi16(to, mask, (__m256i)_mm512_cvtneps_pbh(value));
    }
}

constexpr int64_t ASKS = 4;  // prefetches in a step of tile_block

// Multiplies A * 16 weight rows with B * 16 rows of x. Tiles 0 to 3 hold sums, 4 and 5 weights, 6 and 7 inputs.
template <int A, int B>
static void tile_block(const bf16* w, int64_t in, int64_t outs, Ahead& ahead, const bf16* packed, float* sums) {
    alignas(64) bf16 edge[2][TILE];
    int64_t steps = (in + LINE - 1) / LINE;
    _tile_zero(0);
    if (B > 1) _tile_zero(1);
    if (A > 1) _tile_zero(2);
    if (A > 1 && B > 1) _tile_zero(3);
    for (int64_t step = 0; step < steps; ++step, packed += TILE) {
        const bf16 *upper = w + step * LINE, *lower = upper + SIDE * in;
        int64_t apart = in * sizeof(bf16), inputs = in - step * LINE;
        if (__builtin_expect(outs < A * SIDE || inputs < LINE, 0)) {
            edge_tile(upper, in, outs, inputs, edge[0]);
            if (A > 1) edge_tile(lower, in, outs - SIDE, inputs, edge[1]);
            upper = edge[0], lower = edge[1], apart = LINE * sizeof(bf16);
        }
        ahead.ask();
        _tile_loadd(4, upper, apart);
        _tile_loadd(6, packed, 64);
        ahead.ask();
        _tile_dpbf16ps(0, 4, 6);
        if (A > 1) _tile_loadd(5, lower, apart);
        ahead.ask();
        if (A > 1) _tile_dpbf16ps(2, 5, 6);
        if (B > 1) _tile_loadd(7, packed + steps * TILE, 64);
        ahead.ask();
        if (B > 1) _tile_dpbf16ps(1, 4, 7);
        if (A > 1 && B > 1) _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, sums, 64);
    if (B > 1) _tile_stored(1, sums + 256, 64);
    if (A > 1) _tile_stored(2, sums + 512, 64);
    if (A > 1 && B > 1) _tile_stored(3, sums + 768, 64);
}

// Multiplies a weight block with all packed rows of x, two tiles of them at a time.
template <int A>
static void tile_rows(const Layer& layer, int64_t at, Ahead ahead, const bf16* packed, int64_t row, int64_t rows,
                      const Result<bf16>& result) {
    alignas(64) float sums[4 * 256];
    int64_t in = layer.in, tiles = (in + LINE - 1) / LINE * TILE, outs = layer.out - at;
    const bf16* w = (const bf16*)layer.weight + at * in;
    for (; rows > 0; rows -= 2 * SIDE, row += 2 * SIDE, packed += 2 * tiles) {
        if (rows > SIDE)
            tile_block<A, 2>(w, in, outs, ahead, packed, sums);
        else
            tile_block<A, 1>(w, in, outs, ahead, packed, sums);
        for (int64_t a = 0; a < A * SIDE && a < outs; a += SIDE)
            for (int64_t b = 0; b < 2 * SIDE && b < rows; b += SIDE)
                put_tile(sums + 32 * a + 16 * b, result, row + b, rows - b, at + a, outs - a);
    }
}

template <int A>
static void by_tiles(const Layer& layer, const bf16* x, int64_t stride, const Result<bf16>& result, int64_t rows) {
    constexpr int64_t high = A * SIDE;
    const bf16* weight = (const bf16*)layer.weight;
    int64_t in = layer.in, steps = (in + LINE - 1) / LINE;
    int64_t at_once = rows < PACKED_ROWS ? rows : PACKED_ROWS;
    bf16* packed = (bf16*)scratch.at_least((at_once + SIDE - 1) / SIDE * steps * TILE * sizeof(bf16));
    const TileConfig config;
    Blocks blocks((layer.out + high - 1) / high);
    auto ahead = [&](int64_t block, int64_t last, int64_t lines) -> Ahead {
        if (block >= last) return {};
        int64_t end = (block + 1) * high < layer.out ? (block + 1) * high : layer.out;
        return {(const char*)(weight + block * high * in), (const char*)(weight + end * in), lines};
    };
#pragma omp parallel
    {
        _tile_loadconfig(&config);
        for (int64_t row = 0; row < rows; row += at_once) {
            int64_t count = rows - row < at_once ? rows - row : at_once;
            Range tiles = share((count + SIDE - 1) / SIDE * steps);
            for (int64_t tile = tiles.begin; tile < tiles.end; ++tile) {
                int64_t first = tile / steps * SIDE, k = tile % steps * LINE;
                pack_tile(x + (row + first) * stride + k, stride, count - first, in - k, packed + tile * TILE);
            }
            Range own = blocks.own();
            ahead(own.begin, own.end, high * steps).ask();
#pragma omp barrier
            int64_t passes = (count + 2 * SIDE - 1) / (2 * SIDE), lines = (high + ASKS * passes - 1) / (ASKS * passes);
            blocks.each(1, [&](int64_t block, int64_t, int64_t last) {
                tile_rows<A>(layer, block * high, ahead(block + 1, last, lines), packed, row, count, result);
            });
#pragma omp barrier
#pragma omp master
            blocks.reset();  // before the next barrier, at which all threads wait before they take a block
        }
        _tile_release();
    }
}

#endif

void linear(const Layer* layer, const void* x, int64_t stride, void* out, int64_t rows, int into) {
    if (layer->quantised) return quantised_linear(layer, x, stride, out, rows, into);
    if (layer->packed) return packed_linear(layer, x, stride, out, rows, into);
    by_dtype(layer->dtype, [&](auto* of) {
        using T = std::remove_pointer_t<decltype(of)>;
        Result<T> result{(const T*)layer->bias, out, layer->out, into};
#if defined(__AMX_BF16__)
        if constexpr (std::is_same_v<T, bf16>)
            if (rows >= TILES_FROM) {
                // Two tiles of weights at a time are better for the caches, a single tile where threads share few rows.
                bool many = layer->out < 4 * 2 * SIDE * omp_get_max_threads();
                auto by = many ? by_tiles<1> : by_tiles<2>;
                return by(*layer, (const bf16*)x, stride, result, rows);
            }
#endif
        by_dot<T>(*layer, (const T*)x, stride, result, rows);
    });
}

}  // namespace ISA
