// K and V that are kept in int8; architectures/kv_dtype.py draws the vector of a token. A number is level * scale, with a
// level of -127 to 127 and the scale of its head in bf16. The arithmetic is that of kernels/common/int8_kv.py, operation
// by operation, so that the kept bytes are equal.
#pragma once
#include <cfloat>

#include "vectors.h"

namespace ISA {

constexpr int64_t SCALE_BYTES = 2;
constexpr float MOST_LEVEL = 127;

// Returns the bytes of a token's K or V.
inline int64_t int8_vector(int64_t heads, int64_t head_dim) { return heads * (head_dim + SCALE_BYTES); }

inline float scale_at(const int8_t* scales, int64_t head) {
    bf16 kept;
    std::memcpy(&kept, scales + head * SCALE_BYTES, SCALE_BYTES);
    return widen(kept);
}

// Returns the size of the largest number of a head; NaN where a number is not finite.
template <class T>
inline float largest_size(const T* from, int64_t head_dim) {
    constexpr int W = Vec::width;
    Vec most = Vec::zero(), odd = Vec::zero();  // odd stays zero times finite numbers
    int64_t i = 0;
    for (; i + W <= head_dim; i += W) {
        Vec x = Vec::load(from + i);
        most = max(most, max(x, Vec::zero() - x));
        odd = odd + x * Vec::zero();
    }
    float size = most.largest(), rest = odd.sum();
    for (; i < head_dim; ++i) {
        float x = widen(from[i]);
        size = std::fabs(x) > size ? std::fabs(x) : size;
        rest += x * 0;
    }
    return size + rest;
}

// Writes the levels of a head and its scale. Numbers below 1e-36 count as zero; where one is not finite, the scale is NaN.
template <class T>
inline void quantise_head(const T* from, int64_t head_dim, int8_t* levels, int8_t* scale) {
    constexpr int W = Vec::width;
    bf16 kept;
    narrow(largest_size(from, head_dim) / MOST_LEVEL, kept);
    if (widen(kept) < FLT_MIN) kept.bits = 0;
    std::memcpy(scale, &kept, SCALE_BYTES);
    const float step = widen(kept), inverse = step > 0 ? 1 / step : 0;
    int64_t i = 0;
    const Vec low = Vec::all(-MOST_LEVEL), high = Vec::all(MOST_LEVEL);
    for (; i + W <= head_dim; i += W)
        min(high, max(low, Vec::load(from + i) * Vec::all(inverse))).store(levels + i);
    for (; i < head_dim; ++i) {
        const float x = widen(from[i]) * inverse;
        narrow(x > MOST_LEVEL ? MOST_LEVEL : x > -MOST_LEVEL ? x : -MOST_LEVEL, levels[i]);
    }
}

template <class T>
constexpr float LARGEST = std::is_same_v<T, f16> ? 65504.0f : std::is_same_v<T, bf16> ? 0x1.FEp127f : FLT_MAX;

// Writes the numbers of a head; none leaves the finite numbers by its rounding.
template <class T>
inline void dequantise_head(const int8_t* levels, float scale, int64_t head_dim, T* to) {
    constexpr int W = Vec::width;
    int64_t i = 0;
    const Vec low = Vec::all(-LARGEST<T>), high = Vec::all(LARGEST<T>);
    for (; i + W <= head_dim; i += W)
        min(high, max(low, Vec::load(levels + i) * Vec::all(scale))).store(to + i);
    for (; i < head_dim; ++i) {
        const float x = float(levels[i]) * scale;
        narrow(x > LARGEST<T> ? LARGEST<T> : x < -LARGEST<T> ? -LARGEST<T> : x, to[i]);
    }
}

}  // namespace ISA
