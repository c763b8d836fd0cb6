// How a layer scores tokens: kernels/common/scoring.py as C++ sees it.
#pragma once
#include "vectors.h"

namespace ISA {

struct Scoring {
    float scale;         // of the products of query and K, positive
    float softcap;       // scores become softcap * tanh(score / softcap); 0 where they stay
    int64_t window;      // tokens that a query sees, itself included
    const float* sinks;  // of each head, or null
    int64_t stretch;     // tokens of a stretch; a request is cut into them, and a query sees no earlier one

    // Returns whether a score is more than a scaled product.
    bool changes() const { return softcap > 0; }
};

// Returns tanh of x to a few units in the last place: a quotient of polynomials, as Eigen has it. A NaN stays a NaN.
inline Vec tanh(Vec x) {
    constexpr float MOST = 7.90531110763549805f;
    constexpr float ODD[] = {4.89352455891786e-03f,  6.37261928875436e-04f, 1.48572235717979e-05f, 5.12229709037114e-08f,
                             -8.60467152213735e-11f, 2.00018790482477e-13f, -2.76076847742355e-16f};
    constexpr float EVEN[] = {4.89352518554385e-03f, 2.26843463243900e-03f, 1.18534705686654e-04f, 1.19825839466702e-06f};
    x = max(Vec::all(-MOST), min(Vec::all(MOST), x));
    Vec square = x * x, above = Vec::all(ODD[6]), below = Vec::all(EVEN[3]);
    for (int i = 5; i >= 0; --i) above = fma(above, square, Vec::all(ODD[i]));
    for (int i = 2; i >= 0; --i) below = fma(below, square, Vec::all(EVEN[i]));
    return x * above / below;
}

// Returns a score from a product that is multiplied with `factor`.
inline Vec score_of(const Scoring& scoring, Vec product, float factor) {
    if (scoring.softcap <= 0) return product * Vec::all(factor);
    return Vec::all(scoring.softcap) * tanh(product * Vec::all(factor / scoring.softcap));
}

}  // namespace ISA
