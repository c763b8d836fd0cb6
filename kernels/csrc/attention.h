// Types that the files of attention share: the task, its pieces, and the result of a piece.
//
// A unit is a set of queries that go over the same tokens together: all heads of a span with few queries
// (row_attention.cpp), or some queries of a span with many, of one kv head (tile_attention.cpp). Queries of different spans
// may go over a beginning that these have in common. A piece is a unit over a
// range of its tokens. The result of a piece is kept unnormalised, so that pieces of one unit can be put together:
//
//     max    the largest score of a row
//     sum    of exp(score - max) over the piece's tokens
//     out    of exp(score - max) * V
//
// The rows of a unit are ordered by kv head, query, and query head of that kv head.
#pragma once
#include "beginnings.h"
#include "int8_kv.h"
#include "scoring.h"
#include "scratch.h"
#include "spans.h"
#include "vectors.h"

namespace ISA {

struct Vectors {  // of a step's rows, by head; the distances are in elements
    const void* first = nullptr;
    int64_t row = 0, head = 0;

    template <class T>
    const T* at(int64_t of_row, int64_t of_head) const {
        return (const T*)first + of_row * row + of_head * head;
    }
};

struct Queries {  // of a step, and where their K and V lie, as attend() of kernels.h has them
    int dtype;
    const void* query;
    int64_t row_stride, head_stride, heads, head_dim;
    int kept;
    const void* cache;
    int64_t kv_heads;
    const Spans* spans;
    const Scoring* scoring;
    void* out;
};

struct Attention {  // the attention of one layer in one step
    int dtype, kept;  // of queries and results; of K and V: the same, or INT8
    const void* query;  // [rows, heads, head_dim], strides in elements
    int64_t row_stride, head_stride;
    const void* cache;
    int64_t vector;  // the numbers of a slot, with the scales of int8
    const Spans& spans;
    void* out;
    int64_t heads, head_dim, kv_heads, group;  // group: the number of query heads of a kv head
    const Scoring& scoring;
    const Beginnings& beginnings;
    // How many numbers V has in a compressed vector, which lies half in the place of K and half in that of V, and of
    // which head_dim counts all; 0 where K and V are kept. Then units are tiled, of one kv head.
    int64_t latent_rank = 0;
    // Where whole texts are attended in both directions, their K and V; else these are in the cache.
    Vectors keys, values;

    bool both_ways() const { return keys.first != nullptr; }
    int64_t value_dim() const { return latent_rank ? latent_rank : head_dim; }
};

struct Unit {
    int64_t span, first_row, position;  // the row of its first query in the step, and that query's token in the request
    int64_t queries, first_kv_head, kv_heads;
    int64_t first_token, end_token;  // the tokens that any of its queries sees
    bool tiled;
    const Member* members;  // the span of each query, where they are of different spans

    int64_t rows(const Attention& a) const { return kv_heads * queries * a.group; }
    int64_t row(const Attention& a, int64_t query) const {
        return members ? a.spans.rows[members[query].span] : first_row + query;
    }
};

struct Partial {
    float *out, *max, *sum;
};

// Returns the numbers of a slot.
inline int64_t kv_vector(int kept, int64_t kv_heads, int64_t head_dim) {
    return kept == INT8 ? int8_vector(kv_heads, head_dim) : kv_heads * head_dim;
}

constexpr float NOTHING_SEEN = -1e30f;  // the max of a row that has seen no token: finite, so that nothing becomes NaN
constexpr int64_t ROW_GRAIN = 16, TILE_GRAIN = 64;  // tokens that are gone over at once

// Returns how many floats a piece needs for its Partial.
inline int64_t partial_floats(int64_t rows, int64_t value_dim) { return (rows * (value_dim + 2) + 15) / 16 * 16; }
inline Partial partial_at(float* memory, int64_t rows, int64_t value_dim) {
    return {memory, memory + rows * value_dim, memory + rows * (value_dim + 1)};
}

inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }
inline int64_t round_up(int64_t a, int64_t step) { return (a + step - 1) / step * step; }

// Returns the first token that a query at this position sees, of its stretch.
inline int64_t first_seen(const Attention& a, int64_t position) { return larger(0, position - a.scoring.window + 1); }
// Returns the last token that it sees, of its text's first `end`.
inline int64_t last_seen(const Attention& a, int64_t position, int64_t end) {
    return a.both_ways() ? smaller(end, position + a.scoring.window) - 1 : position;
}

// Returns from how many rows that share a kv head's K and V on tiles are faster.
int64_t least_rows_for_tiles(int dtype);
// Returns the cost of a token for `rows` rows of a kv head, per number of a vector, in units of about 1/30 ns.
int64_t row_cost(int64_t rows);
int64_t tile_cost(int dtype, int64_t rows);

// A unit over a range of its tokens.
struct Piece {
    Unit unit;
    int64_t from, to;
    bool begins() const { return from == unit.first_token; }
    bool is_whole() const { return begins() && to == unit.end_token; }
};

// Some tokens of a piece, whole grains but for the last. What a piece keeps from slice to slice is in `scratch`. While the
// last grain is gone over, the first of the thread's next piece is prefetched.
struct Slice {
    int64_t from, to;
    bool begins, ends;
    const Piece* next = nullptr;
};
void attend_rows(const Attention& a, const Unit& unit, Slice slice, Scratch& scratch, Partial out);
void attend_tiles(const Attention& a, const Unit& unit, int64_t from, int64_t to, Partial out);

void attend(const Queries& queries);

}  // namespace ISA
