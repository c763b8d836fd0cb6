// Weights on their way from files to the layout of quantised.cpp. The arithmetic is that of gguf_weights.py, operation by
// operation, so that the results are equal bit by bit.
#include <algorithm>

#include "kernels.h"

namespace ISA {

constexpr int64_t PANEL = 64, LINE = 16;  // rows of a panel; words of a line of the cache
constexpr int BLOCK = 256, GROUP = 32;    // numbers of a block, and of a group of Q4_K and Q5_K

static float half_at(const uint8_t* p) {
    f16 x;
    std::memcpy(&x.bits, p, 2);
    return widen(x);
}

// The scales and zeros of the eight groups of a block of Q4_K or Q5_K, whose numbers are scale * q + least. All numbers of
// a group without scale are the least.
static void scales_of(const uint8_t* block, uint8_t* q, float* scale, float* zero) {
    const float by = half_at(block), least_by = half_at(block + 2);
    for (int group = 0; group < 8; ++group) {
        const int at = group % 4, rest = block[12 + at];
        const int scaled = group < 4 ? block[4 + at] & 63 : (rest & 15) | (block[4 + at] >> 6 << 4);
        const int lowered = group < 4 ? block[8 + at] & 63 : (rest >> 4) | (block[8 + at] >> 6 << 4);
        const float own = float(scaled) * by, least = -(float(lowered) * least_by);
        scale[group] = own == 0 ? least : own;
        zero[group] = own == 0 ? -1 : -least / own;
        if (own == 0) std::fill(q + group * GROUP, q + (group + 1) * GROUP, 0);
    }
}

static void q4_k(const uint8_t* block, uint8_t* q, float* scale, float* zero) {
    for (int pair = 0; pair < 4; ++pair)
        for (int i = 0; i < GROUP; ++i) {
            const uint8_t both = block[16 + pair * GROUP + i];
            q[pair * 64 + i] = both & 15, q[pair * 64 + GROUP + i] = both >> 4;
        }
    scales_of(block, q, scale, zero);
}

static void q5_k(const uint8_t* block, uint8_t* q, float* scale, float* zero) {
    for (int pair = 0; pair < 4; ++pair)
        for (int i = 0; i < GROUP; ++i) {
            const uint8_t both = block[48 + pair * GROUP + i], fifth = block[16 + i] >> 2 * pair;
            q[pair * 64 + i] = (both & 15) | (fifth & 1) << 4;
            q[pair * 64 + GROUP + i] = both >> 4 | (fifth >> 1 & 1) << 4;
        }
    scales_of(block, q, scale, zero);
}

// Its numbers lie around 32, and around 128 where they become 8 bits.
static void q6_k(const uint8_t* block, uint8_t* q, float* scale, float*) {
    for (int part = 0; part < 2; ++part)
        for (int i = 0; i < 32; ++i) {
            const uint8_t *low = block + part * 64 + i, upper = block[128 + part * 32 + i];
            uint8_t* to = q + part * 128 + i;
            to[0] = ((low[0] & 15) | (upper & 3) << 4) + 96;
            to[32] = ((low[32] & 15) | (upper >> 2 & 3) << 4) + 96;
            to[64] = (low[0] >> 4 | (upper >> 4 & 3) << 4) + 96;
            to[96] = (low[32] >> 4 | (upper >> 6) << 4) + 96;
        }
    for (int group = 0; group < 16; ++group) scale[group] = float(int8_t(block[192 + group])) * half_at(block + 208);
}

void unpack(int kind, const uint8_t* rows, int64_t blocks, uint8_t* q, float* scale, float* zero) {
    const bool is_q6 = kind == Q6_K;
    const int64_t bytes = is_q6 ? 210 : kind == Q5_K ? 176 : 144, groups = is_q6 ? 16 : 8;
    const auto unpacked = is_q6 ? q6_k : kind == Q5_K ? q5_k : q4_k;
#pragma omp parallel for
    for (int64_t block = 0; block < blocks; ++block)
        unpacked(rows + block * bytes, q + block * BLOCK, scale + block * groups, zero + block * groups);
}

void panels(const uint32_t* rows, int64_t count, int64_t width, int halves, uint32_t* out) {
    const int64_t columns = halves ? width / 2 : width;
#pragma omp parallel for
    for (int64_t panel = 0; panel < (count + PANEL - 1) / PANEL; ++panel)
        for (int64_t first = 0; first < columns; first += LINE)
            for (int64_t row = 0; row < PANEL; ++row) {
                const bool is_there = panel * PANEL + row < count;
                const uint32_t* from = rows + (panel * PANEL + row) * width;
                for (int64_t at = first; at < std::min(first + LINE, columns); ++at) {
                    const uint32_t word = !is_there ? 0 : halves ? from[2 * at] | from[2 * at + 1] << 4 : from[at];
                    out[(panel * columns + at) * PANEL + row] = word;
                }
            }
}

}  // namespace ISA
