// The places of the tokens of a step's requests: kernels/common/spans.py as C++ sees it.
#pragma once
#include <cstdint>

namespace ISA {

struct Spans {  // in the layout that Spans.table of spans.py writes
    int64_t count, block_size;
    const int32_t *rows, *tokens, *starts, *blocks;

    int64_t queries(int64_t span) const { return rows[span + 1] - rows[span]; }
};

// The K slots of one span's tokens; the V of a token lies block_size slots after its K. A block that is filled from its
// right end stands as ~block.
struct Places {
    const int32_t* blocks;
    int64_t block_size;

    Places(const Spans& spans, int64_t span)
        : blocks(spans.blocks + spans.starts[span]), block_size(spans.block_size) {}

    // Returns the least of the K slots of tokens from `first` on, which lie side by side: those of its block, and at most
    // `count`, which becomes their number.
    int64_t side_by_side(int64_t first, int64_t& count) const {
        int64_t block = blocks[first / block_size], offset = first % block_size;
        if (count > block_size - offset) count = block_size - offset;
        if (block < 0) block = ~block, offset = block_size - offset - count;
        return 2 * block * block_size + offset;
    }

    // Writes the K slots of `count` tokens from `first` on.
    void slots(int64_t first, int64_t count, int64_t* out) const {
        int64_t place = first / block_size, offset = first % block_size;
        for (int64_t i = 0; i < count; ++i) {
            int64_t block = blocks[place];
            out[i] = block < 0 ? (2 * ~block + 1) * block_size - 1 - offset : 2 * block * block_size + offset;
            if (++offset == block_size) offset = 0, ++place;
        }
    }
};

}  // namespace ISA
