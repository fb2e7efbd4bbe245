/* Inner loops of the `steps-zstd` encoding of weights (docs/format-weights.md).
 *
 * Plain functions over arrays that the caller owns: no allocation, no global state, no Python. They are called without the
 * interpreter's lock. The elements of a tensor belong to classes by the magnitude of their OLD bits, and the changes of one
 * class are counted in elements of that class, so both sides have to know for each block of 64 elements which of them
 * belong to which class and how many those are: masks and population counts, which is what vector units do well.
 *
 * No input can make a loop leave its arrays: a position is always one of the bits of a block's mask.
 */

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define MAX_THRESHOLDS 7
#define NEVER (UINT64_C(1) << 62)

#if defined(__x86_64__) && defined(__GNUC__)
#define HAS_X86 1
#include <immintrin.h>
#else
#define HAS_X86 0
#endif

/* The loops are made for each small number of thresholds, so that those over classes are unrolled. */
#define INLINE __attribute__((always_inline))
#define JOIN3(a, b, c) a##_##b##_##c
#define NAMED(a, b, c) JOIN3(a, b, c)

static inline unsigned count_ones(uint64_t mask) { return (unsigned)__builtin_popcountll(mask); }
static inline unsigned lowest_one(uint64_t mask) { return (unsigned)__builtin_ctzll(mask); }

/* Place of the set bit that has `rank` set bits below it; rank < count_ones(mask). */
static inline unsigned select_portable(uint64_t mask, uint64_t rank) {
    while (rank--) mask &= mask - 1;
    return lowest_one(mask);
}

static inline uint64_t first_bits(uint64_t n) { return n >= 64 ? ~UINT64_C(0) : (UINT64_C(1) << n) - 1; }

/* Difference as a number: 2, 4, 6, ... for +1, +2, +3; 1, 3, 5, ... for -1, -2, -3 (in the width of the element). */
#define ZIGZAG(step, bits, word) ((word)((word)((step) << 1) ^ (word)(0 - (word)((step) >> ((bits) - 1)))))
#define UNZIGZAG(value, word) ((word)((word)((value) >> 1) ^ (word)(0 - (word)((value) & 1))))

/* ---- masks of one block: who changed, and whose old magnitude reaches each threshold -------------------------------- */

#define DEFINE_PORTABLE_MASKS(BITS)                                                                                     \
    static inline void masks_##BITS##_portable(const uint##BITS##_t *before, const uint##BITS##_t *after, unsigned n,   \
                                               const uint32_t *thresholds, int num, uint64_t *changed,                  \
                                               uint64_t *reach) {                                                       \
        const uint##BITS##_t sign_off = (uint##BITS##_t)(((uint##BITS##_t)~(uint##BITS##_t)0) >> 1);                    \
        uint64_t differs = 0;                                                                                           \
        for (int j = 0; j < num; j++) reach[j] = 0;                                                                     \
        for (unsigned i = 0; i < n; i++) {                                                                              \
            const uint##BITS##_t magnitude = before[i] & sign_off;                                                      \
            if (after) differs |= (uint64_t)(before[i] != after[i]) << i;                                               \
            for (int j = 0; j < num; j++) reach[j] |= (uint64_t)(magnitude >= thresholds[j]) << i;                      \
        }                                                                                                               \
        *changed = differs;                                                                                             \
    }

DEFINE_PORTABLE_MASKS(8)
DEFINE_PORTABLE_MASKS(16)
DEFINE_PORTABLE_MASKS(32)

#if HAS_X86

#define AVX2 __attribute__((target("avx2,bmi,bmi2,popcnt")))
#define AVX512 __attribute__((target("avx2,bmi,bmi2,popcnt,avx512f,avx512bw,avx512vl")))

/* magnitude >= threshold  <=>  magnitude > threshold - 1, with both as signed numbers; thresholds are at least 1. */
#define DEFINE_AVX2_MASKS(BITS, PER_REGISTER, MOVEMASK)                                                                 \
    AVX2 static inline void masks_##BITS##_avx2(const uint##BITS##_t *before, const uint##BITS##_t *after, unsigned n,  \
                                                const uint32_t *thresholds, int num, uint64_t *changed,                 \
                                                uint64_t *reach) {                                                      \
        if (n < 64) {                                                                                                   \
            masks_##BITS##_portable(before, after, n, thresholds, num, changed, reach);                                 \
            return;                                                                                                     \
        }                                                                                                               \
        const __m256i sign_off = SET1_##BITS((int)(UINT32_MAX >> (33 - BITS)));                                         \
        uint64_t differs = 0, at_least[MAX_THRESHOLDS] = {0};                                                           \
        for (int part = 0; part < 64; part += PER_REGISTER) {                                                           \
            const __m256i old = _mm256_loadu_si256((const __m256i *)(before + part));                                   \
            if (after) {                                                                                                \
                const __m256i new = _mm256_loadu_si256((const __m256i *)(after + part));                                \
                const uint64_t equal = MOVEMASK(EQUAL_##BITS(old, new));                                                \
                differs |= (~equal & first_bits(PER_REGISTER)) << part;                                                 \
            }                                                                                                           \
            const __m256i magnitude = _mm256_and_si256(old, sign_off);                                                  \
            for (int j = 0; j < num; j++)                                                                               \
                at_least[j] |= (uint64_t)MOVEMASK(GREATER_##BITS(magnitude, SET1_##BITS((int)thresholds[j] - 1)))       \
                               << part;                                                                                 \
        }                                                                                                               \
        *changed = differs;                                                                                             \
        for (int j = 0; j < num; j++) reach[j] = at_least[j];                                                           \
    }

#define SET1_8(x) _mm256_set1_epi8((char)(x))
#define SET1_16(x) _mm256_set1_epi16((short)(x))
#define SET1_32(x) _mm256_set1_epi32((int)(x))
#define EQUAL_8 _mm256_cmpeq_epi8
#define EQUAL_16 _mm256_cmpeq_epi16
#define EQUAL_32 _mm256_cmpeq_epi32
#define GREATER_8 _mm256_cmpgt_epi8
#define GREATER_16 _mm256_cmpgt_epi16
#define GREATER_32 _mm256_cmpgt_epi32

AVX2 static inline uint32_t movemask_8(__m256i lanes) { return (uint32_t)_mm256_movemask_epi8(lanes); }
AVX2 static inline uint32_t movemask_16(__m256i lanes) {
    const __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(lanes), _mm256_extracti128_si256(lanes, 1));
    return (uint32_t)_mm_movemask_epi8(bytes);
}
AVX2 static inline uint32_t movemask_32(__m256i lanes) {
    return (uint32_t)_mm256_movemask_ps(_mm256_castsi256_ps(lanes));
}

DEFINE_AVX2_MASKS(8, 32, movemask_8)
DEFINE_AVX2_MASKS(16, 16, movemask_16)
DEFINE_AVX2_MASKS(32, 8, movemask_32)

#define DEFINE_AVX512_MASKS(BITS, PER_REGISTER, SET1)                                                                   \
    AVX512 static inline void masks_##BITS##_avx512(const uint##BITS##_t *before, const uint##BITS##_t *after,          \
                                                    unsigned n, const uint32_t *thresholds, int num,                    \
                                                    uint64_t *changed, uint64_t *reach) {                               \
        if (n < 64) {                                                                                                   \
            masks_##BITS##_portable(before, after, n, thresholds, num, changed, reach);                                 \
            return;                                                                                                     \
        }                                                                                                               \
        const __m512i sign_off = SET1((int)(UINT32_MAX >> (33 - BITS)));                                                \
        uint64_t differs = 0, at_least[MAX_THRESHOLDS] = {0};                                                           \
        for (int part = 0; part < 64; part += PER_REGISTER) {                                                           \
            const __m512i old = _mm512_loadu_si512(before + part);                                                      \
            if (after)                                                                                                  \
                differs |= (uint64_t)_mm512_cmpneq_epi##BITS##_mask(old, _mm512_loadu_si512(after + part)) << part;     \
            const __m512i magnitude = _mm512_and_si512(old, sign_off);                                                  \
            for (int j = 0; j < num; j++)                                                                               \
                at_least[j] |= (uint64_t)_mm512_cmpge_epi##BITS##_mask(magnitude, SET1((int)thresholds[j])) << part;    \
        }                                                                                                               \
        *changed = differs;                                                                                             \
        for (int j = 0; j < num; j++) reach[j] = at_least[j];                                                           \
    }

DEFINE_AVX512_MASKS(8, 64, _mm512_set1_epi8)
DEFINE_AVX512_MASKS(16, 32, _mm512_set1_epi16)
DEFINE_AVX512_MASKS(32, 16, _mm512_set1_epi32)

AVX2 static inline unsigned select_bmi2(uint64_t mask, uint64_t rank) {
    return (unsigned)_tzcnt_u64(_pdep_u64(UINT64_C(1) << rank, mask));
}

#endif /* HAS_X86 */

/* ---- the two loops, once for each element width and instruction set ------------------------------------------------- */

#define BITS 8
#include "loops.h"
#undef BITS
#define BITS 16
#include "loops.h"
#undef BITS
#define BITS 32
#include "loops.h"
#undef BITS

/* 0: any machine; 1: AVX2 and BMI2; 2: AVX-512 BW. `most` lets a test ask for less than the machine has. */
static int level = -1;

int steps_level(int most) {
    level = 0;
#if HAS_X86
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("popcnt")) level = 1;
    if (level == 1 && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl")) level = 2;
#endif
    if (level > most) level = most;
    return level;
}

#if HAS_X86
#define DISPATCH(function, bits, ...)                                                                                   \
    (level == 2   ? NAMED(function, bits, avx512)(__VA_ARGS__)                                                          \
     : level == 1 ? NAMED(function, bits, avx2)(__VA_ARGS__)                                                            \
                  : NAMED(function, bits, portable)(__VA_ARGS__))
#else
#define DISPATCH(function, bits, ...) NAMED(function, bits, portable)(__VA_ARGS__)
#endif

/* Append the changes of n elements to the lists of their classes. `runs`: elements of each class since its last change;
 * `counts`: changes of each class so far; list c is gaps[c * capacity ...]. Returns 1, and leaves the lists unusable, when
 * there are more than `capacity` changes in all. */
int steps_scan(int bytes, const void *before, const void *after, uint64_t n, const uint32_t *thresholds, int num,
               uint64_t *runs, uint64_t *counts, uint64_t capacity, uint32_t *gaps, uint32_t *values) {
    switch (bytes) {
    case 1: return DISPATCH(scan, 8, before, after, n, thresholds, num, runs, counts, capacity, gaps, values);
    case 2: return DISPATCH(scan, 16, before, after, n, thresholds, num, runs, counts, capacity, gaps, values);
    default: return DISPATCH(scan, 32, before, after, n, thresholds, num, runs, counts, capacity, gaps, values);
    }
}

/* Apply changes to n elements in place. `ahead`: elements of each class before its next change, from the first of these n on;
 * `cursors`, `ends`: where each class is in the common lists. */
void steps_apply(int bytes, void *elements, uint64_t n, const uint32_t *thresholds, int num, uint64_t *ahead,
                 uint64_t *cursors, const uint64_t *ends, const uint32_t *gaps, const uint32_t *values) {
    switch (bytes) {
    case 1: DISPATCH(apply, 8, elements, n, thresholds, num, ahead, cursors, ends, gaps, values); break;
    case 2: DISPATCH(apply, 16, elements, n, thresholds, num, ahead, cursors, ends, gaps, values); break;
    default: DISPATCH(apply, 32, elements, n, thresholds, num, ahead, cursors, ends, gaps, values); break;
    }
}

/* ---- numbers as tokens and bits -------------------------------------------------------------------------------------- */

/* Below 16: the token is the number. Above: 4 tokens for each power of two, the bits below the two after the leading one apart,
 * lowest first. Returns how many bits were written; `bits` has room for 4 bytes a number and 8 more. */
uint64_t steps_tokenise(const uint32_t *numbers, uint64_t n, uint8_t *tokens, uint8_t *bits) {
    uint64_t pool = 0, total = 0;
    unsigned held = 0;
    for (uint64_t i = 0; i < n; i++) {
        const uint32_t number = numbers[i];
        if (number < 16) {
            tokens[i] = (uint8_t)number;
            continue;
        }
        const unsigned width = 31u - (unsigned)__builtin_clz(number), low = width - 2;
        tokens[i] = (uint8_t)(16 + (width - 4) * 4 + ((number >> low) & 3));
        pool |= (uint64_t)(number & ((1u << low) - 1)) << held;
        held += low;
        total += low;
        while (held >= 8) {
            *bits++ = (uint8_t)pool;
            pool >>= 8;
            held -= 8;
        }
    }
    if (held) *bits = (uint8_t)pool;
    return total;
}

/* The inverse. Returns bits used; -1 when a token is none of steps_tokenise's or there are too few bits. */
int64_t steps_detokenise(const uint8_t *tokens, uint64_t n, const uint8_t *bits, uint64_t num_bytes, uint32_t *numbers) {
    uint64_t pool = 0, taken = 0, used = 0;
    unsigned held = 0;
    for (uint64_t i = 0; i < n; i++) {
        const unsigned token = tokens[i];
        if (token < 16) {
            numbers[i] = token;
            continue;
        }
        if (token > 127) return -1;
        const unsigned width = (token - 16) / 4 + 4, low = width - 2;
        while (held < low) {
            if (taken == num_bytes) return -1;
            pool |= (uint64_t)bits[taken++] << held;
            held += 8;
        }
        numbers[i] = (1u << width) | ((token & 3u) << low) | (uint32_t)(pool & ((UINT64_C(1) << low) - 1));
        pool >>= low;
        held -= low;
        used += low;
    }
    return (int64_t)used;
}

/* ---- one unit in the last place is a bit, the rest are exceptions ----------------------------------------------------- */

/* values (zigzag, never 0): 1 and 2 become one bit each; others go to the exceptions with the count of values since the last one.
 * `bits` is zeroed by the caller, (n + 7) / 8 bytes. Returns the number of exceptions. */
uint64_t steps_split(const uint32_t *values, uint64_t n, uint8_t *bits, uint32_t *gaps, uint32_t *rest) {
    uint64_t exceptions = 0, last = 0, bit = 0;
    for (uint64_t i = 0; i < n; i++) {
        const uint32_t value = values[i];
        if (value <= 2) {
            bits[bit >> 3] |= (uint8_t)((value - 1) << (bit & 7));
            bit++;
            continue;
        }
        gaps[exceptions] = (uint32_t)(i - last);
        rest[exceptions++] = value - 3;
        last = i + 1;
    }
    return exceptions;
}

/* The inverse. Returns 0, or -1 when an exception lies beyond the n values, or is no value of this width. */
int steps_merge(const uint8_t *bits, uint64_t n, const uint32_t *gaps, const uint32_t *rest, uint64_t exceptions,
                uint32_t largest, uint32_t *values) {
    uint64_t i = 0, bit = 0;
    for (uint64_t e = 0; e < exceptions; e++) {
        const uint64_t place = i + gaps[e];
        if (place >= n || rest[e] > largest - 3) return -1;
        for (; i < place; i++, bit++) values[i] = 1u + ((bits[bit >> 3] >> (bit & 7)) & 1u);
        values[i++] = rest[e] + 3;
    }
    for (; i < n; i++, bit++) values[i] = 1u + ((bits[bit >> 3] >> (bit & 7)) & 1u);
    return 0;
}

/* ---- who changes how often, by old magnitude --------------------------------------------------------------------------- */

#define COUNT_LOOP(BITS)                                                                                                \
    {                                                                                                                   \
        const uint##BITS##_t *old = before, *new = after;                                                               \
        const uint##BITS##_t sign_off = (uint##BITS##_t)(((uint##BITS##_t)~(uint##BITS##_t)0) >> 1);                    \
        for (uint64_t begin = 0; begin < n; begin += stride)                                                            \
            for (uint64_t i = begin; i < n && i < begin + run; i++) {                                                   \
                const unsigned key = (unsigned)((old[i] & sign_off) >> shift) & 255u;                                   \
                elements[key]++;                                                                                        \
                changes[key] += old[i] != new[i];                                                                       \
            }                                                                                                           \
    }

/* Adds to `elements` and `changes` (256 each), by the 8 highest bits below the sign, the first `run` elements of every `stride`. */
void steps_count(int bytes, const void *before, const void *after, uint64_t n, uint64_t run, uint64_t stride, int shift,
                 uint64_t *elements, uint64_t *changes) {
    switch (bytes) {
    case 1: COUNT_LOOP(8) break;
    case 2: COUNT_LOOP(16) break;
    default: COUNT_LOOP(32) break;
    }
}
