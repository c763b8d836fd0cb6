// The kernels of one instruction set, by name. Compiled once per instruction set.
#include <new>

#include "kernels.h"

namespace ISA {

// Wraps a kernel for C: returns the kernel's result, 0 where it has none, and NO_MEMORY where it found no memory.
constexpr int NO_MEMORY = -1;

template <auto kernel>
struct InC;
template <class... Args, void (*kernel)(Args...)>
struct InC<kernel> {
    static int call(Args... args) {
        try {
            kernel(args...);
            return 0;
        } catch (const std::bad_alloc&) {
            return NO_MEMORY;
        }
    }
};
template <class... Args, int (*kernel)(Args...)>
struct InC<kernel> {
    static int call(Args... args) {
        try {
            return kernel(args...);
        } catch (const std::bad_alloc&) {
            return NO_MEMORY;
        }
    }
};

struct Named {
    const char* name;
    void* function;
};
static const Named kernels[] = {
    {"write", (void*)&InC<&write>::call},
    {"attend", (void*)&InC<&attend>::call},
    {"attend_latent", (void*)&InC<&attend_latent>::call},
    {"attend_texts", (void*)&InC<&attend_texts>::call},
    {"rms_norm", (void*)&InC<&rms_norm>::call},
    {"gather", (void*)&InC<&gather>::call},
    {"scatter", (void*)&InC<&scatter>::call},
    {"crc32", (void*)&InC<&crc32>::call},
    {"quantise", (void*)&InC<&quantise>::call},
    {"dequantise", (void*)&InC<&dequantise>::call},
    {"layer_norm", (void*)&InC<&layer_norm>::call},
    {"rotate", (void*)&InC<&rotate>::call},
    {"silu_mul", (void*)&InC<&silu_mul>::call},
    {"gelu_mul", (void*)&InC<&gelu_mul>::call},
    {"gelu", (void*)&InC<&gelu>::call},
    {"unpack", (void*)&InC<&unpack>::call},
    {"panels", (void*)&InC<&panels>::call},
    {"linear", (void*)&InC<&linear>::call},
    {"pack", (void*)&InC<&pack>::call},
    {"adapt", (void*)&InC<&adapt>::call},
    {"decoder", (void*)&InC<&decoder>::call},
    {"likeliest", (void*)&InC<&likeliest>::call},
    {"evict", (void*)&InC<&evict>::call},
    {"limit_ahead", (void*)&InC<&limit_ahead>::call},
    {"limit_scratch", (void*)&InC<&limit_scratch>::call},
};

void* kernel(const char* name) {
    for (const Named& entry : kernels)
        if (!std::strcmp(entry.name, name)) return entry.function;
    return nullptr;
}

}  // namespace ISA
