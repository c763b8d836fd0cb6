// What each instruction set offers. One that finds no memory for what it works in throws std::bad_alloc, which those that
// call it from outside hear as NO_MEMORY (table.cpp); what it was to write is then undefined. Strides and widths are in elements; `dtype` is a Dtype of vectors.h.
#pragma once
#include "vectors.h"

namespace ISA {

// attention.cpp
// `table` is a Spans of spans.h. K and V rows [rows, kv_dim] into their slots of cache, [2 * pairs, block_size, kv_dim].
void write(int dtype, void* cache, int64_t kv_dim, const void* table, const void* k, int64_t k_stride, const void* v,
           int64_t v_stride);
// Causal attention of query [rows, heads, head_dim], each over the last `window` tokens of its span; out is contiguous,
// and scale is positive. One caller at a time in each thread: the memory that it works in is the thread's.
void attend(int dtype, const void* query, int64_t row_stride, int64_t head_stride, int64_t heads, int64_t head_dim,
            const void* cache, int64_t kv_dim, const void* table, float scale, int64_t window, void* out);

// elementwise.cpp; what each means stands in reference.py. `out` is contiguous, rows of the others lie so far apart.
// With `more`, not null, x += more comes first, and `heads` is 1. Weight and bias of layer_norm may be null.
void rms_norm(int dtype, void* x, const void* more, const void* weight, void* out, int64_t rows, int64_t heads,
              int64_t width, int64_t x_row, int64_t x_head, int64_t more_row, float eps);
void layer_norm(int dtype, void* x, const void* more, const void* weight, const void* bias, void* out, int64_t rows,
                int64_t width, int64_t x_row, int64_t more_row, float eps);
// In place; cos and sin are [rows, half].
void rotate(int dtype, void* x, const float* cos, const float* sin, int64_t rows, int64_t heads, int64_t half,
            int64_t x_row, int64_t x_head);
// out[rows, width] of gate_up[rows, 2 * width].
void silu_mul(int dtype, const void* gate_up, void* out, int64_t rows, int64_t width, int64_t row_stride);

// linear.cpp
struct Layer {
    const void* weight;  // [out, in], or as packed.cpp has it
    const void* bias;    // [out], or null
    int64_t in, out;
    int32_t dtype;
    int32_t packed;  // whether the weight is
};
// What becomes of the products: rounded to what x is, added to what is in `out` and then rounded, or left as fp32.
enum Into { ROUNDED = 0, ADDED = 1, WIDE = 2 };
// out[rows, out] = x[rows, in] W^T + bias, rows of x `stride` apart.
void linear(const Layer* layer, const void* x, int64_t stride, void* out, int64_t rows, int into);

// packed.cpp
// Brings the weight of a layer into the order that packed_linear wants, or back, in place. 1 if it did so, and 0 where
// this instruction set has no such kernel for that layer.
int pack(const Layer* layer, int back);
void packed_linear(const Layer* layer, const void* x, int64_t stride, void* out, int64_t rows, int into);

// decoder.cpp; native_decoder.py fills these.
struct Norm {
    const void *weight, *bias;
    float eps;
    int32_t centred;  // LayerNorm; else RMSNorm
};
struct DecoderLayer {
    Norm attention_norm, mlp_norm;
    const Layer *qkv, *out, *up, *down;
    const void *query_norm, *k_norm;  // of each head, or null
    int64_t heads, kv_heads, head_dim;
    int64_t half;    // as many pairs of a head's numbers turn; 0 for none
    int64_t window;  // tokens that a query sees
    float scale;
    int32_t gated;  // up is gate and up, their product silu(gate) * up; else it is relu(up)
    int32_t dtype;
};
struct Step {
    void* x;  // [rows, hidden]: goes in, and comes out of the last layer
    int64_t rows;
    const float *cos, *sin;  // [rows, half]
    void* cache;
    int64_t cache_layer;  // bytes from a layer's cache to the next
    const void* spans;    // of spans.h
};
void decoder(const DecoderLayer* layers, int64_t count, const Step* step);

// logits.cpp
// out[rows]: the likeliest of `width` numbers of each row, of equal ones the first; -1 where there is a NaN, or the
// largest is infinite.
void likeliest(const float* logits, int64_t stride, int64_t rows, int64_t width, int64_t* out);

// measuring.cpp
void limit_scratch(int64_t bytes);  // of each thread and kernel; for tests
void evict(const void* memory, int64_t bytes);
int64_t read_all(const void* memory, int64_t bytes);

// copies.cpp
// Where vectors lie in the cache and in the rows of a page; all but the counts are in bytes. native_kernels.py fills it.
struct BlockRows {
    int64_t layers, tokens;
    int64_t slots, v_after;  // slots of a layer; from a token's K slot to its V slot
    int64_t vector;          // a slot
    int64_t cache_layer;     // from a layer to the next
    int64_t row_layer, row_half, row_token;  // in the rows: from a layer, from its K to its V, from a token to the next
};
// rows[layer][K, V][token] = the slot's vector, or the other way. 1 where a slot is not in the cache: then nothing is done.
int gather(const BlockRows* of, const int64_t* slots, const char* cache, char* rows);
int scatter(const BlockRows* of, const int64_t* slots, char* cache, const char* rows);

// quantise.cpp
// Of rows[group][token][channel], with these strides: q packed, least and step [groups][channels]. 1 where a number is not
// finite: then nothing of the results may be used.
int quantise(int dtype, const void* rows, int64_t group_stride, int64_t row_stride, uint8_t* q, float* least,
             float* step, int64_t groups, int64_t tokens, int64_t channels);
// The way back, to out[group][token][channel] of `dtype` with these strides.
void dequantise(int dtype, void* out, int64_t group_stride, int64_t row_stride, const uint8_t* q, const float* least,
                const float* step, int64_t groups, int64_t tokens, int64_t channels);

}  // namespace ISA
