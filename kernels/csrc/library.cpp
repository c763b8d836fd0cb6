// The library's C interface: which instruction sets it was built for, which this CPU has, and their kernels by name.
#include <cstring>
#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

// The instruction sets from the least to the best, as build.py compiles them: BUILT_FOR(generic) BUILT_FOR(avx2) ...
#define BUILT_FOR(isa)              \
    namespace isa {                 \
    void* kernel(const char* name); \
    }
#include "built_for.h"
#include "built_from.h"
#undef BUILT_FOR

static bool has_amx() {
#if defined(EMULATED_TILES)
    return true;
#elif defined(__x86_64__)
    unsigned a, b, c, d;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
    if (!(d >> 22 & 1) || !(d >> 24 & 1)) return false;  // amx_bf16, amx_tile
    return syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* tile data */) == 0;
#else
    return false;
#endif
}

static bool cpu_has(const char* isa) {
    if (!std::strcmp(isa, "generic")) return true;
#if defined(__x86_64__)
    __builtin_cpu_init();
    bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                  __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    bool vnni = avx512 && __builtin_cpu_supports("avx512vnni");
    bool bf16 = vnni && __builtin_cpu_supports("avx512bf16");
    if (!std::strcmp(isa, "avx2")) return avx2;
    if (!std::strcmp(isa, "avx512")) return avx512;
    if (!std::strcmp(isa, "avx512vnni")) return vnni;
    if (!std::strcmp(isa, "avx512bf16")) return bf16;
    if (!std::strcmp(isa, "amx")) return bf16 && has_amx();
#endif
    return false;
}

#pragma GCC visibility push(default)
extern "C" {

// Returns the name that build.py gives to the sources of this library.
const char* as_built_from() { return BUILT_FROM; }

// Returns the usable instruction sets, from the least to the best, with blanks between.
const char* as_usable() {
    static char names[128];
    names[0] = 0;
#define BUILT_FOR(isa) \
    if (cpu_has(#isa)) std::strcat(std::strcat(names, names[0] ? " " : ""), #isa);
#include "built_for.h"
#undef BUILT_FOR
    return names;
}

// Returns whether this CPU has an instruction set, also one that the library was not built for.
int as_cpu_has(const char* isa) { return cpu_has(isa); }

// Returns the kernel, or null where there is none of this name or the CPU cannot run it.
void* as_kernel(const char* isa, const char* name) {
#define BUILT_FOR(set) \
    if (!std::strcmp(isa, #set)) return cpu_has(isa) ? set::kernel(name) : nullptr;
#include "built_for.h"
#undef BUILT_FOR
    return nullptr;
}
}
#pragma GCC visibility pop
