// The kernels of one instruction set, by name. Compiled once per instruction set.
#include "kernels.h"

namespace ISA {

struct Named {
    const char* name;
    void* function;
};
static const Named kernels[] = {
    {"write", (void*)&write},
    {"attend", (void*)&attend},
    {"rms_norm", (void*)&rms_norm},
    {"gather", (void*)&gather},
    {"scatter", (void*)&scatter},
    {"quantise", (void*)&quantise},
    {"dequantise", (void*)&dequantise},
    {"layer_norm", (void*)&layer_norm},
    {"rotate", (void*)&rotate},
    {"silu_mul", (void*)&silu_mul},
    {"linear", (void*)&linear},
    {"decoder", (void*)&decoder},
    {"evict", (void*)&evict},
    {"read_all", (void*)&read_all},
};

void* kernel(const char* name) {
    for (const Named& one : kernels)
        if (!std::strcmp(one.name, name)) return one.function;
    return nullptr;
}

}  // namespace ISA
