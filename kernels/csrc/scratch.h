// Memory that a thread keeps for what its kernels compute with, from call to call.
//
// Where memory is short, std::bad_alloc goes up to the C interface (table.cpp), which tells the caller. An exception must
// not leave a parallel region, where it would end the process: a Guard holds it until the threads have come together.
#pragma once
#include <cstddef>
#include <cstdint>
#include <new>

namespace ISA {

// The most bytes that a Scratch may have: tests set it, to see what happens with too little memory.
inline int64_t most_scratch = INT64_MAX;

class Scratch {
    void* memory = nullptr;
    size_t bytes = 0;
    void release() { ::operator delete(memory, std::align_val_t(64)); }

  public:
    ~Scratch() { release(); }
    void* at_least(size_t wanted) {
        if (wanted > size_t(most_scratch)) throw std::bad_alloc();
        if (wanted > bytes) {
            release();
            memory = nullptr, bytes = 0;  // in case the next line throws
            memory = ::operator new(wanted, std::align_val_t(64));
            bytes = wanted;
        }
        return memory;
    }
};

// Runs the work of several threads; any of them may find no memory.
class Guard {
    bool failed = false;

  public:
    template <class Action>
    void run(Action action) {
        try {
            action();
        } catch (const std::bad_alloc&) {
            __atomic_store_n(&failed, true, __ATOMIC_RELAXED);
        }
    }
    // Both are called after a barrier.
    bool has_failed() const { return __atomic_load_n(&failed, __ATOMIC_RELAXED); }
    void pass_on() const {
        if (has_failed()) throw std::bad_alloc();
    }
};

}  // namespace ISA
