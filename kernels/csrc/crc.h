// CRC-32 as zlib has it (polynomial 0xEDB88320, bits reflected), as fast as memory is read, and beside a copy.
//
// A CRC is a remainder of polynomials over bits. Carry-less multiplication folds 16 bytes onto the 16 bytes that lie n bits
// later, with x^(n + 32) and x^(n - 32) mod P as factors ("Fast CRC Computation for Generic Polynomials Using PCLMULQDQ",
// Intel, 2009). What stays folded at the end has the remainder of all, and goes through tables.
#pragma once
#include "kernels.h"

namespace ISA {

// The CRC-32 of bytes that come piece by piece. Pieces whose size is a multiple of 512 cost least.
class Crc {
   public:
    // Adds [from, from + bytes), and copies them to `to` unless that is null: they are read once. `streamed` as in copies.cpp.
    void add(char* to, const char* from, int64_t bytes, bool streamed);
    uint32_t value();

   private:
    enum Form { PLAIN, NARROW, WIDE };  // all is in `state`, inverted; or in 64 or 512 bytes, with all before folded onto them
    Form form = PLAIN;
    uint32_t state = ~0u;
    alignas(64) char folded[512];

    void fold(Form as, char* to, const char* from, int64_t bytes, bool streamed);
    void narrow();
    void unfold();
};

// Returns the CRC-32 of two pieces after each other; the second has `bytes` bytes.
uint32_t join_crcs(uint32_t first, uint32_t second, int64_t bytes);

}  // namespace ISA
