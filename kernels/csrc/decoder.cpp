// The layers of a model whose norms come before each block, in one call of the other kernels: with few tokens in a step,
// Python takes longer between two kernels than some kernels take. A step of long decodes and prompts runs in two halves.
#include <optional>
#include <utility>
#include <vector>

#include "attention.h"
#include "decodes.h"
#include "int8_kv.h"
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

struct Number {  // a type of this namespace, as in beginnings.h
    int32_t is;
};

// A layer of some rows: what comes before its attention, the attention, and what comes after it.
struct Run {
    const DecoderLayer& layer;
    Step step;
    const bool is_last;
    char* cache;
    size_t size;
    int64_t query_dim, kv_dim, qkv_dim;
    void *norms, *room, *attended, *up, *product;
    char* qkv;
    Turned turned;
    Spans spans;  // of the rows that are read
    std::vector<Number> rows, tokens, starts;

    Run(const DecoderLayer& layer, int64_t number, bool is_last, const Step& step, Scratch& scratch)
        : layer(layer), step(step), is_last(is_last && step.count_read >= 0),
          cache((char*)step.cache + number * step.cache_layer), size(number_size(layer.dtype)),
          query_dim(layer.heads * layer.head_dim), kv_dim(layer.kv_heads * layer.head_dim),
          qkv_dim(query_dim + 2 * kv_dim) {
        int64_t rows = step.rows;
        int64_t numbers = layer.qkv->in + qkv_dim + 2 * query_dim + kv_dim + layer.up->out + layer.down->in;
        Parts parts{(char*)scratch.at_least(rows * numbers * size + 6 * 64), size};
        norms = parts.of(rows * layer.qkv->in);
        qkv = (char*)parts.of(rows * qkv_dim);
        room = parts.of(rows * (query_dim + kv_dim));
        attended = parts.of(rows * query_dim);
        up = parts.of(rows * layer.up->out);
        product = layer.activation == RELU ? up : parts.of(rows * layer.down->in);
    }

    void before() {
        normed(layer.attention_norm, layer.dtype, step.x, norms, step.rows, layer.qkv->in);
        adapted(layer.qkv, step, norms, qkv, ROUNDED);
        turned = turn(layer, qkv, room, step, size);
        write(layer.dtype, int(step.kept), cache, layer.kv_heads, layer.head_dim, step.spans, turned.k, turned.k_row,
              qkv + (query_dim + kv_dim) * size, qkv_dim);
        if (is_last) leave_out();
    }

    // Leaves out rows whose output nobody reads: after the last layer's K and V nothing needs them.
    void leave_out() {
        const Spans& all = *(const Spans*)step.spans;
        for (int64_t i = 0, span = 0; i < step.count_read; ++i) {
            const int64_t row = step.read[i];
            if (i && row == step.read[i - 1] + 1 && row < all.rows[span + 1]) {
                ++rows.back().is, ++tokens.back().is;
            } else {
                while (all.rows[span + 1] <= row) ++span;
                rows.push_back({int32_t(i + 1)});
                tokens.push_back({int32_t(all.tokens[span] - (all.rows[span + 1] - row) + 1)});
                starts.push_back({all.starts[span]});
            }
            move(step.x, layer.qkv->in, row, i);
            move((void*)turned.query, turned.query_row, row, i);
        }
        rows.insert(rows.begin(), {0});
        spans = {int64_t(tokens.size()), all.block_size, &rows[0].is, &tokens.data()->is, &starts.data()->is, all.blocks};
        step.rows = step.count_read, step.spans = &spans;
    }

    void move(void* all, int64_t width, int64_t from, int64_t to) const {
        if (from != to) std::memcpy((char*)all + to * width * size, (char*)all + from * width * size, width * size);
    }

    Queries queries() const {
        return {layer.dtype,    turned.query,    turned.query_row, layer.head_dim, layer.heads,
                layer.head_dim, int(step.kept), cache, layer.kv_heads, (const Spans*)step.spans,
                &layer.scoring, attended};
    }

    // Computes the first half of the MLP in one kernel; returns whether there is one.
    bool in_one() {
        return layer.activation != RELU && !step.adapters &&
               gated_linear(layer.up, layer.activation, norms, layer.up->in, product, step.rows);
    }

    void inner() {
        int64_t rows = step.rows;
        adapted(layer.up, step, norms, up, ROUNDED);
        if (layer.activation == SILU)
            silu_mul(layer.dtype, up, product, rows, layer.down->in, layer.up->out);
        else if (layer.activation == GELU)
            gelu_mul(layer.dtype, up, product, rows, layer.down->in, layer.up->out);
        else
            relu(layer.dtype, up, rows * layer.up->out);
    }

    void after() {
        int64_t rows = step.rows;
        if (!rows) return;
        add(layer.out, layer.after_attention, step, attended, norms);
        normed(layer.mlp_norm, layer.dtype, step.x, norms, rows, layer.qkv->in);
        if (!in_one()) inner();
        add(layer.down, layer.after_mlp, step, product, norms);
        for (int64_t i = is_last ? step.rows : 0; i-- > 0;) move(step.x, layer.qkv->in, i, step.read[i]);
    }
};

// --- A step in two

// Decodes wait for memory, prompts for arithmetic. So where a step has both, its last rows, of prompts, are half a layer
// behind: their products run beside the attention of the decodes. What that costs is that weights are read twice.
struct Half {
    std::vector<Number> rows, tokens, read;
    Spans spans;
    Step step;
};

// A first half with fewer rows would wait for its weights.
constexpr int64_t FIRST_ROWS = 36, LATER_ROWS = 32;

// Returns the row at which a step is cut, or 0 where the decodes read less than the weights that are read twice.
static int64_t cut_at(const DecoderLayer& layer, const Step& step) {
    const Spans& spans = *(const Spans*)step.spans;
    int64_t decodes = 0, tokens = 0, weights = 0;
    if (!RUN_BESIDE) return 0;
    if (layer.heads / layer.kv_heads >= least_rows_for_tiles(layer.dtype)) return 0;  // tiles run beside nothing
    for (const Layer* each : {layer.qkv, layer.out, layer.up, layer.down}) {
        if (!each->packed || step.adapters) return 0;  // no other kernel lets attention run beside it
        weights += each->in * each->out * sizeof(bf16);
    }
    for (; decodes < spans.count && spans.queries(decodes) == 1; ++decodes)
        tokens += smaller(spans.tokens[decodes], layer.scoring.window);
    int64_t at = larger(decodes, FIRST_ROWS), kv = 2 * tokens * kv_vector(int(step.kept), layer.kv_heads, layer.head_dim);
    return step.rows - at >= LATER_ROWS && kv * number_size(int(step.kept)) > weights ? at : 0;
}

// Cuts a step at a row: a span there goes on in the second half.
static void cut(const Step& step, const DecoderLayer& layer, int64_t at, Half& first, Half& later) {
    const Spans& all = *(const Spans*)step.spans;
    int64_t before = 0;  // spans that end before the cut
    for (Half* half : {&first, &later}) half->rows.assign(1, {0}), half->tokens.clear();
    for (int64_t span = 0; span < all.count; ++span) {
        int64_t end = all.rows[span + 1], behind = larger(0, end - larger(at, all.rows[span]));
        if (all.rows[span] < at) {
            first.rows.push_back({int32_t(end - behind)});
            first.tokens.push_back({int32_t(all.tokens[span] - behind)});
        }
        if (end <= at) {
            ++before;
        } else {
            later.rows.push_back({int32_t(end - at)});
            later.tokens.push_back({all.tokens[span]});
        }
    }
    for (Half* half : {&first, &later}) {
        int64_t row = half == &first ? 0 : at, skipped = half == &first ? 0 : before;
        half->spans = {int64_t(half->tokens.size()), all.block_size,        &half->rows[0].is,
                       &half->tokens[0].is,          all.starts + skipped, all.blocks};
        Step& part = half->step = step;
        part.x = (char*)step.x + row * layer.qkv->in * number_size(layer.dtype);
        part.rows = half->rows.back().is, part.spans = &half->spans;
        half->read.clear();
        for (int64_t i = 0; i < step.count_read; ++i)
            if ((step.read[i] < at) == (half == &first)) half->read.push_back({int32_t(step.read[i] - row)});
        part.read = &half->read.data()->is, part.count_read = step.count_read < 0 ? -1 : int64_t(half->read.size());
        for (int i : {0, 1})
            if (step.cos[i]) part.cos[i] += row * layer.half, part.sin[i] += row * layer.half;
    }
}

// Lets attention run beside the linear layers that this thread calls.
struct RunsBeside {
    RunsBeside(Beside& other) { beside = &other; }
    ~RunsBeside() { beside = nullptr; }
};

// Returns whether the step pauses after this layer. Another thread says so.
static bool pauses(const int32_t* pause, int64_t layer, int64_t count) {
    return layer + 1 < count && __atomic_load_n(pause, __ATOMIC_RELAXED);
}

static int64_t decoder_in_two(const DecoderLayer* layers, int64_t from, int64_t count, const Half& first,
                              const Half& later, Scratch& of_later, const int32_t* pause) {
    static thread_local Scratch of_first;
    static thread_local Decodes decodes;
    std::optional<Run> behind;  // the later rows: they have still to run what comes after attention
    for (int64_t i = from; i < count; ++i) {
        Run run(layers[i], i, i + 1 == count, first.step, of_first);
        run.before();
        decodes.begin(run.queries());
        {
            RunsBeside now(decodes);
            if (behind) behind->after();
            behind.emplace(layers[i], i, i + 1 == count, later.step, of_later);
            behind->before();
        }
        attend(behind->queries());
        decodes.end();
        run.after();
        if (pauses(pause, i, count)) count = i + 1;
    }
    behind->after();
    return count;
}

int decoder(const DecoderLayer* layers, int64_t from, int64_t count, const Step* step, const int32_t* pause) {
    static thread_local Scratch scratch;
    static thread_local Half first, later;
    if (int64_t at = cut_at(layers[0], *step)) {
        cut(*step, layers[0], at, first, later);
        return int(decoder_in_two(layers, from, count, first, later, scratch, pause));
    }
    for (int64_t i = from; i < count; ++i) {
        Run run(layers[i], i, i + 1 == count, *step, scratch);
        run.before();
        attend(run.queries());
        run.after();
        if (pauses(pause, i, count)) count = i + 1;
    }
    return int(count);
}

}  // namespace ISA
