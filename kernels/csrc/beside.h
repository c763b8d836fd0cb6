// Attention beside linear layers: where a step has decodes and prompts, the decodes' attention waits for memory, and the
// prompts' products for arithmetic. So a thread prefetches some K and V beside the products of a block of weights, then
// goes over them, and so on with the next block.
#pragma once
#include "blocks.h"

namespace ISA {

class Beside {
  public:
    virtual ~Beside() = default;
    // Returns the memory that this thread has to prefetch.
    virtual Stretches* ahead(int64_t thread) = 0;
    // Computes with the memory that was prefetched, and finds the next.
    virtual void go_on(int64_t thread) = 0;
};

// Whether the kernels of packed layers let something run beside them; those with AMX do not.
#if defined(__AMX_BF16__)
constexpr bool RUN_BESIDE = false;
#else
constexpr bool RUN_BESIDE = true;
#endif

// The most bytes that are prefetched before go_on: they lie in the second cache beside weights and rows. Tests take fewer.
inline int64_t most_ahead = 3 << 16;

// What runs beside the linear layers that this thread calls, or null.
inline thread_local Beside* beside = nullptr;

}  // namespace ISA
