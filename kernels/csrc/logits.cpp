// The likeliest token of each row of logits.
#include <cmath>
#include <limits>

#include "kernels.h"

namespace ISA {

constexpr int64_t AT_ONCE = 64;             // numbers: the compiler makes vectors of them
constexpr int64_t WORTH_THREADS = 1 << 17;  // numbers; with fewer, waking the other threads takes longer

// The largest number so far of each of AT_ONCE columns that lie side by side.
struct Largest {
    float of[AT_ONCE];
    int32_t broken[AT_ONCE] = {};  // not 0 where there was a NaN

    Largest() {
        for (float& largest : of) largest = -std::numeric_limits<float>::infinity();
    }
    void see(const float* numbers, int64_t count) {
        for (int64_t i = 0; i < count; ++i) {
            of[i] = numbers[i] > of[i] ? numbers[i] : of[i];
            broken[i] |= numbers[i] != numbers[i];
        }
    }
};

static int64_t first_equal(const float* numbers, int64_t count, float to) {
    int32_t is_here = 0;
    for (int64_t i = 0; i < count; ++i) is_here |= numbers[i] == to;
    for (int64_t i = 0; is_here && i < count; ++i)
        if (numbers[i] == to) return i;
    return -1;
}

static int64_t likeliest_of(const float* row, int64_t width) {
    int64_t whole = width / AT_ONCE * AT_ONCE;
    Largest largest;
    for (int64_t i = 0; i < whole; i += AT_ONCE) largest.see(row + i, AT_ONCE);
    largest.see(row + whole, width - whole);
    float most = largest.of[0];
    for (int64_t i = 0; i < AT_ONCE; ++i) {
        if (largest.broken[i]) return -1;
        most = largest.of[i] > most ? largest.of[i] : most;
    }
    if (!std::isfinite(most)) return -1;
    for (int64_t i = 0; i < whole; i += AT_ONCE)
        if (int64_t place = first_equal(row + i, AT_ONCE, most); place >= 0) return i + place;
    return whole + first_equal(row + whole, width - whole, most);
}

void likeliest(const float* logits, int64_t stride, int64_t rows, int64_t width, int64_t* out) {
#pragma omp parallel for if (rows > 1 && rows * width > WORTH_THREADS)
    for (int64_t row = 0; row < rows; ++row) out[row] = likeliest_of(logits + row * stride, width);
}

}  // namespace ISA
