/* Inner loops of the `steps-zstd` encoding of weights (docs/format-weights.md).
 *
 * Plain functions over arrays that the caller owns: no allocation, no global state, no Python. They are called without the
 * interpreter's lock. The elements of a tensor belong to classes by the magnitude of their OLD bits, and the changes of one
 * class are counted in elements of that class, so both sides have to know for each block of 64 elements which of them
 * belong to which class and how many those are: masks and population counts, which is what vector units do well.
 *
 * loops.h has the two loops over elements, lists.h the lists that changes become and are read from.
 *
 * No input can make a loop leave its arrays: a position is always one of the bits of a block's mask.
 */

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define MAX_THRESHOLDS 7
#define CLASSES (MAX_THRESHOLDS + 1)
#define AHEAD 2048 /* bytes */
#define CHUNK 4096 /* elements whose changes are found first and made then */
#define KINDS 8    /* of changes: none, and steps of 1, 2, ... bits; the last one has all larger ones */

#if defined(__x86_64__) && defined(__GNUC__)
#define HAS_X86 1
#include <immintrin.h>
#else
#define HAS_X86 0
#endif

/* The loops are made for each small number of thresholds, so that those over classes are unrolled. */
#define INLINE __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 8")
#define JOIN3(a, b, c) a##_##b##_##c
#define NAMED(a, b, c) JOIN3(a, b, c)

static inline unsigned count_ones(uint64_t mask) { return (unsigned)__builtin_popcountll(mask); }
static inline unsigned lowest_one(uint64_t mask) { return (unsigned)__builtin_ctzll(mask); }

static inline uint64_t first_bits(uint64_t n) { return n >= 64 ? ~UINT64_C(0) : (UINT64_C(1) << n) - 1; }

static inline uint64_t load_some(const uint8_t *from, uint64_t bytes) {
    uint64_t word = 0;
    for (uint64_t i = 0; i < bytes; i++) word |= (uint64_t)from[i] << (8 * i);
    return word;
}

#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
static inline uint64_t load_u64(const uint8_t *from) {
    uint64_t word;
    memcpy(&word, from, 8);
    return word;
}
static inline void store_u64(uint8_t *to, uint64_t word) { memcpy(to, &word, 8); }
#else
static inline uint64_t load_u64(const uint8_t *from) { return load_some(from, 8); }
static inline void store_u64(uint8_t *to, uint64_t word) {
    for (int i = 0; i < 8; i++) to[i] = (uint8_t)(word >> (8 * i));
}
#endif

/* Ask for the memory a few blocks ahead: the processor's own guess ends at each page. An address that is none does no harm. */
static inline void fetch_ahead(const void *block, unsigned bytes) {
    for (unsigned line = 0; line < bytes; line += 64) __builtin_prefetch((const char *)block + AHEAD + line);
}

/* Append the places of set bits, from `base` on; returns the end. Four are always written, and 8 mostly: how many there are is what
 * nothing can predict, and a wrong guess costs more than that. `end` has room for 8 more than are set. */
static inline uint16_t *put_places(uint64_t mask, unsigned base, uint16_t *end) {
    uint16_t *const stop = end + count_ones(mask);
    
    do {
        for (int i = 0; i < 4; i++, mask &= mask - 1) *end++ = (uint16_t)(base + lowest_one(mask | UINT64_C(1) << 63));
    } while (end < stop);
    return stop;
}

/* Bit i of `bits` at the place of the i-th set bit of `mask`. */
static inline uint64_t deposit_portable(uint64_t bits, uint64_t mask) {
    uint64_t deposited = 0;
    for (bits &= first_bits(count_ones(mask)); bits; bits >>= 1, mask &= mask - 1)
        if (bits & 1) deposited |= mask & (0 - mask);
    return deposited;
}

/* 64 bits of a map from bit `at` on; 8 bytes behind the last one that is asked for can be read. */
static inline uint64_t bits_from(const uint8_t *map, uint64_t at) {
    const uint8_t *from = map + (at >> 3);
    const unsigned shift = at & 7;
    return load_u64(from) >> shift | ((uint64_t)from[8] << 1) << (63 - shift);
}

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
        UNROLL                                                                                                          \
        for (int part = 0; part < 64; part += PER_REGISTER) {                                                           \
            const __m256i old = _mm256_loadu_si256((const __m256i *)(before + part));                                   \
            if (after) {                                                                                                \
                const __m256i new = _mm256_loadu_si256((const __m256i *)(after + part));                                \
                const uint64_t equal = MOVEMASK(EQUAL_##BITS(old, new));                                                \
                differs |= (~equal & first_bits(PER_REGISTER)) << part;                                                 \
            }                                                                                                           \
            const __m256i magnitude = _mm256_and_si256(old, sign_off);                                                  \
            UNROLL                                                                                                      \
            for (int j = 0; j < num; j++)                                                                               \
                at_least[j] |= (uint64_t)MOVEMASK(GREATER_##BITS(magnitude, SET1_##BITS((int)thresholds[j] - 1)))       \
                               << part;                                                                                 \
        }                                                                                                               \
        *changed = differs;                                                                                             \
        UNROLL                                                                                                          \
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
        UNROLL                                                                                                          \
        for (int part = 0; part < 64; part += PER_REGISTER) {                                                           \
            const __m512i old = _mm512_loadu_si512(before + part);                                                      \
            if (after)                                                                                                  \
                differs |= (uint64_t)_mm512_cmpneq_epi##BITS##_mask(old, _mm512_loadu_si512(after + part)) << part;     \
            const __m512i magnitude = _mm512_and_si512(old, sign_off);                                                  \
            UNROLL                                                                                                      \
            for (int j = 0; j < num; j++)                                                                               \
                at_least[j] |= (uint64_t)_mm512_cmpge_epi##BITS##_mask(magnitude, SET1((int)thresholds[j])) << part;    \
        }                                                                                                               \
        *changed = differs;                                                                                             \
        UNROLL                                                                                                          \
        for (int j = 0; j < num; j++) reach[j] = at_least[j];                                                           \
    }

DEFINE_AVX512_MASKS(8, 64, _mm512_set1_epi8)
DEFINE_AVX512_MASKS(16, 32, _mm512_set1_epi16)
DEFINE_AVX512_MASKS(32, 16, _mm512_set1_epi32)

AVX2 static inline uint64_t deposit_bmi2(uint64_t bits, uint64_t mask) { return _pdep_u64(bits, mask); }

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

/* Append the changes of n elements to the lists of their classes. For each class: `passed`: its elements so far; `last`: how many
 * of them up to its last change; `counts`: its changes so far; list c is gaps[c * capacity ...]. Returns 1, and leaves the
 * lists unusable, when there are more than `capacity` changes in all. */
int steps_scan(int bytes, const void *before, const void *after, uint64_t n, const uint32_t *thresholds, int num,
               uint64_t *passed, uint64_t *last, uint64_t *counts, uint64_t capacity, uint32_t *gaps, uint32_t *values) {
    switch (bytes) {
    case 1: return DISPATCH(scan, 8, before, after, n, thresholds, num, passed, last, counts, capacity, gaps, values);
    case 2: return DISPATCH(scan, 16, before, after, n, thresholds, num, passed, last, counts, capacity, gaps, values);
    default: return DISPATCH(scan, 32, before, after, n, thresholds, num, passed, last, counts, capacity, gaps, values);
    }
}

/* Where the changes of each class are among its elements, as a map of bits: bit r of map c is set when the element of class c before
 * which there are r others changes. The caller has zeroed them. Maps are `map_bytes` apart. Returns 1 when one lies beyond
 * `elements`, which no segment of so many has. */
int steps_map(int classes, const uint64_t *ends, const uint32_t *gaps, uint64_t elements, uint8_t *maps, uint64_t map_bytes) {
    uint64_t k = 0;
    for (int c = 0; c < classes; c++, maps += map_bytes) {
        uint64_t rank = 0;
        for (; k < ends[c]; k++, rank++) {
            rank += gaps[k];
            if (rank >= elements) return 1;
            maps[rank >> 3] |= (uint8_t)(1u << (rank & 7));
        }
    }
    return 0;
}

/* Zeroes these maps again, for another segment. */
void steps_unmap(int classes, const uint64_t *ends, const uint32_t *gaps, uint8_t *maps, uint64_t map_bytes) {
    uint64_t k = 0;
    for (int c = 0; c < classes; c++, maps += map_bytes) {
        uint64_t rank = 0;
        for (; k < ends[c]; k++, rank++) maps[(rank += gaps[k]) >> 3] = 0;
    }
}

/* Apply changes to n elements in place. For each class: `passed`: its elements so far; `cursors`: where its next value is. No more
 * elements may pass in all than the maps have bits, but for the last 16 bytes. */
void steps_apply(int bytes, void *elements, uint64_t n, const uint32_t *thresholds, int num, uint64_t *passed,
                 uint64_t *cursors, const uint8_t *maps, uint64_t map_bytes, const uint32_t *values) {
    switch (bytes) {
    case 1: DISPATCH(apply, 8, elements, n, thresholds, num, passed, cursors, maps, map_bytes, values); break;
    case 2: DISPATCH(apply, 16, elements, n, thresholds, num, passed, cursors, maps, map_bytes, values); break;
    default: DISPATCH(apply, 32, elements, n, thresholds, num, passed, cursors, maps, map_bytes, values); break;
    }
}

#include "lists.h"

/* ---- where classes begin ---------------------------------------------------------------------------------------------- */

/* Of which k of n elements change, and by how much, with so many changes of each kind. */
static double entropy_bits(double n, const double *begin, const double *end) {
    double k = 0, bits = 0;
    for (int kind = 1; kind < KINDS; kind++) {
        const double of_kind = end[kind] - begin[kind];
        k += of_kind;
        if (of_kind > 0) bits -= of_kind * log2(of_kind);
    }
    if (k > 0) bits += k * log2(k);
    const double share = (k + 0.5) / (n + 1.0);
    return bits - (k * log2(share) + (n - k) * log2(1 - share));
}

/* First keys (of 256) of the second and later classes, so that positions, steps and classes cost the fewest bits; returns how many,
 * at most `most`. `counts`: as of steps_count; each that was counted stands for `weight` elements. Dynamic programming over the
 * keys that occur; neighbours without any change are one. */
int steps_cut(const uint64_t *counts, double weight, double bits_for_a_class, int most, uint32_t *cuts) {
    double total[257][KINDS] = {{0}}, elements[257] = {0}, best[MAX_THRESHOLDS + 1][257];
    int keys[256], from[MAX_THRESHOLDS + 1][257], num = 0, was_changed = 1;
    for (int key = 0; key < 256; key++, counts += KINDS) {
        uint64_t of_key = 0;
        for (int kind = 0; kind < KINDS; kind++) of_key += counts[kind];
        if (!of_key) continue;
        const int is_changed = of_key > counts[0];
        if (is_changed || was_changed) {
            keys[num++] = key;
            memcpy(total[num], total[num - 1], sizeof *total);
            elements[num] = elements[num - 1];
        }
        for (int kind = 1; kind < KINDS; kind++) total[num][kind] += weight * (double)counts[kind];
        elements[num] += weight * (double)of_key;
        was_changed = is_changed;
    }
    if (num == 0 || (num == 1 && !was_changed)) return 0;
    double cost[num][num + 1]; /* of one class that holds the keys from begin up to, without, end */
    for (int begin = 0; begin < num; begin++)
        for (int end = begin + 1; end <= num; end++)
            cost[begin][end] = bits_for_a_class + entropy_bits(elements[end] - elements[begin], total[begin], total[end]);
    int classes = 0;
    for (int end = 1; end <= num; end++) best[0][end] = cost[0][end];
    for (int c = 1; c <= most && c < num; c++) {
        for (int end = 1; end <= num; end++) {
            best[c][end] = INFINITY;
            for (int begin = c; begin < end; begin++) {
                const double bits = best[c - 1][begin] + cost[begin][end];
                if (bits < best[c][end]) best[c][end] = bits, from[c][end] = begin;
            }
        }
        if (best[c][num] < best[classes][num]) classes = c;
    }
    for (int c = classes, end = num; c > 0; c--) {
        end = from[c][end];
        cuts[c - 1] = (uint32_t)keys[end];
    }
    return classes;
}

/* ---- who changes how often, by old magnitude --------------------------------------------------------------------------- */

/* Neighbours often have one key: four tables, so that none waits for the one before it to be stored. */
#define COUNT_LOOP(BITS)                                                                                                \
    {                                                                                                                   \
        const uint##BITS##_t *old = before, *new = after;                                                               \
        const uint##BITS##_t sign_off = (uint##BITS##_t)(((uint##BITS##_t)~(uint##BITS##_t)0) >> 1);                    \
        for (uint64_t begin = 0; begin < n; begin += stride)                                                            \
            for (uint64_t i = begin; i < n && i < begin + run; i++) {                                                   \
                const unsigned key = ((old[i] & sign_off) >> shift) & 255u;                                             \
                if (old[i] == new[i])                                                                                   \
                    same[i & 3][key]++;                                                                                 \
                else                                                                                                    \
                    counts[key * KINDS + kind_of(ZIGZAG((uint##BITS##_t)(new[i] - old[i]), BITS, uint##BITS##_t))]++;   \
            }                                                                                                           \
    }

/* How many bits the size of a step has that is not 0, the most at most. */
static inline unsigned kind_of(uint32_t zigzag) {
    const unsigned bits = 32u - (unsigned)__builtin_clz((zigzag >> 1) + (zigzag & 1u));
    return bits < KINDS ? bits : KINDS - 1;
}

/* Adds to `counts`, of shape [256, KINDS], by the 8 highest bits below the sign and the kind of change, the first `run` elements of every
 * `stride`. */
void steps_count(int bytes, const void *before, const void *after, uint64_t n, uint64_t run, uint64_t stride, int shift,
                 uint64_t *counts) {
    uint64_t same[4][256] = {{0}};
    switch (bytes) {
    case 1: COUNT_LOOP(8) break;
    case 2: COUNT_LOOP(16) break;
    default: COUNT_LOOP(32) break;
    }
    for (int key = 0; key < 256; key++)
        for (int table = 0; table < 4; table++) counts[key * KINDS] += same[table][key];
}
