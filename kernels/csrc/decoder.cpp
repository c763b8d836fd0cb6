// The layers of a model whose norms come before each block, in one call. It does no more than the other
// kernels: with few tokens in a step, Python takes longer between two kernels than some kernels take.
#include <utility>

#include "attention.h"
#include "kernels.h"

namespace ISA {

// Parts of one piece of memory, each on its own cache lines.
struct Parts {
    char* at;
    size_t size;
    void* of(int64_t numbers) { return std::exchange(at, at + bytes(numbers)); }
    size_t bytes(int64_t numbers) const { return (numbers * size + 63) / 64 * 64; }
};

static void normed(const Norm& norm, int dtype, void* x, void* out, int64_t rows, int64_t width) {
    if (norm.centred)
        layer_norm(dtype, x, nullptr, norm.weight, norm.bias, out, rows, width, width, 0, norm.eps);
    else
        rms_norm(dtype, x, nullptr, norm.weight, norm.wide, out, rows, 1, width, width, 0, 0, norm.eps);
}

// A NaN stays a NaN.
static void relu(int dtype, void* x, int64_t count) {
    by_dtype(dtype, [&](auto* of) {
        auto* numbers = (decltype(of))x;
        int64_t i = 0;
        for (; i + Vec::width <= count; i += Vec::width) max(Vec::zero(), Vec::load(numbers + i)).store(numbers + i);
        for (; i < count; ++i)
            if (widen(numbers[i]) < 0) narrow(0, numbers[i]);
    });
}

// Adds `more` to x.
static void added(int dtype, void* x, const void* more, int64_t count) {
    by_dtype(dtype, [&](auto* of) {
        auto *to = (decltype(of))x;
        auto *from = (decltype(of))more;
        int64_t i = 0;
        for (; i + Vec::width <= count; i += Vec::width) (Vec::load(to + i) + Vec::load(from + i)).store(to + i);
        for (; i < count; ++i) narrow(widen(to[i]) + widen(from[i]), to[i]);
    });
}

// A linear layer, and what adapters add to it. Its output is contiguous.
static void adapted(const Layer* layer, const Step& step, const void* x, void* out, int into) {
    linear(layer, x, layer->in, out, step.rows, into);
    if (step.adapters) adapt(layer->dtype, step.adapters, layer->number, layer->in, x, layer->in, out, layer->out);
}

// Adds the output of a linear layer to the step's x, or its norm where there is one; `room` has place for the output.
static void add(const Layer* layer, const Norm& norm, const Step& step, const void* from, void* room) {
    if (!norm.weight) return adapted(layer, step, from, step.x, ADDED);
    adapted(layer, step, from, room, ROUNDED);
    normed(norm, layer->dtype, room, room, step.rows, layer->out);
    added(layer->dtype, step.x, room, step.rows * layer->out);
}

// The places of query and key from which the next kernels read them; V lies beside them in `qkv`.
struct Turned {
    const char *query, *k;
    int64_t query_row, k_row;
};

static void head_normed(const Norm& norm, const DecoderLayer& layer, void* x, void* out, int64_t rows, int64_t heads,
                        int64_t row) {
    int64_t width = layer.head_dim;
    rms_norm(layer.dtype, x, nullptr, norm.weight, norm.wide, out, rows, heads, width, row, width, 0, norm.eps);
}

static Turned turn(const DecoderLayer& layer, char* qkv, void* room, const Step& step, int64_t size) {
    int64_t heads = layer.heads, kv_heads = layer.kv_heads, width = layer.head_dim;
    int64_t query_dim = heads * width, kv_dim = kv_heads * width, row = query_dim + 2 * kv_dim;
    const float *cos = step.cos[layer.angles], *sin = step.sin[layer.angles];
    if (!layer.query_norm.weight) {
        if (layer.half) rotate(layer.dtype, qkv, cos, sin, step.rows, heads + kv_heads, layer.half, row, width);
        return {qkv, qkv + query_dim * size, row, row};
    }
    char *query = (char*)room, *k = query + step.rows * query_dim * size;
    head_normed(layer.query_norm, layer, qkv, query, step.rows, heads, row);
    head_normed(layer.k_norm, layer, qkv + query_dim * size, k, step.rows, kv_heads, row);
    if (layer.half) {
        rotate(layer.dtype, query, cos, sin, step.rows, heads, layer.half, query_dim, width);
        rotate(layer.dtype, k, cos, sin, step.rows, kv_heads, layer.half, kv_dim, width);
    }
    return {query, k, query_dim, kv_dim};
}

static void run_layer(const DecoderLayer& layer, const Step& step, char* cache, Parts parts) {
    int64_t rows = step.rows, hidden = layer.qkv->in, width = layer.head_dim, size = parts.size;
    int64_t query_dim = layer.heads * width, kv_dim = layer.kv_heads * width, qkv_dim = query_dim + 2 * kv_dim;
    void* norms = parts.of(rows * hidden);
    char* qkv = (char*)parts.of(rows * qkv_dim);
    void* room = parts.of(rows * (query_dim + kv_dim));
    void* attended = parts.of(rows * query_dim);
    void* up = parts.of(rows * layer.up->out);
    void* product = layer.activation == RELU ? up : parts.of(rows * layer.down->in);

    normed(layer.attention_norm, layer.dtype, step.x, norms, rows, hidden);
    adapted(layer.qkv, step, norms, qkv, ROUNDED);
    Turned turned = turn(layer, qkv, room, step, size);
    write(layer.dtype, int(step.kept), cache, layer.kv_heads, width, step.spans, turned.k, turned.k_row, qkv + (query_dim + kv_dim) * size, qkv_dim);
    attend(layer.dtype, turned.query, turned.query_row, width, layer.heads, width, int(step.kept), cache,
           layer.kv_heads, step.spans, &layer.scoring, attended);
    add(layer.out, layer.after_attention, step, attended, norms);

    normed(layer.mlp_norm, layer.dtype, step.x, norms, rows, hidden);
    adapted(layer.up, step, norms, up, ROUNDED);
    if (layer.activation == SILU)
        silu_mul(layer.dtype, up, product, rows, layer.down->in, layer.up->out);
    else if (layer.activation == GELU)
        gelu_mul(layer.dtype, up, product, rows, layer.down->in, layer.up->out);
    else
        relu(layer.dtype, up, rows * layer.up->out);
    add(layer.down, layer.after_mlp, step, product, norms);
}

void decoder(const DecoderLayer* layers, int64_t count, const Step* step) {
    static thread_local Scratch scratch;
    for (int64_t i = 0; i < count; ++i) {
        const DecoderLayer& layer = layers[i];
        size_t size = layer.dtype == F32 ? 4 : 2;
        int64_t query_dim = layer.heads * layer.head_dim, kv_dim = layer.kv_heads * layer.head_dim;
        int64_t numbers = layer.qkv->in + layer.qkv->out + 2 * query_dim + kv_dim + layer.up->out + layer.down->in;
        Parts parts{(char*)scratch.at_least(step->rows * numbers * size + 6 * 64), size};
        run_layer(layer, *step, (char*)step->cache + i * step->cache_layer, parts);
    }
}

}  // namespace ISA
