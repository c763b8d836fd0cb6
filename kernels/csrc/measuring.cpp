// Helpers of measurements that Python cannot do.
#include "kernels.h"
#include "scratch.h"

namespace ISA {

// Drops memory from every cache, so that the next read comes from memory.
void evict(const void* memory, int64_t bytes) {
#if defined(__x86_64__)
    for (int64_t i = 0; i < bytes; i += 64) __builtin_ia32_clflush((const char*)memory + i);
    __builtin_ia32_mfence();
#endif
}

void limit_scratch(int64_t bytes) { most_scratch = bytes; }

// Reads all of the memory as fast as all threads can; the result has no meaning.
int64_t read_all(const void* memory, int64_t bytes) {
    constexpr int64_t piece = 4096;
    int64_t sum = 0;
#pragma omp parallel for schedule(static) reduction(^ : sum)
    for (int64_t i = 0; i < bytes / piece; ++i) {
        const int64_t* at = (const int64_t*)((const char*)memory + i * piece);
        int64_t sums[32] = {};
        for (int64_t j = 0; j < piece / 8; j += 32)
            for (int64_t k = 0; k < 32; ++k) sums[k] ^= at[j + k];
        for (int64_t part : sums) sum ^= part;
    }
    return sum;
}

}  // namespace ISA
