// Kernels that treat each token of a step by itself.
#include "kernels.h"

namespace ISA {

constexpr int W = Vec::width;
constexpr int64_t WORTH_THREADS = 32768;  // numbers; with fewer, waking the other threads takes longer

// Rounds a value as if it had been written to memory as T.
template <class T>
static Vec rounded_to(Vec v) {
    if constexpr (std::is_same_v<T, float>) return v;
#if defined(__AVX512BF16__)
    if constexpr (std::is_same_v<T, bf16>) {
        __m512i wide = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(v.v));
        return {_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16))};
    }
#endif
    T narrowed[W];
    v.store(narrowed);
    return Vec::load(narrowed);
}

// Calls action(i, load, store) for each vector of a row, where load(p) is p[i .. i + W), and so is store(v, p). What is
// left at the end of a row goes through a full vector too, with zeros beyond.
template <class T, class Action>
static void by_vector(int64_t width, Action action) {
    int64_t i = 0;
    for (; i + W <= width; i += W)
        action([i](const auto* p) { return Vec::load(p + i); }, [i](Vec v, auto* p) { v.store(p + i); });
    if (i == width) return;
    int64_t left = width - i;
    action(
        [i, left](const auto* p) {
            std::remove_cv_t<std::remove_pointer_t<decltype(p)>> padded[W] = {};
            std::memcpy((void*)padded, p + i, left * sizeof(*p));
            return Vec::load(padded);
        },
        [i, left](Vec v, auto* p) {
            std::remove_pointer_t<decltype(p)> padded[W];
            v.store(padded);
            std::memcpy((void*)(p + i), padded, left * sizeof(*p));
        });
}

// Adds `more` to x, where it is not null; returns the sum over f(x).
template <class T, class F>
static float add_and_sum(T* x, const T* more, int64_t width, F f) {
    Vec sum = Vec::zero();
    by_vector<T>(width, [&](auto load, auto store) {
        Vec a = load(x);
        if (more) {
            a = rounded_to<T>(a + load(more));
            store(a, x);
        }
        sum = sum + f(a);
    });
    return sum.sum();
}

void rms_norm(int dtype, void* x, const void* more, const void* weight, int wide, void* out, int64_t rows, int64_t heads,
              int64_t width, int64_t x_row, int64_t x_head, int64_t more_row, float eps) {
    by_dtype(dtype, [&](auto* of) {
        using T = std::remove_pointer_t<decltype(of)>;
        const T* w = (const T*)weight;
        const float* fine = (const float*)weight;
#pragma omp parallel for collapse(2) if (rows * heads * width > WORTH_THREADS)
        for (int64_t row = 0; row < rows; ++row)
            for (int64_t head = 0; head < heads; ++head) {
                T* from = (T*)x + row * x_row + head * x_head;
                T* to = (T*)out + (row * heads + head) * width;
                const T* add = more ? (const T*)more + row * more_row : nullptr;
                float squares = add_and_sum(from, add, width, [](Vec a) { return a * a; });
                Vec factor = Vec::all(1.0f / std::sqrt(squares / float(width) + eps));
                by_vector<T>(width, [&](auto load, auto store) {
                    Vec normed = load(from) * factor;
                    store(wide ? normed * load(fine) : rounded_to<T>(normed) * load(w), to);
                });
            }
    });
}

void layer_norm(int dtype, void* x, const void* more, const void* weight, const void* bias, void* out, int64_t rows,
                int64_t width, int64_t x_row, int64_t more_row, float eps) {
    by_dtype(dtype, [&](auto* of) {
        using T = std::remove_pointer_t<decltype(of)>;
        const T *w = (const T*)weight, *b = (const T*)bias;
#pragma omp parallel for if (rows * width > WORTH_THREADS)
        for (int64_t row = 0; row < rows; ++row) {
            T *from = (T*)x + row * x_row, *to = (T*)out + row * width;
            const T* add = more ? (const T*)more + row * more_row : nullptr;
            float mean = add_and_sum(from, add, width, [](Vec a) { return a; }) / float(width);
            float squares = 0;  // sum of squared distances from the mean: zeros beyond the end must not count
            Vec sum = Vec::zero();
            int64_t i = 0;
            for (; i + W <= width; i += W) {
                Vec apart = Vec::load(from + i) - Vec::all(mean);
                sum = fma(apart, apart, sum);
            }
            for (; i < width; ++i) squares += (widen(from[i]) - mean) * (widen(from[i]) - mean);
            squares += sum.sum();
            Vec factor = Vec::all(1.0f / std::sqrt(squares / float(width) + eps));
            by_vector<T>(width, [&](auto load, auto store) {
                Vec normed = (load(from) - Vec::all(mean)) * factor;
                if (w) normed = normed * load(w);
                if (b) normed = normed + load(b);
                store(normed, to);
            });
        }
    });
}

void rotate(int dtype, void* x, const float* cos, const float* sin, int64_t rows, int64_t heads, int64_t half,
            int64_t x_row, int64_t x_head) {
    by_dtype(dtype, [&](auto* of) {
        using T = std::remove_pointer_t<decltype(of)>;
#pragma omp parallel for if (rows * heads * half * 2 > WORTH_THREADS)
        for (int64_t row = 0; row < rows; ++row)
            by_vector<T>(half, [&](auto load, auto store) {
                Vec c = rounded_to<T>(load(cos + row * half)), s = rounded_to<T>(load(sin + row * half));
                for (int64_t head = 0; head < heads; ++head) {
                    T *left = (T*)x + row * x_row + head * x_head, *right = left + half;
                    Vec a = load(left), b = load(right);
                    store(a * c - b * s, left);
                    store(b * c + a * s, right);
                }
            });
    });
}

template <class Gated>
static void gated(int dtype, const void* gate_up, void* out, int64_t rows, int64_t width, int64_t row_stride, Gated gated) {
    by_dtype(dtype, [&](auto* of) {
        using T = std::remove_pointer_t<decltype(of)>;
#pragma omp parallel for if (rows * width > WORTH_THREADS / 4)
        for (int64_t row = 0; row < rows; ++row) {
            const T* gate = (const T*)gate_up + row * row_stride;
            by_vector<T>(width, [&](auto load, auto store) {
                store(gated(load(gate), load(gate + width)), (T*)out + row * width);
            });
        }
    });
}

// A lambda has a type of its own: so the compiler puts what it does into the loop, in place of a call for each vector.
void silu_mul(int dtype, const void* gate_up, void* out, int64_t rows, int64_t width, int64_t row_stride) {
    gated(dtype, gate_up, out, rows, width, row_stride, [](Vec gate, Vec up) { return silu_gated(gate, up); });
}

void gelu_mul(int dtype, const void* gate_up, void* out, int64_t rows, int64_t width, int64_t row_stride) {
    gated(dtype, gate_up, out, rows, width, row_stride, [](Vec gate, Vec up) { return gelu_gated(gate, up); });
}

// Returns erf of x to a few units in the last place: a quotient of polynomials, as Eigen has it. A NaN stays a NaN.
static Vec erf(Vec x) {
    constexpr float ODD[] = {-1.60960333262415e-02f, -2.95459980854025e-03f, -7.34990630326855e-04f, -5.69250639462346e-05f,
                             -2.10102402082508e-06f, 2.77068142495902e-08f,  -2.72614225801306e-10f};
    constexpr float EVEN[] = {-1.42647390514189e-02f, -7.37332916720468e-03f, -1.68282697438203e-03f,
                              -2.13374055278905e-04f, -1.45660718464996e-05f};
    x = max(Vec::all(-4.0f), min(Vec::all(4.0f), x));
    Vec square = x * x, above = Vec::all(ODD[6]), below = Vec::all(EVEN[4]);
    for (int i = 5; i >= 0; --i) above = fma(above, square, Vec::all(ODD[i]));
    for (int i = 3; i >= 0; --i) below = fma(below, square, Vec::all(EVEN[i]));
    return x * above / below;
}

void gelu(int dtype, void* x, int64_t count) {
    constexpr int64_t PART = 4096;  // numbers that a thread takes at a time
    by_dtype(dtype, [&](auto* of) {
        using T = std::remove_pointer_t<decltype(of)>;
#pragma omp parallel for if (count > WORTH_THREADS / 4)
        for (int64_t from = 0; from < count; from += PART) {
            T* numbers = (T*)x + from;
            by_vector<T>(count - from < PART ? count - from : PART, [&](auto load, auto store) {
                Vec a = load(numbers), half = a * Vec::all(0.5f);
                store(fma(half, erf(a * Vec::all(0.707106781f)), half), numbers);
            });
        }
    });
}

}  // namespace ISA
