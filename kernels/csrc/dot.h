// Dot products of rows of weights with rows of x, both contiguous along their inputs: several of each are in registers.
#pragma once
#include "results.h"

namespace ISA {

// Arithmetic on `chunk` weights at once. X is what rows of x are made of: padded with zeros to whole chunks.
template <class T>
struct Dot {
    using X = float;
    static constexpr int chunk = Vec::width;
    static constexpr bool swapped = false;
    struct Weights {
        Vec v;
    };
    using Inputs = Weights;
    static Weights load(const T* w) { return {Vec::load(w)}; }
    static Inputs inputs(const float* x) { return {Vec::load(x)}; }
    static void step(Vec& sum, Weights w, Inputs x) { sum = fma(w.v, x.v, sum); }
};

#if defined(__AVX512BF16__)
template <>
struct Dot<bf16> {
    using X = bf16;
    static constexpr int chunk = 32;
    static constexpr bool swapped = false;
    using Weights = __m512bh;
    using Inputs = __m512bh;
    static Weights load(const bf16* w) { return (__m512bh)_mm512_loadu_si512(w); }
    static Inputs inputs(const bf16* x) { return load(x); }
    static void step(Vec& sum, Weights w, Inputs x) { sum.v = _mm512_dpbf16_ps(sum.v, w, x); }
};
#elif defined(__AVX2__)
// Two bf16 in 32 bits: the upper is a float once the lower is masked away, the lower once it is shifted up. So rows of x
// hold, chunk by chunk, first the numbers at even places and then the numbers at odd places.
template <>
struct Dot<bf16> {
    using X = float;
    static constexpr int chunk = 2 * Vec::width;
    static constexpr bool swapped = true;
    struct Weights {
        Vec even, odd;
    };
    using Inputs = Weights;
    static Weights load(const bf16* w) {
#if defined(__AVX512F__)
        __m512i both = _mm512_loadu_si512(w);
        return {{_mm512_castsi512_ps(_mm512_slli_epi32(both, 16))},
                {_mm512_castsi512_ps(_mm512_and_si512(both, _mm512_set1_epi32(int(0xFFFF0000))))}};
#else
        __m256i both = _mm256_loadu_si256((const __m256i*)w);
        return {{_mm256_castsi256_ps(_mm256_slli_epi32(both, 16))},
                {_mm256_castsi256_ps(_mm256_and_si256(both, _mm256_set1_epi32(int(0xFFFF0000))))}};
#endif
    }
    static Inputs inputs(const float* x) { return {Vec::load(x), Vec::load(x + Vec::width)}; }
    static void step(Vec& sum, const Weights& w, const Inputs& x) {
        sum = fma(w.even, x.even, sum);
        sum = fma(w.odd, x.odd, sum);
    }
};
#endif

// Registers: accumulators, the weights of a step, and one row of x.
#if defined(__AVX512F__)
constexpr int RO = 4, RN = 6;
#else
constexpr int RO = 2, RN = 4;
#endif

// Copies rows of x into the form that Dot<T> reads.
template <class X>
struct Rows {
    const X* x;
    int64_t stride;
};

template <class T>
static void pack_chunk(const T* x, typename Dot<T>::X* to) {
    constexpr int chunk = Dot<T>::chunk, half = chunk / 2;
    for (int i = 0; i < chunk; ++i) {
        const T& from = x[Dot<T>::swapped ? (i < half ? 2 * i : 2 * (i - half) + 1) : i];
        if constexpr (std::is_same_v<T, typename Dot<T>::X>)
            to[i] = from;
        else
            to[i] = widen(from);
    }
}

template <class T>
static void pack_row(const T* x, int64_t in, typename Dot<T>::X* to) {
    constexpr int chunk = Dot<T>::chunk;
    int64_t i = 0;
    for (; i + chunk <= in; i += chunk) pack_chunk<T>(x + i, to + i);
    if (i < in) {
        T rest[chunk] = {};
        std::memcpy(rest, x + i, (in - i) * sizeof(T));
        pack_chunk<T>(rest, to + i);
    }
}

// Multiplies O weight rows from w on with N rows of x.
template <class T, int O, int N>
static void dot_block(const T* w, int64_t in, int64_t ahead, Rows<typename Dot<T>::X> rows, const Result<T>& result,
                      int64_t row, int64_t at) {
    using D = Dot<T>;
    Vec sums[N][O];
    for (int n = 0; n < N; ++n)
        for (int o = 0; o < O; ++o) sums[n][o] = Vec::zero();
    const typename D::X* x = rows.x + row * rows.stride;
    int64_t i = 0;
    for (; i + D::chunk <= in; i += D::chunk) {
        typename D::Weights weights[O];
        for (int o = 0; o < O; ++o) {
            weights[o] = D::load(w + o * in + i);
            if (ahead) __builtin_prefetch(w + o * in + i + ahead, 0, 2);
        }
#pragma GCC unroll 8
        for (int n = 0; n < N; ++n) {
            typename D::Inputs inputs = D::inputs(x + n * rows.stride + i);
            for (int o = 0; o < O; ++o) D::step(sums[n][o], weights[o], inputs);
        }
    }
    if (i < in) {
        T rest[O][D::chunk] = {};
        for (int o = 0; o < O; ++o) std::memcpy(rest[o], w + o * in + i, (in - i) * sizeof(T));
        for (int n = 0; n < N; ++n)
            for (int o = 0; o < O; ++o) D::step(sums[n][o], D::load(rest[o]), D::inputs(x + n * rows.stride + i));
    }
    for (int n = 0; n < N; ++n) result.put(sums[n], row + n, at);
}

// Multiplies with any number of rows of x: in groups of RN, then the rest. The first group prefetches the next weights.
template <class T, int O, int N = RN>
static void dot_rows(const T* w, int64_t in, int64_t ahead, Rows<typename Dot<T>::X> rows, const Result<T>& result,
                     int64_t row, int64_t count, int64_t at) {
    for (; count >= N; count -= N, row += N, ahead = 0) dot_block<T, O, N>(w, in, ahead, rows, result, row, at);
    if constexpr (N > 1)
        if (count) dot_rows<T, O, N - 1>(w, in, ahead, rows, result, row, count, at);
}

}  // namespace ISA
