// AMX's tiles in plain C++, by which a CPU without them can test the code that uses them: a library that is built with
//
//     CXX="g++ -DEMULATED_TILES -include tests/kernels/emulated_tiles.h"
//
// says that this CPU has AMX, and is slow. A step whose tiles do not fit together ends the process, as on a CPU.
#pragma once
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#if defined(__AMX_TILE__)
#include <cstdint>
#include <cstring>

namespace ISA {
namespace emulated {

struct Tiles {
    uint16_t bytes[16];
    uint8_t rows[16];
    uint8_t at[8][16][64];

    template <class T>
    T number(int tile, int row, int place) const {
        T of;
        std::memcpy(&of, at[tile][row] + place * sizeof(T), sizeof of);
        return of;
    }
    template <class T>
    void set(int tile, int row, int place, T of) {
        std::memcpy(at[tile][row] + place * sizeof(T), &of, sizeof of);
    }
};
static thread_local Tiles tiles;

static inline void configure(const void* of) {
    std::memset(&tiles, 0, sizeof tiles);
    std::memcpy(tiles.bytes, (const char*)of + 16, sizeof tiles.bytes);
    std::memcpy(tiles.rows, (const char*)of + 48, sizeof tiles.rows);
}

static inline void zero(int tile) { std::memset(tiles.at[tile], 0, sizeof tiles.at[tile]); }

static inline void load(int tile, const void* from, int64_t apart) {
    zero(tile);
    for (int row = 0; row < tiles.rows[tile]; ++row)
        std::memcpy(tiles.at[tile][row], (const char*)from + row * apart, tiles.bytes[tile]);
}

static inline void store(int tile, void* to, int64_t apart) {
    for (int row = 0; row < tiles.rows[tile]; ++row)
        std::memcpy((char*)to + row * apart, tiles.at[tile][row], tiles.bytes[tile]);
}

// Adds to each number of `sum` the products of a row of `left`, of numbers A, with the column below it in `right`: a row
// of `right` has 4 bytes of each column.
template <class S, class A, class B, class Wide>
static inline void multiply(int sum, int left, int right, Wide wide) {
    constexpr int each = 4 / sizeof(A);
    int columns = tiles.bytes[right] / 4, depth = tiles.bytes[left] / int(sizeof(A));
    bool fit = depth == each * tiles.rows[right] && tiles.rows[sum] == tiles.rows[left] && tiles.bytes[sum] == 4 * columns;
    if (!fit) __builtin_trap();
    for (int row = 0; row < tiles.rows[left]; ++row)
        for (int column = 0; column < columns; ++column) {
            S total = tiles.number<S>(sum, row, column);
            for (int i = 0; i < depth; ++i) {
                B below = tiles.number<B>(right, i / each, column * each + i % each);
                total += S(wide(tiles.number<A>(left, row, i))) * S(wide(below));
            }
            tiles.set(sum, row, column, total);
        }
}

static inline void dpbf16(int sum, int left, int right) {
    multiply<float, uint16_t, uint16_t>(sum, left, right, [](uint16_t x) {
        uint32_t bits = uint32_t(x) << 16;
        float of;
        std::memcpy(&of, &bits, sizeof of);
        return of;
    });
}

}  // namespace emulated
}  // namespace ISA

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#define _tile_loadconfig(of) emulated::configure(of)
#define _tile_release() (void)0
#define _tile_zero(tile) emulated::zero(tile)
#define _tile_loadd(tile, from, apart) emulated::load(tile, from, apart)
#define _tile_stored(tile, to, apart) emulated::store(tile, to, apart)
#define _tile_dpbf16ps(sum, left, right) emulated::dpbf16(sum, left, right)
#endif
