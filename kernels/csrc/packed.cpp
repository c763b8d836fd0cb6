// A linear layer whose weight lies as the multiplication wants it (panels.h), for CPUs that multiply pairs of bf16. Where
// they have tiles too, from some rows on, packed_tiles.cpp multiplies the same panels.
//
// A number of the result has a lane of its own, so nothing is added up across lanes. x is used as it lies: a pair of a row
// is one number of 32 bits, told to all lanes.
//
// Six rows of x and a panel are 24 sums, all that registers hold. More rows are as few groups of equal size as can be.
// Where few panels are left for each thread, threads take halves or quarters of panels. While a thread goes over a panel
// for each group, it prefetches the next panel into the second cache, a part of it with each group.
#include "beside.h"
#include "kernels.h"
#include "panels.h"
#include "scratch.h"

namespace ISA {

#if defined(__AVX512BF16__)

constexpr int64_t SUMS = 24;  // sums in registers

static void transpose(const uint32_t* from, uint32_t* to, int64_t rows, int64_t columns) {
    constexpr int64_t SIDE = 16;
    for (int64_t row = 0; row < rows; row += SIDE)
        for (int64_t column = 0; column < columns; ++column)
            for (int64_t i = row; i < row + SIDE && i < rows; ++i) to[column * rows + i] = from[i * columns + column];
}

int pack(const Layer* layer, int back) {
    if (layer->dtype != BF16 || layer->in % 2 || layer->out % LANES) return 0;
    int64_t pairs = layer->in / 2, panel_bytes = PANEL * LANES * layer->in * sizeof(bf16);
    Scratch copies;
    char* all = (char*)copies.at_least(panel_bytes * omp_get_max_threads());
#pragma omp parallel for
    for (int64_t number = 0; number < panels_of(*layer); ++number) {
        Part panel = panel_of(*layer, number);
        auto* copy = (uint32_t*)(all + panel_bytes * omp_get_thread_num());
        int64_t outputs = panel.count * LANES;
        std::memcpy(copy, panel.at, outputs * pairs * sizeof(uint32_t));
        if (back)
            transpose(copy, (uint32_t*)panel.at, pairs, outputs);
        else
            transpose(copy, (uint32_t*)panel.at, outputs, pairs);
    }
    return 1;
}

// Multiplies V vectors of weights with N rows of x.
template <int V, int N>
static void block(const Part& part, int64_t in, Ahead& ahead, const Rows& rows, int64_t row) {
    __m512 sums[N][V];
    for (int n = 0; n < N; ++n)
        for (int v = 0; v < V; ++v) sums[n][v] = _mm512_setzero_ps();
    const bf16 *w = part.at, *x = rows.x + row * rows.stride;
    for (int64_t pair = 0; pair < in / 2; ++pair, w += part.apart * 2 * LANES) {
        __m512bh weights[V];
        for (int v = 0; v < V; ++v) weights[v] = (__m512bh)_mm512_loadu_si512(w + v * 2 * LANES);
        ahead.ask();
#pragma GCC unroll 24
        for (int n = 0; n < N; ++n) {
            int32_t both;
            std::memcpy(&both, x + n * rows.stride + 2 * pair, sizeof both);
            __m512bh inputs = (__m512bh)_mm512_set1_epi32(both);
            for (int v = 0; v < V; ++v) sums[n][v] = _mm512_dpbf16_ps(sums[n][v], weights[v], inputs);
        }
    }
    for (int n = 0; n < N; ++n)
        for (int v = 0; v < V; ++v) rows.put(sums[n][v], row + n, part.first + v * LANES);
}

template <int V, int N>
static void group(const Part& part, int64_t in, Ahead& ahead, const Rows& rows, int64_t row, int64_t count) {
    if (count == N) return block<V, N>(part, in, ahead, rows, row);
    if constexpr (N > 1) group<V, N - 1>(part, in, ahead, rows, row, count);
}

// What a thread does beside its products: it prefetches the next panel, if that is not null, then what else runs there.
struct Meanwhile {
    const char* next;
    Beside* other;
    int64_t thread;
};

// Multiplies all rows with V vectors of a panel.
template <int V>
static void all_rows(const Part& part, int64_t in, Meanwhile meanwhile, const Rows& rows, int64_t count) {
    constexpr int64_t MOST = V == 1 ? 12 : SUMS / V;
    int64_t groups = (count + MOST - 1) / MOST;
    // A single pass over a panel reads it as fast as possible: a prefetch of the next panel would only slow it. On CPUs with
    // tiles, Xeons, memory comes faster where what lies some lines further is asked for meanwhile.
    const char* from = groups > 1 ? meanwhile.next : ALONE_ASKS && part.apart == V ? (const char*)part.at + FAR : nullptr;
    int64_t bytes = from ? V * LANES * in * int64_t(sizeof(bf16)) : 0;
    Stretches* more = meanwhile.other ? meanwhile.other->ahead(meanwhile.thread) : nullptr;
    Ahead ahead{from, from + bytes, (V + groups - 1) / groups, more};
    for (int64_t i = 0; i < groups; ++i) {
        Range of = share(count, i, groups);
        group<V, MOST>(part, in, ahead, rows, of.begin, of.end - of.begin);
        if (more && ahead.at >= ahead.end && more->next == more->last) meanwhile.other->go_on(meanwhile.thread);
    }
}

// Calls the kernel for 4 vectors at once, then 2 or 1.
static void some(Part part, int64_t in, Meanwhile meanwhile, const Rows& rows, int64_t count) {
    auto go = [&](auto vectors) {
        constexpr int V = decltype(vectors)::value;
        for (; part.count >= V; part.at += V * 2 * LANES, part.first += V * LANES, part.count -= V)
            all_rows<V>(part, in, meanwhile, rows, count);
    };
    go(std::integral_constant<int, PANEL>());
    go(std::integral_constant<int, PANEL / 2>());
    go(std::integral_constant<int, 1>());
}

void packed_linear(const Layer* layer, const void* x, int64_t stride, void* out, int64_t rows, int into) {
    if (!rows) return;
    Rows of{(const bf16*)x, stride, out, layer->out, (const bf16*)layer->bias, into};
#if defined(__AMX_BF16__)
    if (rows >= TILES_FROM) return packed_tiles(*layer, of, rows);
#endif
    int64_t panels = panels_of(*layer), threads = omp_get_max_threads(), parts = 1;
    while (parts < PANEL && panels * parts < 4 * threads) parts *= 2;
    Blocks blocks(panels * parts);
    Beside* other = beside;
#pragma omp parallel
    blocks.each(1, [&](int64_t number, int64_t, int64_t last) {
        Part part = panel_of(*layer, number / parts);
        Range vectors = share(part.count, number % parts, parts);
        part.at += vectors.begin * 2 * LANES, part.first += vectors.begin * LANES;
        part.count = vectors.end - vectors.begin;
        const char* next = parts == 1 && number + 1 < last ? (const char*)panel_of(*layer, number + 1).at : nullptr;
        some(part, layer->in, {next, other, omp_get_thread_num()}, of, rows);
    });
}

#else

int pack(const Layer*, int) { return 0; }
void packed_linear(const Layer*, const void*, int64_t, void*, int64_t, int) {}  // no layer is packed

#endif

// --- Helpers of measurements that Python cannot do

// Drops memory from every cache, so that the next read comes from memory.
void evict(const void* memory, int64_t bytes) {
#if defined(__x86_64__)
    for (int64_t i = 0; i < bytes; i += 64) __builtin_ia32_clflush((const char*)memory + i);
    __builtin_ia32_mfence();
#endif
}

void limit_scratch(int64_t bytes) { most_scratch = bytes; }

void limit_ahead(int64_t bytes) { most_ahead = bytes; }

}  // namespace ISA
