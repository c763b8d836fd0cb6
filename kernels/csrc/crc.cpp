#include "crc.h"

namespace ISA {

constexpr uint32_t POLYNOMIAL = 0xEDB88320;  // bit 31 is x^0

constexpr uint32_t times_x(uint32_t a) { return a >> 1 ^ (a & 1 ? POLYNOMIAL : 0); }

constexpr uint32_t product(uint32_t a, uint32_t b) {
    uint32_t sum = 0;
    for (int bit = 31; bit >= 0; --bit, b = times_x(b)) sum ^= b & -(a >> bit & 1);
    return sum;
}

constexpr uint32_t power_of_x(uint64_t n) {
    uint32_t power = 0x80000000, square = 0x40000000;
    for (; n; n >>= 1, square = product(square, square))
        if (n & 1) power = product(power, square);
    return power;
}

uint32_t join_crcs(uint32_t first, uint32_t second, int64_t bytes) {
    return product(first, power_of_x(8 * uint64_t(bytes))) ^ second;
}

// --- Tables: eight bytes at a time

struct Tables {
    uint32_t of[8][256];
};
constexpr Tables tables() {
    Tables made{};
    for (uint32_t byte = 0; byte < 256; ++byte) {
        uint32_t crc = byte;
        for (int bit = 0; bit < 8; ++bit) crc = times_x(crc);
        made.of[0][byte] = crc;
    }
    for (int table = 1; table < 8; ++table)
        for (int byte = 0; byte < 256; ++byte) {
            uint32_t before = made.of[table - 1][byte];
            made.of[table][byte] = before >> 8 ^ made.of[0][before & 255];
        }
    return made;
}
static constexpr Tables TABLES = tables();

static uint32_t by_tables(uint32_t state, const char* from, int64_t bytes) {
    const auto& of = TABLES.of;
    const auto* at = reinterpret_cast<const uint8_t*>(from);
#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
    for (; bytes >= 8; at += 8, bytes -= 8) {
        uint32_t low, high;
        std::memcpy(&low, at, 4), std::memcpy(&high, at + 4, 4);
        low ^= state;
        state = of[7][low & 255] ^ of[6][low >> 8 & 255] ^ of[5][low >> 16 & 255] ^ of[4][low >> 24] ^
                of[3][high & 255] ^ of[2][high >> 8 & 255] ^ of[1][high >> 16 & 255] ^ of[0][high >> 24];
    }
#endif
    for (; bytes > 0; ++at, --bytes) state = state >> 8 ^ of[0][(state ^ *at) & 255];
    return state;
}

// --- Folding

enum Copying { NOT_AT_ALL, USUAL, STREAMED };

#if !defined(__AVX2__)
static const bool CAN_FOLD = false;
#else

#define FOLDS __attribute__((target("pclmul")))

static const bool CAN_FOLD = __builtin_cpu_supports("pclmul");

// A product of reflected numbers is one bit too low: the factors are shifted by one.
constexpr uint64_t factor(int bits) { return uint64_t(power_of_x(bits)) << 1; }
static_assert(factor(512 + 32) == 0x154442bd4 && factor(512 - 32) == 0x1c6e41596, "as Intel has it");
static_assert(factor(128 + 32) == 0x1751997d0 && factor(128 - 32) == 0x0ccaa009e, "as Intel has it");

template <int bits>
FOLDS static inline __m128i factors() {
    constexpr uint64_t low = factor(bits + 32), high = factor(bits - 32);
    return _mm_set_epi64x(int64_t(high), int64_t(low));
}

FOLDS static inline __m128i onto(__m128i later, __m128i x, __m128i by) {
    __m128i products = _mm_xor_si128(_mm_clmulepi64_si128(x, by, 0x00), _mm_clmulepi64_si128(x, by, 0x11));
    return _mm_xor_si128(products, later);
}

// Folds bytes, a multiple of 64, or of 512 where it is wide, and copies them if that is asked for. `kept` is what was folded
// before; where nothing was, the state goes into the first bytes. Loads and stores in groups are faster than in turns.
template <Copying copying>
FOLDS static void fold_narrow(char* kept, const uint32_t* state, char* to, const char* from, int64_t bytes) {
    __m128i x[4], y[4];
    const __m128i by = factors<512>();
    int64_t at = 0;
    auto moved = [&](__m128i* into) FOLDS {
        for (int i = 0; i < 4; ++i) into[i] = _mm_loadu_si128((const __m128i*)(from + at) + i);
        for (int i = 0; i < 4 && copying == USUAL; ++i) _mm_storeu_si128((__m128i*)(to + at) + i, into[i]);
        for (int i = 0; i < 4 && copying == STREAMED; ++i) _mm_stream_si128((__m128i*)(to + at) + i, into[i]);
        at += 64;
    };
    if (state) {
        moved(x);
        x[0] = _mm_xor_si128(x[0], _mm_cvtsi32_si128(int(*state)));
    } else {
        for (int i = 0; i < 4; ++i) x[i] = _mm_load_si128((const __m128i*)kept + i);
    }
    while (at < bytes) {
        moved(y);
        for (int i = 0; i < 4; ++i) x[i] = onto(y[i], x[i], by);
    }
    for (int i = 0; i < 4; ++i) _mm_store_si128((__m128i*)kept + i, x[i]);
}

// Folds 64 bytes onto their last 16.
FOLDS static __m128i last_of(const char* kept) {
    __m128i x = _mm_load_si128((const __m128i*)kept);
    for (int i = 1; i < 4; ++i) x = onto(_mm_load_si128((const __m128i*)kept + i), x, factors<128>());
    return x;
}
#endif

#if defined(__AVX512F__)

#define FOLDS_WIDE __attribute__((target("pclmul,vpclmulqdq")))

static const bool IS_WIDE = CAN_FOLD && __builtin_cpu_supports("vpclmulqdq");

FOLDS_WIDE static inline __m512i onto(__m512i later, __m512i x, __m512i by) {
    return _mm512_ternarylogic_epi64(_mm512_clmulepi64_epi128(x, by, 0x00), _mm512_clmulepi64_epi128(x, by, 0x11),
                                     later, 0x96);
}

template <Copying copying>
FOLDS_WIDE static void fold_wide(char* kept, const uint32_t* state, char* to, const char* from, int64_t bytes) {
    __m512i x[8], y[8];
    const __m512i by = _mm512_broadcast_i32x4(factors<4096>());
    int64_t at = 0;
    auto moved = [&](__m512i* into) FOLDS_WIDE {
        for (int i = 0; i < 8; ++i) into[i] = _mm512_loadu_si512((const __m512i*)(from + at) + i);
        for (int i = 0; i < 8 && copying == USUAL; ++i) _mm512_storeu_si512((__m512i*)(to + at) + i, into[i]);
        for (int i = 0; i < 8 && copying == STREAMED; ++i) _mm512_stream_si512((__m512i*)(to + at) + i, into[i]);
        at += 512;
    };
    if (state) {
        moved(x);
        x[0] = _mm512_xor_si512(x[0], _mm512_zextsi128_si512(_mm_cvtsi32_si128(int(*state))));
    } else {
        for (int i = 0; i < 8; ++i) x[i] = _mm512_load_si512((const __m512i*)kept + i);
    }
    while (at < bytes) {
        moved(y);
        for (int i = 0; i < 8; ++i) x[i] = onto(y[i], x[i], by);
    }
    for (int i = 0; i < 8; ++i) _mm512_store_si512((__m512i*)kept + i, x[i]);
}

// Folds 512 bytes onto their last 64, which come to be the first.
FOLDS_WIDE static void narrow_down(char* kept) {
    __m512i x = _mm512_load_si512((const __m512i*)kept);
    const __m512i by = _mm512_broadcast_i32x4(factors<512>());
    for (int i = 1; i < 8; ++i) x = onto(_mm512_load_si512((const __m512i*)kept + i), x, by);
    _mm512_store_si512((__m512i*)kept, x);
}
#else
static const bool IS_WIDE = false;
#endif

template <Copying copying>
static void fold_as(bool wide, char* kept, const uint32_t* state, char* to, const char* from, int64_t bytes) {
#if defined(__AVX512F__)
    if (wide) return fold_wide<copying>(kept, state, to, from, bytes);
#endif
#if defined(__AVX2__)
    fold_narrow<copying>(kept, state, to, from, bytes);
#endif
}

void Crc::fold(Form as, char* to, const char* from, int64_t bytes, bool streamed) {
    const uint32_t* first = form == PLAIN ? &state : nullptr;
    if (!to)
        fold_as<NOT_AT_ALL>(as == WIDE, folded, first, to, from, bytes);
    else if (streamed && reinterpret_cast<uintptr_t>(to) % 64 == 0)
        fold_as<STREAMED>(as == WIDE, folded, first, to, from, bytes);
    else
        fold_as<USUAL>(as == WIDE, folded, first, to, from, bytes);
    form = as;
}

void Crc::narrow() {
#if defined(__AVX512F__)
    if (form == WIDE) narrow_down(folded), form = NARROW;
#endif
}

void Crc::unfold() {
    narrow();
#if defined(__AVX2__)
    if (form == NARROW) {
        char last[16];
        _mm_storeu_si128((__m128i*)last, last_of(folded));
        state = by_tables(0, last, 16), form = PLAIN;
    }
#endif
}

void Crc::add(char* to, const char* from, int64_t bytes, bool streamed) {
    auto fold_most = [&](Form as, int64_t unit) {
        int64_t folds = bytes - bytes % unit;
        fold(as, to, from, folds, streamed);
        to = to ? to + folds : to, from += folds, bytes -= folds;
    };
    if (IS_WIDE && bytes >= 4096 && form == NARROW) unfold();
    if (IS_WIDE && bytes >= 512 && form != NARROW) fold_most(WIDE, 512);
    if (CAN_FOLD && bytes >= 64) narrow(), fold_most(NARROW, 64);
    if (!bytes) return;
    unfold();
    if (to) std::memcpy(to, from, bytes);
    state = by_tables(state, from, bytes);
}

uint32_t Crc::value() {
    unfold();
    return ~state;
}

void crc32(const char* from, int64_t rows, int64_t stride, int64_t bytes, uint32_t* crc) {
    Crc all;
    for (int64_t row = 0; row < rows; ++row) all.add(nullptr, from + row * stride, bytes, false);
    *crc = all.value();
}

}  // namespace ISA
