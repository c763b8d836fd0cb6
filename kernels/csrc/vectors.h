// Vectors of floats at the width of the instruction set that this file is compiled for, and numbers as they lie in memory.
//
// Every kernel source is compiled once per instruction set (build.py), with ISA its name. Arithmetic is in fp32 whatever
// the memory holds. Code in namespace ISA must not be shared between instruction sets: keep all of it inside.
#pragma once
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace ISA {

struct bf16 {
    uint16_t bits;
};
struct f16 {
    uint16_t bits;
};

enum Dtype : int { F32 = 0, BF16 = 1, F16 = 2, INT8 = 3 };  // as library.py numbers them; INT8: K and V only
inline int64_t number_size(int dtype) { return dtype == F32 ? 4 : dtype == INT8 ? 1 : 2; }

inline float widen(float x) { return x; }
inline float widen(int8_t x) { return x; }
inline float widen(uint8_t x) { return x; }
inline float widen(bf16 x) {
    uint32_t bits = uint32_t(x.bits) << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}
inline float widen(f16 x) {
    uint32_t sign = uint32_t(x.bits & 0x8000) << 16, exponent = (x.bits >> 10) & 31, fraction = x.bits & 1023;
    float value;
    if (exponent == 0) {
        value = float(fraction) * 0x1p-24f;
        if (sign) value = -value;
        return value;
    }
    uint32_t bits = sign | (exponent == 31 ? 0x7F800000u : (exponent + 112) << 23) | fraction << 13;
    std::memcpy(&value, &bits, 4);
    return value;
}

inline void narrow(float value, float& to) { to = value; }
inline void narrow(float value, bf16& to) {  // rounds to the nearest, ties to even; a NaN stays a NaN
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    if ((bits & 0x7FFFFFFF) > 0x7F800000) {
        to.bits = uint16_t(bits >> 16 | 64);
        return;
    }
    to.bits = uint16_t((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}
inline void narrow(float value, f16& to) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    uint32_t sign = bits >> 16 & 0x8000, rest = bits & 0x7FFFFFFF;
    if (rest > 0x7F800000) {
        to.bits = uint16_t(sign | 0x7E00);
    } else if (rest >= 0x477FF000) {  // 65,520 and above
        to.bits = uint16_t(sign | 0x7C00);
    } else if (rest < 0x38800000) {  // below the smallest normal number
        float magnitude;
        std::memcpy(&magnitude, &rest, 4);
        to.bits = uint16_t(sign | uint32_t(std::nearbyint(magnitude * 0x1p24f)));
    } else {
        rest += 0xFFF + (rest >> 13 & 1);
        to.bits = uint16_t(sign | (rest - 0x38000000) >> 13);
    }
}

// Ties go to even. An int8_t comes from a size of at most 127; a uint8_t from 0 and more, and is 255 at most.
inline void narrow(float value, int8_t& to) { to = int8_t(std::nearbyint(value)); }
inline void narrow(float value, uint8_t& to) {
    const float whole = (value + 0x1p23f) - 0x1p23f;  // the addition removes the fraction
    to = uint8_t(whole < 255 ? whole : 255);
}

#if defined(__AVX512F__)

struct Vec {
    static constexpr int width = 16;
    __m512 v;
    static Vec zero() { return {_mm512_setzero_ps()}; }
    static Vec all(float x) { return {_mm512_set1_ps(x)}; }
    static Vec load(const float* p) { return {_mm512_loadu_ps(p)}; }
    static Vec load(const bf16* p) {
        __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p));
        return {_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16))};
    }
    static Vec load(const f16* p) { return {_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p))}; }
    static Vec load(const int8_t* p) { return whole(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p))); }
    static Vec load(const uint8_t* p) { return whole(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p))); }
    static Vec whole(__m512i numbers) { return {_mm512_cvtepi32_ps(numbers)}; }
    __m512i to_whole() const { return _mm512_cvtps_epi32(v); }
    void store(float* p) const { _mm512_storeu_ps(p, v); }
    void store(bf16* p) const {
#if defined(__AVX512BF16__)
        _mm256_storeu_si256((__m256i*)p, (__m256i)_mm512_cvtneps_pbh(v));
#else
        __m512i bits = _mm512_castps_si512(v);
        __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
        __m512i near = _mm512_add_epi32(_mm512_add_epi32(bits, odd), _mm512_set1_epi32(0x7FFF));
        __m512i quiet = _mm512_or_si512(bits, _mm512_set1_epi32(1 << 22));
        near = _mm512_mask_mov_epi32(near, _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q), quiet);
        _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16(_mm512_srli_epi32(near, 16)));
#endif
    }
    void store(f16* p) const { _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT)); }
    void store(int8_t* p) const { _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8(to_whole())); }
    void store(uint8_t* p) const { _mm_storeu_si128((__m128i*)p, _mm512_cvtusepi32_epi8(to_whole())); }
    float sum() const { return _mm512_reduce_add_ps(v); }
    float largest() const { return _mm512_reduce_max_ps(v); }
};
inline Vec fma(Vec a, Vec b, Vec c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline Vec max(Vec a, Vec b) { return {_mm512_max_ps(a.v, b.v)}; }
inline Vec min(Vec a, Vec b) { return {_mm512_min_ps(a.v, b.v)}; }
inline Vec largest_or_nan(Vec a, Vec b) {  // of numbers of 0 or more; the bits of a NaN are the largest
    return {_mm512_castsi512_ps(_mm512_max_epu32(_mm512_castps_si512(a.v), _mm512_castps_si512(b.v)))};
}
inline bool any_above(Vec a, Vec b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_GT_OQ) != 0; }
inline Vec rounded(Vec a) { return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
inline Vec times_two_to(Vec a, Vec whole) { return {_mm512_scalef_ps(a.v, whole.v)}; }

#elif defined(__AVX2__)

struct Vec {
    static constexpr int width = 8;
    __m256 v;
    static Vec zero() { return {_mm256_setzero_ps()}; }
    static Vec all(float x) { return {_mm256_set1_ps(x)}; }
    static Vec load(const float* p) { return {_mm256_loadu_ps(p)}; }
    static Vec load(const bf16* p) {
        __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p));
        return {_mm256_castsi256_ps(_mm256_slli_epi32(wide, 16))};
    }
    static Vec load(const f16* p) { return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p))}; }
    static Vec load(const int8_t* p) { return whole(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p))); }
    static Vec load(const uint8_t* p) { return whole(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p))); }
    static Vec whole(__m256i numbers) { return {_mm256_cvtepi32_ps(numbers)}; }
    void store(float* p) const { _mm256_storeu_ps(p, v); }
    void store(bf16* p) const {
        __m256i bits = _mm256_castps_si256(v);
        __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
        __m256i near = _mm256_add_epi32(_mm256_add_epi32(bits, odd), _mm256_set1_epi32(0x7FFF));
        __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(1 << 22));
        near = _mm256_blendv_epi8(near, quiet, _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q)));
        near = _mm256_srli_epi32(near, 16);
        __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(near, near), 0x88);
        _mm_storeu_si128((__m128i*)p, _mm256_castsi256_si128(packed));
    }
    void store(f16* p) const { _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT)); }
    void store(int8_t* p) const { _mm_storel_epi64((__m128i*)p, _mm_packs_epi16(in_16_bits(), in_16_bits())); }
    void store(uint8_t* p) const { _mm_storel_epi64((__m128i*)p, _mm_packus_epi16(in_16_bits(), in_16_bits())); }
    __m128i in_16_bits() const {
        const __m256i words = _mm256_cvtps_epi32(v);
        return _mm_packs_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
    }
    float sum() const {
        __m128 half = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
        half = _mm_add_ps(half, _mm_movehl_ps(half, half));
        return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
    }
    float largest() const {
        __m128 half = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
        half = _mm_max_ps(half, _mm_movehl_ps(half, half));
        return _mm_cvtss_f32(_mm_max_ss(half, _mm_movehdup_ps(half)));
    }
};
inline Vec fma(Vec a, Vec b, Vec c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
inline Vec max(Vec a, Vec b) { return {_mm256_max_ps(a.v, b.v)}; }
inline Vec min(Vec a, Vec b) { return {_mm256_min_ps(a.v, b.v)}; }
inline Vec largest_or_nan(Vec a, Vec b) {
    return {_mm256_castsi256_ps(_mm256_max_epu32(_mm256_castps_si256(a.v), _mm256_castps_si256(b.v)))};
}
inline bool any_above(Vec a, Vec b) { return _mm256_movemask_ps(_mm256_cmp_ps(a.v, b.v, _CMP_GT_OQ)) != 0; }
inline Vec rounded(Vec a) { return {_mm256_round_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
inline Vec times_two_to(Vec a, Vec whole) {  // whole is at least -126 and at most 127
    __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(whole.v), _mm256_set1_epi32(127));
    return {_mm256_mul_ps(a.v, _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23)))};
}

#else

struct Vec {
    static constexpr int width = 1;
    float v;
    static Vec zero() { return {0.0f}; }
    static Vec all(float x) { return {x}; }
    template <class T>
    static Vec load(const T* p) {
        return {widen(*p)};
    }
    template <class T>
    void store(T* p) const {
        narrow(v, *p);
    }
    float sum() const { return v; }
    float largest() const { return v; }
};
inline Vec fma(Vec a, Vec b, Vec c) { return {a.v * b.v + c.v}; }
inline Vec max(Vec a, Vec b) { return {a.v > b.v ? a.v : b.v}; }
inline Vec min(Vec a, Vec b) { return {a.v < b.v ? a.v : b.v}; }
inline Vec largest_or_nan(Vec a, Vec b) { return a.v > b.v || a.v != a.v ? a : b; }
inline bool any_above(Vec a, Vec b) { return a.v > b.v; }
inline Vec rounded(Vec a) { return {std::nearbyint(a.v)}; }
inline Vec times_two_to(Vec a, Vec whole) { return {std::ldexp(a.v, int(whole.v))}; }

#endif

inline Vec operator+(Vec a, Vec b) { return {a.v + b.v}; }
inline Vec operator-(Vec a, Vec b) { return {a.v - b.v}; }
inline Vec operator*(Vec a, Vec b) { return {a.v * b.v}; }
inline Vec operator/(Vec a, Vec b) { return {a.v / b.v}; }

// Returns e to the power of x, to about 2 units in the last place; next to nothing below -87. A NaN stays a NaN: min and
// max return their second where one is a NaN.
inline Vec exp(Vec x) {
    x = min(Vec::all(88.3f), max(Vec::all(-87.3f), x));
    Vec whole = rounded(x * Vec::all(1.44269504f));
    Vec rest = fma(whole, Vec::all(-0.693359375f), x);
    rest = fma(whole, Vec::all(2.12194440e-4f), rest);
    Vec sum = Vec::all(1.9875691500e-4f);
    sum = fma(sum, rest, Vec::all(1.3981999507e-3f));
    sum = fma(sum, rest, Vec::all(8.3334519073e-3f));
    sum = fma(sum, rest, Vec::all(4.1665795894e-2f));
    sum = fma(sum, rest, Vec::all(1.6666665459e-1f));
    sum = fma(sum, rest, Vec::all(5.0000001201e-1f));
    return times_two_to(fma(sum, rest * rest, rest + Vec::all(1.0f)), whole);
}

// Calls action(T*) with a pointer of the dtype's type.
template <class Action>
inline void by_dtype(int dtype, Action action) {
    if (dtype == BF16)
        action((bf16*)nullptr);
    else if (dtype == F16)
        action((f16*)nullptr);
    else
        action((float*)nullptr);
}

// Returns gate * sigmoid(slope) * up.
inline Vec gated_by(Vec gate, Vec slope, Vec up) {
    return gate / (Vec::all(1.0f) + exp(Vec::zero() - slope)) * up;
}

inline Vec silu_gated(Vec gate, Vec up) { return gated_by(gate, gate, up); }

// The approximation of gelu by tanh: (1 + tanh(y)) / 2 is sigmoid(2 y).
inline Vec gelu_gated(Vec gate, Vec up) {
    constexpr float TWICE = 1.5957691216057308f;  // 2 * sqrt(2 / pi)
    return gated_by(gate, Vec::all(TWICE) * gate * (Vec::all(1.0f) + Vec::all(0.044715f) * gate * gate), up);
}

}  // namespace ISA
