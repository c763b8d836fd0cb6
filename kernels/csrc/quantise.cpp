// int8 per channel: a group of tokens has, for each channel, its least number and the step between two levels.
// The arithmetic is that of reference.py, operation by operation, so that the results are equal bit by bit.
#include <algorithm>
#include <cfloat>

#include "kernels.h"

namespace ISA {

constexpr int64_t TILE = 512;  // channels at a time: what is known of them stays in the first-level cache
constexpr float TINY_STEP = 0x1p-100f, ENLARGE = 0x1p64f;

struct Scale {
    float by, offset, inverse;
};

// level(x) = (x * by - offset) * inverse. Numbers are halved, since the range of finite numbers need not be finite; where
// the step is tiny they are enlarged, since the inverse of a denormal number is not finite.
static Scale scale_of(float least, float step) {
    if (step == 0) return {0, 0, 0};
    const float by = step < TINY_STEP ? ENLARGE : 0.5f;
    return {by, least * by, 1 / (step * by)};
}

template <class T>
struct Tile {
    const T* rows;
    int64_t row, tokens, channels;

    // Returns false where a number is not finite.
    bool range(float* least, float* most) const {
        std::fill(least, least + channels, FLT_MAX);
        std::fill(most, most + channels, -FLT_MAX);
        bool finite = true;
        for (int64_t token = 0; token < tokens; token += 4) {
            const T* x[4];  // the last row again where there are no more: it changes nothing
            for (int i = 0; i < 4; ++i) x[i] = rows + std::min(token + i, tokens - 1) * row;
            finite &= range_of_four(x, least, most);
        }
        return finite;
    }

    bool range_of_four(const T* const* x, float* least, float* most) const {
        constexpr int W = Vec::width;
        Vec odd = Vec::zero();  // stays zero times finite numbers
        int64_t i = 0;
        for (; i + W <= channels; i += W) {
            const Vec a = Vec::load(x[0] + i), b = Vec::load(x[1] + i), c = Vec::load(x[2] + i), d = Vec::load(x[3] + i);
            min(Vec::load(least + i), min(min(a, b), min(c, d))).store(least + i);
            max(Vec::load(most + i), max(max(a, b), max(c, d))).store(most + i);
            odd = odd + (fma(a, Vec::zero(), b * Vec::zero()) + fma(c, Vec::zero(), d * Vec::zero()));
        }
        float rest = 0;
        for (; i < channels; ++i)
            for (int of = 0; of < 4; ++of) {
                const float a = widen(x[of][i]);
                least[i] = std::min(least[i], a), most[i] = std::max(most[i], a), rest += a * 0;
            }
        return odd.sum() + rest == 0;
    }

    void levels(const float* by, const float* offset, const float* inverse, uint8_t* q, int64_t q_row) const {
        constexpr int W = Vec::width;
        for (int64_t token = 0; token < tokens; ++token) {
            const T* x = rows + token * row;
            uint8_t* out = q + token * q_row;
            int64_t i = 0;
            for (; i + W <= channels; i += W)
                ((Vec::load(x + i) * Vec::load(by + i) - Vec::load(offset + i)) * Vec::load(inverse + i)).store(out + i);
            for (; i < channels; ++i) narrow((widen(x[i]) * by[i] - offset[i]) * inverse[i], out[i]);
        }
    }
};

template <class T>
static bool quantise_tile(const Tile<T>& tile, uint8_t* q, int64_t q_row, float* least, float* step) {
    float most[TILE], by[TILE], offset[TILE], inverse[TILE];
    if (!tile.range(least, most)) return false;
    for (int64_t i = 0; i < tile.channels; ++i) {
        step[i] = (most[i] * 0.5f - least[i] * 0.5f) / 127.5f;
        const Scale scale = scale_of(least[i], step[i]);
        by[i] = scale.by, offset[i] = scale.offset, inverse[i] = scale.inverse;
    }
    tile.levels(by, offset, inverse, q, q_row);
    return true;
}

int quantise(int dtype, const void* rows, int64_t group_stride, int64_t row_stride, uint8_t* q, float* least,
             float* step, int64_t groups, int64_t tokens, int64_t channels) {
    int not_finite = 0;
    const int64_t tiles = (channels + TILE - 1) / TILE;
    by_dtype(dtype, [&](auto* of) {
        using T = std::remove_pointer_t<decltype(of)>;
        int odd = 0;
#pragma omp parallel for reduction(| : odd) if (groups * tokens * channels > 32768)
        for (int64_t part = 0; part < groups * tiles; ++part) {
            const int64_t group = part / tiles, first = part % tiles * TILE;
            const Tile<T> tile{(const T*)rows + group * group_stride + first, row_stride, tokens,
                               std::min(TILE, channels - first)};
            uint8_t* to = q + group * tokens * channels + first;
            odd |= !quantise_tile(tile, to, channels, least + group * channels + first, step + group * channels + first);
        }
        not_finite = odd;
    });
    return not_finite;
}

// Adds a step up to the middle and a step from there, so that neither leaves the finite numbers; nor does their rounding.
static Vec number_at(Vec least, Vec step, Vec level) {
    const Vec half_way = step * (level * Vec::all(0.5f));
    return min(Vec::all(FLT_MAX), max(Vec::all(-FLT_MAX), (least + half_way) + half_way));
}

template <class T>
static void store_number(Vec x, T* p) {
    x.store(p);
}
#if defined(__AVX512BF16__)
// Stores as Vec::store does without the instruction for it, which takes denormal numbers for zero.
static void store_number(Vec x, bf16* p) {
    const __m512i bits = _mm512_castps_si512(x.v);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i near = _mm512_add_epi32(_mm512_add_epi32(bits, odd), _mm512_set1_epi32(0x7FFF));
    _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16(_mm512_srli_epi32(near, 16)));
}
#endif

template <class T>
static void dequantise_row(const uint8_t* q, const float* least, const float* step, T* out, int64_t channels) {
    constexpr int W = Vec::width;
    int64_t i = 0;
    for (; i + W <= channels; i += W)
        store_number(number_at(Vec::load(least + i), Vec::load(step + i), Vec::load(q + i)), out + i);
    for (; i < channels; ++i) {
        const float half_way = step[i] * (float(q[i]) * 0.5f);
        narrow(std::min(std::max((least[i] + half_way) + half_way, -FLT_MAX), FLT_MAX), out[i]);
    }
}

void dequantise(int dtype, void* out, int64_t group_stride, int64_t row_stride, const uint8_t* q, const float* least,
                const float* step, int64_t groups, int64_t tokens, int64_t channels) {
    by_dtype(dtype, [&](auto* of) {
        using T = std::remove_pointer_t<decltype(of)>;
#pragma omp parallel for if (groups * tokens * channels > 32768)
        for (int64_t row = 0; row < groups * tokens; ++row) {
            const int64_t group = row / tokens, token = row % tokens;
            dequantise_row(q + row * channels, least + group * channels, step + group * channels,
                           (T*)out + group * group_stride + token * row_stride, channels);
        }
    });
}

}  // namespace ISA
