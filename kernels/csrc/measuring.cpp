// Helpers of measurements that Python cannot do.
#include "beside.h"
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

void limit_ahead(int64_t bytes) { most_ahead = bytes; }

}  // namespace ISA
