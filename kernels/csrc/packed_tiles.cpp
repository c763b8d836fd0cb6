// Packed weights by AMX: 16 rows of x, as they lie, are the left operand of a product, and 16 outputs of a panel the right one.
//
// Each tile of x is multiplied with the four tiles of a panel beside it. These are read again for the next rows, so they must
// come from the first cache: all rows are multiplied with the weights of 256 inputs, 32 KB, then with the next, and their sums
// wait in the second cache. Beside the products of some inputs the weights of the next are prefetched into the second cache.
//
// Many rows are divided into chunks, which stay in the second cache too, and each thread takes chunks of its own first: the
// weights are read once for each chunk. Where outputs are gate and up, a gate's panel and the panel of what it gates are
// multiplied one after the other, and the numbers that they make together are all that is written.
#include "blocks.h"
#include "kernels.h"
#include "panels.h"
#include "scratch.h"

namespace ISA {

#if defined(__AMX_BF16__)

constexpr int64_t SIDE = 16, LINE = 32;   // rows of a tile, inputs of its rows
constexpr int64_t DEPTH = 256;            // inputs whose weights stay in the first cache
constexpr int64_t CHUNK_BYTES = 3 << 18;  // of rows of x that stay in the second cache
constexpr int64_t LEAST_CHUNK = 128;      // rows for which it pays to read the weights once more
constexpr int64_t ASKS = 4;               // prefetches in a step

static int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

struct alignas(64) TileConfig {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    // Tiles 0 to 3 hold sums and tile 4 rows of x; 5 to 7 hold weights.
    explicit TileConfig(int64_t of_x) {
        for (int tile = 0; tile < 5; ++tile) rows[tile] = uint8_t(of_x < SIDE ? of_x : SIDE);
    }
};

// The products of one tile of rows with a part of a panel.
template <int V>
struct TileSums {
    float* at;  // [row][V * 16]
    static constexpr int64_t APART = V * SIDE * sizeof(float);

    void begin(bool is_first) const {
        if (is_first) {
            _tile_zero(0);
            if (V > 1) _tile_zero(1);
            if (V > 2) _tile_zero(2);
            if (V > 3) _tile_zero(3);
            return;
        }
        _tile_loadd(0, at, APART);
        if (V > 1) _tile_loadd(1, at + SIDE, APART);
        if (V > 2) _tile_loadd(2, at + 2 * SIDE, APART);
        if (V > 3) _tile_loadd(3, at + 3 * SIDE, APART);
    }
    void end() const {
        _tile_stored(0, at, APART);
        if (V > 1) _tile_stored(1, at + SIDE, APART);
        if (V > 2) _tile_stored(2, at + 2 * SIDE, APART);
        if (V > 3) _tile_stored(3, at + 3 * SIDE, APART);
    }
    // Adds the products of 32 inputs.
    static void step(const void* x, int64_t x_apart, const void* weights, int64_t apart, Ahead& ahead) {
        const char* w = (const char*)weights;
        _tile_loadd(4, x, x_apart);
        _tile_loadd(5, w, apart);
        ahead.ask();
        _tile_dpbf16ps(0, 4, 5);
        if (V > 1) _tile_loadd(6, w + 64, apart);
        ahead.ask();
        if (V > 1) _tile_dpbf16ps(1, 4, 6);
        if (V > 2) _tile_loadd(7, w + 128, apart);
        ahead.ask();
        if (V > 2) _tile_dpbf16ps(2, 4, 7);
        if (V > 3) _tile_loadd(5, w + 192, apart);
        ahead.ask();
        if (V > 3) _tile_dpbf16ps(3, 4, 5);
    }
};

// Some of a step's tiles of rows. The last tile of the step goes over some rows a second time: so it is whole.
struct Chunk {
    int64_t first_tile, tiles, rows;  // the rows of all chunks

    int64_t begin(int64_t tile) const {
        int64_t at = new_from(tile), last = rows > SIDE ? rows - SIDE : 0;
        return at < last ? at : last;
    }
    int64_t new_from(int64_t tile) const { return (first_tile + tile) * SIDE; }
    int64_t end(int64_t tile) const { return new_from(tile + 1) < rows ? new_from(tile + 1) : rows; }
};

// What lies beyond the last input is 0 here.
template <int V>
struct Edge {
    alignas(64) bf16 x[SIDE * LINE];
    alignas(64) bf16 weights[SIDE * V * LINE];

    void copy_weights(const bf16* from, int64_t apart, int64_t pairs) {
        std::memset(weights, 0, sizeof weights);
        for (int64_t pair = 0; pair < pairs; ++pair)
            std::memcpy(weights + pair * V * LINE, from + pair * apart, V * LINE * sizeof(bf16));
    }
    void copy_x(const bf16* from, int64_t stride, int64_t rows, int64_t inputs) {
        const __mmask32 mask = (1u << inputs) - 1;
        for (int64_t row = 0; row < rows; ++row)
            _mm512_store_si512(x + row * LINE, _mm512_maskz_loadu_epi16(mask, from + row * stride));
    }
};

// Multiplies a chunk with V vectors of a panel, and calls put(sums, tile). `next` is what comes after the panel, or null.
template <int V, class Put>
static void multiply(const Part& part, int64_t in, const Rows& rows, const Chunk& chunk, const char* next, float* memory,
                     Put put) {
    Edge<V> edge;
    const int64_t apart = part.apart * 2 * LANES, tiles = chunk.tiles, x_apart = rows.stride * sizeof(bf16);
    for (int64_t from = 0; from < in; from += DEPTH) {
        const int64_t to = from + DEPTH < in ? from + DEPTH : in, whole = (to - from) / LINE, rest = (to - from) % LINE;
        const bf16* weights = part.at + from / 2 * apart;
        if (rest) edge.copy_weights(weights + whole * LINE / 2 * apart, apart, rest / 2);
        // A single tile of rows waits for memory, and prefetches what it reads itself some steps later. Of more tiles each
        // prefetches a part of the next weights.
        const bool is_alone = tiles < 2;
        const char* after = to < in ? (const char*)(part.at + to / 2 * apart) : next;
        if (is_alone) after = part.apart == V ? (const char*)weights + FAR : nullptr;
        const int64_t later = to < in ? smaller(in - to, DEPTH) : smaller(in, DEPTH), inputs = is_alone ? to - from : later;
        const int64_t bytes = after ? inputs / 2 * apart * int64_t(sizeof(bf16)) : 0, asks = ASKS * tiles * larger(whole, 1);
        Ahead ahead{after, after + bytes, (bytes / 64 + asks - 1) / asks};
        for (int64_t tile = 0; tile < tiles; ++tile) {
            const bf16* x = rows.x + chunk.begin(tile) * rows.stride + from;
            const TileSums<V> sums{memory + tile * SIDE * V * SIDE};
            sums.begin(!from);
            for (int64_t i = 0; i < whole; ++i)
                sums.step(x + i * LINE, x_apart, weights + i * LINE / 2 * apart, apart * sizeof(bf16), ahead);
            if (rest) {
                edge.copy_x(x + whole * LINE, rows.stride, smaller(chunk.rows, SIDE), rest);
                sums.step(edge.x, LINE * sizeof(bf16), edge.weights, V * LINE * sizeof(bf16), ahead);
            }
            sums.end();
            if (to == in) put(sums, tile);
        }
    }
}

// Calls action(vector, row, number of the vector) for each new row and each vector of the sums of a tile.
template <int V, class Action>
static void each_sum(const TileSums<V>& sums, const Chunk& chunk, int64_t tile, Action action) {
    for (int64_t row = chunk.new_from(tile); row < chunk.end(tile); ++row)
        for (int v = 0; v < V; ++v) action(_mm512_load_ps(sums.at + ((row - chunk.begin(tile)) * V + v) * SIDE), row, v);
}

// Calls the kernel for 4 vectors at once, then 2 or 1.
static void some(Part part, int64_t in, const Rows& rows, const Chunk& chunk, const char* next, float* memory) {
    auto go = [&](auto vectors) {
        constexpr int V = decltype(vectors)::value;
        for (; part.count >= V; part.at += V * 2 * LANES, part.first += V * LANES, part.count -= V)
            multiply<V>(part, in, rows, chunk, next, memory, [&](const TileSums<V>& sums, int64_t tile) {
                each_sum(sums, chunk, tile, [&](__m512 sum, int64_t row, int v) {
                    rows.put(sum, row, part.first + v * SIDE);
                });
            });
    };
    go(std::integral_constant<int, PANEL>());
    go(std::integral_constant<int, PANEL / 2>());
    go(std::integral_constant<int, 1>());
}

// How rows are divided into chunks.
struct Chunks {
    int64_t rows, tiles, count;

    Chunks(int64_t rows, int64_t in) : rows(rows), tiles((rows + SIDE - 1) / SIDE) {
        const int64_t threads = omp_get_max_threads();
        const int64_t most = larger(1, CHUNK_BYTES / (in * SIDE * int64_t(sizeof(bf16))));
        count = (tiles + most - 1) / most;
        if (count < threads && rows >= threads * LEAST_CHUNK) count = threads;
    }
    int64_t sums() const { return (tiles + count - 1) / count * SIDE * PANEL * SIDE; }
    Chunk at(int64_t number) const {
        const Range of = share(tiles, number, count);
        return {of.begin, of.end - of.begin, rows};
    }
};

// Runs action(number, last of its part, memory) for each of `count` blocks, with tiles and memory of `bytes`.
template <class Action>
static void on_tiles(int64_t count, int64_t rows, int64_t bytes, Action action) {
    const TileConfig config(rows);
    Blocks blocks(count);
    Guard guard;
#pragma omp parallel
    guard.run([&] {
        static thread_local Scratch scratch;
        auto* memory = (float*)scratch.at_least(bytes);
        _tile_loadconfig(&config);
        blocks.each(1, [&](int64_t number, int64_t, int64_t last) { action(number, last, memory); });
        _tile_release();
    });
    guard.pass_on();
}

void packed_tiles(const Layer& layer, const Rows& x, int64_t rows) {
    const int64_t panels = panels_of(layer), threads = omp_get_max_threads();
    const Chunks chunks(rows, layer.in);
    int64_t parts = 1;
    while (parts < PANEL && chunks.count * panels * parts < 4 * threads) parts *= 2;
    const int64_t bytes = chunks.sums() * sizeof(float);
    on_tiles(chunks.count * panels * parts, rows, bytes, [&](int64_t number, int64_t last, float* memory) {
        Part part = panel_of(layer, number / parts % panels);
        const Range vectors = share(part.count, number % parts, parts);
        part.at += vectors.begin * 2 * LANES, part.first += vectors.begin * LANES;
        part.count = vectors.end - vectors.begin;
        const char* next = parts == 1 && number + 1 < last ? (const char*)panel_of(layer, (number + 1) % panels).at : nullptr;
        some(part, layer.in, x, chunks.at(number / (panels * parts)), next, memory);
    });
}

int gated_linear(const Layer* layer, int activation, const void* x, int64_t stride, void* out, int64_t rows) {
    const int64_t width = layer->out / 2, panels = width / (PANEL * LANES);
    if (!layer->packed || rows < TILES_FROM || layer->out % (2 * PANEL * LANES)) return 0;
    const Rows of{(const bf16*)x, stride, out, width, (const bf16*)layer->bias, ROUNDED};
    const Chunks chunks(rows, layer->in);
    const int64_t sums = chunks.sums(), bytes = sums * (sizeof(float) + sizeof(bf16));
    on_tiles(chunks.count * panels, rows, bytes, [&](int64_t number, int64_t last, float* memory) {
        const Chunk chunk = chunks.at(number / panels);
        const Part gate = panel_of(*layer, number % panels), up = panel_of(*layer, panels + number % panels);
        const char* next = number + 1 < last ? (const char*)panel_of(*layer, (number + 1) % panels).at : nullptr;
        auto* gates = (bf16*)(memory + sums);  // [row of the chunk][64]
        const int64_t first = chunk.new_from(0);
        const Rows to_gates{of.x, stride, gates, PANEL * SIDE, of.bias ? of.bias + gate.first : nullptr, ROUNDED};
        using Sums = TileSums<PANEL>;
        multiply<PANEL>(gate, layer->in, of, chunk, (const char*)up.at, memory, [&](const Sums& found, int64_t tile) {
            each_sum(found, chunk, tile, [&](__m512 sum, int64_t row, int v) { to_gates.put(sum, row - first, v * SIDE); });
        });
        multiply<PANEL>(up, layer->in, of, chunk, next, memory, [&](const Sums& found, int64_t tile) {
            each_sum(found, chunk, tile, [&](__m512 sum, int64_t row, int v) {
                if (of.bias) sum = _mm512_add_ps(sum, widen16(of.bias + up.first + v * SIDE));
                const Vec opening{widen16(gates + ((row - first) * PANEL + v) * SIDE)};
                const Vec rounded{widen16((__m256i)_mm512_cvtneps_pbh(sum))};
                const Vec product = activation == SILU ? silu_gated(opening, rounded) : gelu_gated(opening, rounded);
                product.store((bf16*)out + row * width + gate.first + v * SIDE);
            });
        });
    });
    return 1;
}

#else

int gated_linear(const Layer*, int, const void*, int64_t, void*, int64_t) { return 0; }

#endif

}  // namespace ISA
