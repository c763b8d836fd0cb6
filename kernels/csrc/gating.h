// What becomes of a gate and what it gates: elementwise.cpp, and packed_tiles.cpp as part of a product.
#pragma once
#include "kernels.h"

namespace ISA {

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
