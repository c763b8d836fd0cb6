// The kernels of each instruction set. A kernel that finds no memory to work in throws std::bad_alloc; callers from
// outside get NO_MEMORY instead (table.cpp), and its results are then undefined. Strides and widths are in
// elements; `dtype` is a Dtype of vectors.h.
#pragma once
#include "scoring.h"
#include "vectors.h"

namespace ISA {

// attention.cpp
// `table` is a Spans of spans.h. K and V rows [rows, kv_heads * head_dim] into their slots of the cache, which keeps them
// in their dtype, [2 * blocks, block_size, kv_heads * head_dim], or in INT8 as int8_kv.h has it.
void write(int dtype, int kept, void* cache, int64_t kv_heads, int64_t head_dim, const void* table, const void* k,
           int64_t k_stride, const void* v, int64_t v_stride);
// Causal attention of query [rows, heads, head_dim]; out is contiguous. A thread makes one call at a time: the kernel
// works in memory of the thread.
void attend(int dtype, const void* query, int64_t row_stride, int64_t head_stride, int64_t heads, int64_t head_dim,
            int kept, const void* cache, int64_t kv_heads, const void* table, const Scoring* scoring, void* out);
// The same to compressed vectors of `size` numbers, an even number; the first `rank` are V; out is
// [rows, heads, rank]. Half of a vector lies in the place of K, half in that of V.
void attend_latent(int dtype, const void* query, int64_t row_stride, int64_t head_stride, int64_t heads, int64_t size,
                   int64_t rank, const void* cache, const void* table, float scale, void* out);
// Attention of whole texts in both directions, to K and V of the step itself: text i is rows [bounds[i], bounds[i + 1]), and
// a token sees those nearer than `window`. All are [rows, heads, head_dim]; out is contiguous.
void attend_texts(int dtype, const void* query, int64_t query_row, int64_t query_head, const void* k, int64_t k_row,
                  int64_t k_head, const void* v, int64_t v_row, int64_t v_head, int64_t heads, int64_t head_dim,
                  const int32_t* bounds, int64_t count, int64_t window, float scale, void* out);

// elementwise.cpp; reference.py defines each. `out` is contiguous; the strides are of the other rows.
// With `more`, not null, x += more comes first, and `heads` is 1. Weight and bias of layer_norm may be null.
// A `wide` weight of rms_norm is in fp32, and the product with it is rounded once.
void rms_norm(int dtype, void* x, const void* more, const void* weight, int wide, void* out, int64_t rows, int64_t heads,
              int64_t width, int64_t x_row, int64_t x_head, int64_t more_row, float eps);
void layer_norm(int dtype, void* x, const void* more, const void* weight, const void* bias, void* out, int64_t rows,
                int64_t width, int64_t x_row, int64_t more_row, float eps);
// Turns the rows in place; cos and sin are [rows, half].
void rotate(int dtype, void* x, const float* cos, const float* sin, int64_t rows, int64_t heads, int64_t half,
            int64_t x_row, int64_t x_head);
// out[rows, width] of gate_up[rows, 2 * width].
void silu_mul(int dtype, const void* gate_up, void* out, int64_t rows, int64_t width, int64_t row_stride);
void gelu_mul(int dtype, const void* gate_up, void* out, int64_t rows, int64_t width, int64_t row_stride);
// Turns numbers, side by side, to their gelu in place.
void gelu(int dtype, void* x, int64_t count);

// quantised.cpp
// A weight whose numbers are scale * (q - zero), with q of 8 or 4 bits, and scale and zero of groups of inputs. Outputs are
// in panels of 64, the last filled up with zeros; quantised.py packs them. Inputs are filled up to whole groups.
struct Quantised {
    const void *scale, *zero;  // [panels][groups][64] of `dtype`; without zero it is 2^(bits - 1)
    const int32_t* order;      // the input of x that each column of q multiplies, or null for their order
    int64_t group, groups;     // inputs of a group, a multiple of 8; their number
    int32_t bits, dtype;
};

// stored.cpp
enum Stored : int { Q4_K = 12, Q5_K = 13, Q6_K = 14 };  // as GGUF numbers them
// Unpacks blocks of 256 numbers to q, a byte each, and to the scale and, but for Q6_K, the zero of each group.
void unpack(int kind, const uint8_t* rows, int64_t blocks, uint8_t* q, float* scale, float* zero);
// out[panel][column][64] of rows[count][width]: the last panel is filled up with zeros. With `halves` two words, of numbers
// below 16 a byte each, become one, with the second in the upper halves of its bytes.
void panels(const uint32_t* rows, int64_t count, int64_t width, int halves, uint32_t* out);

// linear.cpp
struct Layer {
    const void* weight;  // [out, in], or as packed.cpp or quantised.cpp has it
    const void* bias;    // [out], or null
    int64_t in, out;
    int32_t dtype;
    int32_t packed;  // whether the weight is packed
    const Quantised* quantised;  // or null; then `dtype` is that of x
    int64_t number;              // of the layer among those that adapters may change
};
// Where the products go: rounded to the dtype of x, added to what is in `out` and then rounded, or left as fp32.
enum Into { ROUNDED = 0, ADDED = 1, WIDE = 2 };
// out[rows, out] = x[rows, in] W^T + bias, rows of x `stride` apart.
void linear(const Layer* layer, const void* x, int64_t stride, void* out, int64_t rows, int into);
void quantised_linear(const Layer* layer, const void* x, int64_t stride, void* out, int64_t rows, int into);

// packed.cpp
enum Activation { RELU, SILU, GELU };  // silu and gelu are of a gate: up is gate and up then
// The products of a layer whose outputs are gate and up, side by side, gated: out[rows, out / 2]. Returns 0, with nothing done,
// where this instruction set has no such kernel for that layer, and 1 otherwise.
int gated_linear(const Layer* layer, int activation, const void* x, int64_t stride, void* out, int64_t rows);
// Brings the weight of a layer into the order of packed_linear, or back, in place. Returns 1 if it did so, and 0 where
// this instruction set has no such kernel for that layer.
int pack(const Layer* layer, int back);
void packed_linear(const Layer* layer, const void* x, int64_t stride, void* out, int64_t rows, int into);

// adapters.cpp; adapters.py fills these.
struct AdapterPart {
    int64_t first_rank, ranks;  // its rows of A
    int64_t first_out, outs;    // the outputs that it adds to
    const void* b;  // [panels][ranks][64]: outputs in panels of 64, filled up with zeros; bf16 [panels][ranks / 2][64][2]
};
// What an adapter has for one layer: a [ranks, in]. Without ranks it leaves the layer as it is.
struct LayerAdapter {
    const void* a;
    int64_t ranks, parts;
    AdapterPart part[3];
};
struct AdapterGroup {
    const LayerAdapter* layers;  // of one adapter, by the layers' numbers
    const int32_t* rows;         // the rows of the step that it changes, in order
    int64_t count;
};
struct Adapters {
    const AdapterGroup* groups;
    int64_t count;
};
// Adds to out[rows, ..] what the adapters add to the layer of this number, from x[rows, in]; both have their rows `row` apart.
void adapt(int dtype, const Adapters* adapters, int64_t layer, int64_t in, const void* x, int64_t x_row, void* out,
           int64_t out_row);

// decoder.cpp; native_decoder.py fills these.
struct Norm {
    const void *weight, *bias;
    float eps;
    int32_t centred;  // 1 for LayerNorm, 0 for RMSNorm
    int32_t wide;     // whether the weight of an RMSNorm is in fp32
};
struct DecoderLayer {
    Norm attention_norm, mlp_norm;
    Norm after_attention, after_mlp;  // norms of what the two add to x; without a weight there is none
    Norm query_norm, k_norm;          // norms of each head; likewise
    const Layer *qkv, *out, *up, *down;
    int64_t heads, kv_heads, head_dim;
    int64_t half;    // the number of pairs of a head's numbers that turn; 0 for none
    int64_t angles;  // which of the step's cosines and sines turn them
    Scoring scoring;
    int32_t activation;
    int32_t dtype;
};
struct Step {
    void* x;  // [rows, hidden]: the input of the first layer and the output of the last
    int64_t rows;
    const float *cos[2], *sin[2];  // [rows, half] each
    void* cache;
    int64_t cache_layer;  // bytes from a layer's cache to the next layer's
    const void* spans;    // a Spans of spans.h
    int64_t kept;         // the Dtype of K and V in the cache
    const Adapters* adapters;  // or null
    const int32_t* read;  // the rows of the output that are read, in order; other rows are left undefined
    int64_t count_read;   // their number, or -1 for all
};
// Runs the layers from `from` on, up to the one after which `*pause` is not 0. Returns the number of layers that have run
// by then. Such a step goes on with another call, between other steps.
int decoder(const DecoderLayer* layers, int64_t from, int64_t count, const Step* step, const int32_t* pause);

// logits.cpp
// out[rows]: the column of the largest of `width` numbers of each row, the first of equal numbers; -1 where there is a NaN
// or the largest is infinite.
void likeliest(const float* logits, int64_t stride, int64_t rows, int64_t width, int64_t* out);

// packed.cpp: helpers of measurements
void limit_ahead(int64_t bytes);    // limits what is prefetched at once beside linear layers; for tests
void limit_scratch(int64_t bytes);  // limits the memory of each thread and kernel; for tests
void evict(const void* memory, int64_t bytes);

// copies.cpp
// The places of vectors in the cache and in the rows of a page, in bytes but for the counts. native_kernels.py fills it.
struct BlockRows {
    int64_t layers, tokens;
    int64_t slots, v_after;  // the slots of a layer; the distance from a token's K slot to its V slot
    int64_t vector;          // the size of a slot
    int64_t cache_layer;     // the distance from a layer to the next
    int64_t row_layer, row_half, row_token;  // in the rows: from layer to layer, from K to V, from token to token
};
// Copies the slots' vectors to rows[layer][K, V][token], or back. Returns 1, with nothing done, where a slot is not in the
// cache. Where `crc` is not null, it becomes the CRC-32 of the rows' vectors in their order.
int gather(const BlockRows* of, const int64_t* slots, const char* cache, char* rows, uint32_t* crc);
int scatter(const BlockRows* of, const int64_t* slots, char* cache, const char* rows, uint32_t* crc);

// crc.cpp
// The CRC-32, as zlib has it, of rows of `bytes` bytes, one after the other; they are `stride` bytes apart.
void crc32(const char* from, int64_t rows, int64_t stride, int64_t bytes, uint32_t* crc);

// quantise.cpp
// Quantises rows[group][token][channel], with these strides, to packed q and to least and step [groups][channels].
// Returns 1 where a number is not finite: the results must then not be used.
int quantise(int dtype, const void* rows, int64_t group_stride, int64_t row_stride, uint8_t* q, float* least,
             float* step, int64_t groups, int64_t tokens, int64_t channels);
// Dequantises to out[group][token][channel] of `dtype` with these strides.
void dequantise(int dtype, void* out, int64_t group_stride, int64_t row_stride, const uint8_t* q, const float* least,
                const float* step, int64_t groups, int64_t tokens, int64_t channels);

}  // namespace ISA
