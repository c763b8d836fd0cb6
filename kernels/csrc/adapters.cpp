// What adapters add to a linear layer, out += B (A x): each adapter to its own rows of a step.
//
//   x [rows, in] --gather--> rows of a slice, side by side --dot with A--> sums [rows, ranks] --B, panel by panel--> out
//
// One parallel region does all three, for all adapters of the step: their products are small, and a region for each would
// take longer than they do.
#include <type_traits>
#include <vector>

#include "blocks.h"
#include "dot.h"
#include "kernels.h"
#include "scratch.h"

namespace ISA {

static thread_local Scratch scratch;

constexpr int64_t PANEL = 64;       // outputs of a panel of B; adapters.py has the same number
constexpr int64_t MOST_PAIRS = 128; // of ranks of a part; engine/adapters/lora.py has the same number of ranks
constexpr int64_t MOST_ROWS = 256;  // rows that are gathered at a time: they stay in the second cache

// Registers: sums of B_ROWS rows of x by B_VECTORS vectors of outputs.
#if defined(__AVX2__) && !defined(__AVX512F__)
constexpr int B_ROWS = 4, B_VECTORS = 2;
#else
constexpr int B_ROWS = 4, B_VECTORS = 4;
#endif

// Some rows of one adapter.
struct Slice {
    const LayerAdapter* layer;
    const int32_t* rows;
    int64_t count;
    int64_t first;  // the place of its first row among those that are gathered
    float* sums;    // [count, ranks]

    bool are_side_by_side() const { return rows[count - 1] - rows[0] == count - 1; }  // rows are in order
};

// Arithmetic on the weights of B, two ranks at a time: of bf16, a pair of ranks of one output lies side by side.
template <class T>
struct Pair {
    struct Weights {
        Vec first, second;
    };
    struct Sums {
        float first, second;
    };
    static Weights load(const T* b, bool two) { return {Vec::load(b), two ? Vec::load(b + PANEL) : Vec::zero()}; }
    static Sums sums(const float* of, bool two) { return {of[0], two ? of[1] : 0.0f}; }
    static void step(Vec& made, Weights w, Sums s) {
        made = fma(w.second, Vec::all(s.second), fma(w.first, Vec::all(s.first), made));
    }
};

template <>
struct Pair<bf16> {
#if defined(__AVX512BF16__)
    using Weights = __m512bh;
    using Sums = int32_t;  // two numbers of bf16
    static Weights load(const bf16* b, bool) { return (__m512bh)_mm512_loadu_si512(b); }
    static Sums sums(const float* of, bool two) {
        bf16 both[2] = {};
        narrow(of[0], both[0]);
        if (two) narrow(of[1], both[1]);
        Sums made;
        std::memcpy(&made, both, 4);
        return made;
    }
    static void step(Vec& made, Weights w, Sums s) { made.v = _mm512_dpbf16_ps(made.v, w, (__m512bh)_mm512_set1_epi32(s)); }
#else
    struct Weights {
        Vec first, second;
    };
    using Sums = Pair<float>::Sums;
    static Weights load(const bf16* b, bool) {  // the upper of two bf16 is a float once the lower is masked away
#if defined(__AVX512F__)
        __m512i both = _mm512_loadu_si512(b), upper = _mm512_set1_epi32(int(0xFFFF0000));
        return {{_mm512_castsi512_ps(_mm512_slli_epi32(both, 16))}, {_mm512_castsi512_ps(_mm512_and_si512(both, upper))}};
#elif defined(__AVX2__)
        __m256i both = _mm256_loadu_si256((const __m256i*)b), upper = _mm256_set1_epi32(int(0xFFFF0000));
        return {{_mm256_castsi256_ps(_mm256_slli_epi32(both, 16))}, {_mm256_castsi256_ps(_mm256_and_si256(both, upper))}};
#else
        float first[Vec::width], second[Vec::width];
        for (int i = 0; i < Vec::width; ++i) first[i] = widen(b[2 * i]), second[i] = widen(b[2 * i + 1]);
        return {Vec::load(first), Vec::load(second)};
#endif
    }
    static Sums sums(const float* of, bool two) { return Pair<float>::sums(of, two); }
    static void step(Vec& made, Weights w, Sums s) {
        made = fma(w.second, Vec::all(s.second), fma(w.first, Vec::all(s.first), made));
    }
#endif
};

// The place of two ranks of outputs from `at` on in a panel.
template <class T>
static const T* pair_at(const T* b, int64_t rank, int64_t at) {
    return b + rank * PANEL + (std::is_same_v<T, bf16> ? 2 * at : at);
}

// Adds the products of N rows of sums with B_VECTORS vectors of B; `left` of their outputs are in the layer.
template <class T, int N>
static void add_vectors(const T* b, int64_t at, int64_t ranks, const typename Pair<T>::Sums* sums, T* const* out,
                        int64_t left) {
    Vec made[N][B_VECTORS];
    for (int n = 0; n < N; ++n)
        for (int v = 0; v < B_VECTORS; ++v) made[n][v] = Vec::zero();
    for (int64_t rank = 0; rank < ranks; rank += 2, sums += N) {
        typename Pair<T>::Weights weights[B_VECTORS];
        for (int v = 0; v < B_VECTORS; ++v)
            weights[v] = Pair<T>::load(pair_at(b, rank, at + v * Vec::width), rank + 1 < ranks);
        for (int n = 0; n < N; ++n)
            for (int v = 0; v < B_VECTORS; ++v) Pair<T>::step(made[n][v], weights[v], sums[n]);
    }
    for (int n = 0; n < N; ++n)
        for (int v = 0; v < B_VECTORS; ++v) {
            T* to = out[n] + v * Vec::width;
            int64_t there = left - v * Vec::width;
            if (there >= Vec::width) {
                (Vec::load(to) + made[n][v]).store(to);
                continue;
            }
            float lanes[Vec::width];
            made[n][v].store(lanes);
            for (int64_t lane = 0; lane < there; ++lane) narrow(widen(to[lane]) + lanes[lane], to[lane]);
        }
}

// Adds the products of `count` rows with panels of B: in groups of N rows, then the rest.
template <class T, int N = B_ROWS>
static void add_panels(const AdapterPart& part, Range panels, const float* sums, int64_t apart, const int32_t* rows,
                       int64_t count, T* out, int64_t out_row) {
    int64_t ranks = part.ranks + (std::is_same_v<T, bf16> ? part.ranks % 2 : 0);  // in memory
    for (; count >= N; count -= N, rows += N, sums += N * apart) {
        typename Pair<T>::Sums pairs[N * MOST_PAIRS];
        for (int64_t rank = 0; rank < part.ranks; rank += 2)
            for (int n = 0; n < N; ++n)
                pairs[rank / 2 * N + n] = Pair<T>::sums(sums + n * apart + rank, rank + 1 < part.ranks);
        for (int64_t panel = panels.begin; panel < panels.end; ++panel) {
            const T* b = (const T*)part.b + panel * ranks * PANEL;
            int64_t left = part.outs - panel * PANEL;
            for (int64_t at = 0; at < PANEL && at < left; at += B_VECTORS * Vec::width) {
                T* to[N];
                for (int n = 0; n < N; ++n) to[n] = out + rows[n] * out_row + panel * PANEL + at;
                add_vectors<T, N>(b, at, part.ranks, pairs, to, left - at);
            }
        }
    }
    if constexpr (N > 1)
        if (count) add_panels<T, N - 1>(part, panels, sums, apart, rows, count, out, out_row);
}

static int64_t panels_of(const AdapterPart& part) { return (part.outs + PANEL - 1) / PANEL; }

static int64_t panels_of(const LayerAdapter& layer) {
    int64_t panels = 0;
    for (int64_t i = 0; i < layer.parts; ++i) panels += panels_of(layer.part[i]);
    return panels;
}

// Returns whether the products read the rows of a slice where they lie.
template <class T>
static bool read_in_place(const Slice& slice, int64_t in) {
    return std::is_same_v<T, typename Dot<T>::X> && in % Dot<T>::chunk == 0 && slice.are_side_by_side();
}

// Sums a block of ranks for all rows of a slice.
template <class T>
static void shrink(const Slice& slice, int64_t block, int64_t in, Rows<typename Dot<T>::X> own) {
    int64_t ranks = slice.layer->ranks, at = block * RO, ahead = at + 2 * RO <= ranks ? RO * in : 0;
    const T* a = (const T*)slice.layer->a;
    Result<T> result{nullptr, slice.sums, ranks, WIDE};
    if (at + RO <= ranks)
        dot_rows<T, RO>(a + at * in, in, ahead, own, result, 0, slice.count, at);
    else
        for (; at < ranks; ++at) dot_rows<T, 1>(a + at * in, in, 0, own, result, 0, slice.count, at);
}

// Adds panels of a slice's outputs, counted over all parts of the layer.
template <class T>
static void grow(const Slice& slice, Range panels, T* out, int64_t out_row) {
    for (int64_t i = 0; i < slice.layer->parts && panels.begin < panels.end; ++i) {
        const AdapterPart& part = slice.layer->part[i];
        int64_t count = panels_of(part), end = panels.end < count ? panels.end : count;
        if (panels.begin < end)
            add_panels<T>(part, {panels.begin, end}, slice.sums + part.first_rank, slice.layer->ranks, slice.rows,
                          slice.count, out + part.first_out, out_row);
        panels = {panels.begin < count ? 0 : panels.begin - count, panels.end - count};
    }
}

// Calls action(slice, range of its items) for the items from `at` to `end` of all slices; each has `items(slice)`.
template <class Items, class Action>
static void each_slice(const std::vector<Slice>& slices, int64_t at, int64_t end, Items items, Action action) {
    int64_t first = 0;
    for (const Slice& slice : slices) {
        int64_t last = first + items(slice), until = end < last ? end : last;
        if (at < until) action(slice, Range{at - first, until - first}), at = until;
        first = last;
    }
}

template <class T>
static void add_slices(std::vector<Slice>& slices, int64_t in, const T* x, int64_t x_row, T* out, int64_t out_row) {
    using X = typename Dot<T>::X;
    constexpr int chunk = Dot<T>::chunk;
    int64_t padded = (in + chunk - 1) / chunk * chunk, rows = 0, numbers = 0, blocks = 0, panels = 0;
    auto ranks_of = [](const Slice& slice) { return (slice.layer->ranks + RO - 1) / RO; };
    for (const Slice& slice : slices) {
        rows += slice.count, numbers += slice.count * slice.layer->ranks;
        blocks += ranks_of(slice), panels += panels_of(*slice.layer);
    }
    int64_t gathered = (rows * padded * int64_t(sizeof(X)) + 63) / 64 * 64;
    char* memory = (char*)scratch.at_least(gathered + numbers * sizeof(float));
    X* packed = (X*)memory;
    float* sums = (float*)(memory + gathered);
    for (Slice& slice : slices) slice.sums = sums, sums += slice.count * slice.layer->ranks;
    Blocks of_a(blocks), of_b(panels);
#pragma omp parallel
    {
        Range own = share(rows);
        auto rows_of = [](const Slice& slice) { return slice.count; };
        each_slice(slices, own.begin, own.end, rows_of, [&](const Slice& slice, Range some) {
            for (int64_t row = some.begin; row < some.end && !read_in_place<T>(slice, in); ++row)
                pack_row<T>(x + slice.rows[row] * x_row, in, packed + (slice.first + row) * padded);
        });
#pragma omp barrier
        of_a.each(2, [&](int64_t at, int64_t end, int64_t) {
            each_slice(slices, at, end, ranks_of, [&](const Slice& slice, Range some) {
                Rows<X> own{packed + slice.first * padded, padded};
                if (read_in_place<T>(slice, in)) own = {(const X*)(x + slice.rows[0] * x_row), x_row};
                for (int64_t block = some.begin; block < some.end; ++block) shrink<T>(slice, block, in, own);
            });
        });
#pragma omp barrier
        of_b.each(8, [&](int64_t at, int64_t end, int64_t) {
            each_slice(slices, at, end, [](const Slice& slice) { return panels_of(*slice.layer); },
                       [&](const Slice& slice, Range some) { grow<T>(slice, some, out, out_row); });
        });
    }
    slices.clear();
}

void adapt(int dtype, const Adapters* adapters, int64_t layer, int64_t in, const void* x, int64_t x_row, void* out,
           int64_t out_row) {
    static thread_local std::vector<Slice> slices;
    slices.clear();
    by_dtype(dtype, [&](auto* of) {
        using T = std::remove_pointer_t<decltype(of)>;
        int64_t gathered = 0;
        for (int64_t i = 0; i < adapters->count; ++i) {
            const AdapterGroup& group = adapters->groups[i];
            const LayerAdapter& own = group.layers[layer];
            if (!own.ranks) continue;
            for (int64_t at = 0; at < group.count;) {
                int64_t room = MOST_ROWS - gathered, left = group.count - at, count = left < room ? left : room;
                slices.push_back({&own, group.rows + at, count, gathered, nullptr});
                at += count, gathered += count;
                if (gathered == MOST_ROWS) {
                    add_slices<T>(slices, in, (const T*)x, x_row, (T*)out, out_row);
                    gathered = 0;
                }
            }
        }
        if (gathered) add_slices<T>(slices, in, (const T*)x, x_row, (T*)out, out_row);
    });
}

}  // namespace ISA
