/* Inner loops of the `steps-zstd` encoding of weights (docs/format-weights.md).
 *
 * Plain functions over arrays that the caller owns: no allocation, no global state, no Python. They are called without the
 * interpreter's lock. The elements of a tensor belong to classes by the magnitude of their OLD bits, and the changes of one
 * class are counted in elements of that class, so both sides have to know for each block of 64 elements which of them
 * belong to which class and how many those are: masks and population counts, which is what vector units do well.
 *
 * No input can make a loop leave its arrays: a position is always one of the bits of a block's mask.
 */

#include <math.h>
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
 * lowest first. Without branches, as nothing about the next number can be predicted. Returns how many bits were written;
 * `bits` has room for 4 bytes a number and 8 more, all of which may be written to. */
static uint64_t tokenise(const uint32_t *numbers, uint64_t n, uint8_t *tokens, uint8_t *bits) {
    uint64_t pool = 0, total = 0;
    unsigned held = 0;
    for (uint64_t i = 0; i < n; i++) {
        const uint32_t number = numbers[i];
        const unsigned width = 31u - (unsigned)__builtin_clz(number | 1u);
        const int is_small = number < 16;
        const unsigned low = is_small ? 0 : width - 2;
        const unsigned large = 16 + (width - 4) * 4 + ((number >> low) & 3);
        tokens[i] = (uint8_t)(is_small ? number : large);
        pool |= (number & ((UINT64_C(1) << low) - 1)) << held;
        held += low;
        total += low;
        store_u64(bits, pool);
        bits += held >> 3;
        pool >>= held & ~7u;
        held &= 7;
    }
    return total;
}

/* The inverse. Returns bits used; -1 when a token is none of tokenise's or there are too few bits. */
static int64_t detokenise(const uint8_t *tokens, uint64_t n, const uint8_t *bits, uint64_t num_bytes, uint32_t *numbers) {
    uint64_t used = 0;
    for (uint64_t i = 0; i < n; i++) {
        const unsigned token = tokens[i];
        const int is_small = token < 16;
        const unsigned width = is_small ? 0 : (token - 16) / 4 + 4, low = is_small ? 0 : width - 2;
        if (token > 127 || used + low > 8 * num_bytes) return -1;
        const uint64_t at = used >> 3;
        const uint64_t pool = (at + 8 <= num_bytes ? load_u64(bits + at) : load_some(bits + at, num_bytes - at)) >> (used & 7);
        const uint32_t large = (uint32_t)((4u + (token & 3u)) << low | (pool & ((UINT64_C(1) << low) - 1)));
        numbers[i] = is_small ? token : large;
        used += low;
    }
    return (int64_t)used;
}

/* ---- one unit in the last place is a bit, the rest are exceptions ----------------------------------------------------- */

/* values (zigzag, never 0): 1 and 2 become one bit each; others go to the exceptions with the count of values since the last one.
 * `bits` is zeroed by the caller, (n + 7) / 8 bytes. Returns the number of exceptions. */
static uint64_t steps_split(const uint32_t *values, uint64_t n, uint8_t *bits, uint32_t *gaps, uint32_t *rest) {
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
static int steps_merge(const uint8_t *bits, uint64_t n, const uint32_t *gaps, const uint32_t *rest, uint64_t exceptions,
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

/* ---- one class of a segment, as lists ----------------------------------------------------------------------------------- */

/* One list of numbers: as it is, or, where most are 0, the zeros before each other one and these others less 1. */
typedef struct {
    uint64_t is_sparse, first, first_bytes, second, second_bytes; /* tokens, and bytes of bits, of the one or two lists */
} packed_numbers;

typedef struct {
    uint8_t *tokens, *bits;
    uint32_t *scratch;
} packing;

static uint64_t pack_plain(packing *to, const uint32_t *numbers, uint64_t n) {
    const uint64_t bytes = (tokenise(numbers, n, to->tokens, to->bits) + 7) / 8;
    to->tokens += n;
    to->bits += bytes;
    return bytes;
}

static void pack_numbers(packing *to, const uint32_t *numbers, uint64_t n, packed_numbers *packed) {
    uint64_t others = 0;
    for (uint64_t i = 0; i < n; i++) others += numbers[i] != 0;
    memset(packed, 0, sizeof *packed);
    packed->first = n;
    if (n == 0 || 2 * others >= n) {
        packed->first_bytes = pack_plain(to, numbers, n);
        return;
    }
    uint32_t *gaps = to->scratch, *rest = gaps + others;
    uint64_t last = 0, k = 0;
    for (uint64_t i = 0; i < n; i++) {
        if (!numbers[i]) continue;
        gaps[k] = (uint32_t)(i - last);
        rest[k++] = numbers[i] - 1;
        last = i + 1;
    }
    packed->is_sparse = 1;
    packed->first = packed->second = others;
    packed->first_bytes = pack_plain(to, gaps, others);
    packed->second_bytes = pack_plain(to, rest, others);
}

/* The changes of one class as lists: gaps; then either all values less 1, when most are more than one unit (`directions` is
 * then unused, and n + 1 returned), or the directions as bits, gaps of exceptions and exceptions less 3 (returns how many).
 * `numbers`: 3n for scratch. `tokens`: 3n, `bits`: 12n + 32, `directions`: (n + 7) / 8, zeroed here. `packed`: three. */
uint64_t steps_pack(const uint32_t *gaps, const uint32_t *values, uint64_t n, uint32_t *numbers, uint8_t *tokens,
                    uint8_t *bits, uint8_t *directions, packed_numbers *packed) {
    packing to = {tokens, bits, numbers + 2 * n};
    uint64_t exceptions = 0;
    for (uint64_t i = 0; i < n; i++) exceptions += values[i] > 2;
    pack_numbers(&to, gaps, n, packed);
    memset(packed + 1, 0, 2 * sizeof *packed);
    if (2 * exceptions > n) {
        for (uint64_t i = 0; i < n; i++) numbers[i] = values[i] - 1;
        pack_numbers(&to, numbers, n, packed + 1);
        return n + 1;
    }
    memset(directions, 0, (n + 7) / 8);
    steps_split(values, n, directions, numbers, numbers + n);
    pack_numbers(&to, numbers, exceptions, packed + 1);
    pack_numbers(&to, numbers + n, exceptions, packed + 2);
    return exceptions;
}

static int unpack_plain(const uint8_t *tokens, uint64_t n, const uint8_t *bits, uint64_t bytes, uint32_t *numbers) {
    const int64_t used = detokenise(tokens, n, bits, bytes, numbers);
    return used < 0 || (uint64_t)(used + 7) / 8 != bytes;
}

/* The inverse of pack_numbers, from lists that follow each other; -1 when they are none. */
static int unpack_numbers(const packed_numbers *packed, uint64_t n, const uint8_t **tokens, const uint8_t **bits,
                          uint32_t *scratch, uint32_t *numbers) {
    uint32_t *first = packed->is_sparse ? scratch : numbers;
    if (unpack_plain(*tokens, packed->first, *bits, packed->first_bytes, first)) return -1;
    *tokens += packed->first;
    *bits += packed->first_bytes;
    if (!packed->is_sparse) return 0;
    uint32_t *second = scratch + packed->first;
    if (unpack_plain(*tokens, packed->second, *bits, packed->second_bytes, second)) return -1;
    *tokens += packed->second;
    *bits += packed->second_bytes;
    memset(numbers, 0, n * sizeof *numbers);
    uint64_t place = 0;
    for (uint64_t k = 0; k < packed->first; k++, place++) {
        place += first[k];
        if (place >= n) return -1;
        numbers[place] = second[k] + 1;
    }
    return 0;
}

/* The inverse of steps_pack. The caller has made sure that the lists have the sizes that `packed`, n and `exceptions` say.
 * `scratch`: 4n. Returns -1 when something is no list of steps_pack for elements of at most `largest`. */
int steps_unpack(const packed_numbers *packed, uint64_t n, uint64_t exceptions, const uint8_t *tokens, const uint8_t *bits,
                 const uint8_t *directions, uint32_t largest, uint32_t *scratch, uint32_t *gaps, uint32_t *values) {
    if (unpack_numbers(packed, n, &tokens, &bits, scratch, gaps)) return -1;
    if (exceptions == n + 1) {
        if (unpack_numbers(packed + 1, n, &tokens, &bits, scratch, values)) return -1;
        for (uint64_t i = 0; i < n; i++) {
            if (values[i] >= largest) return -1;
            values[i]++;
        }
        return 0;
    }
    uint32_t *places = scratch + 2 * n, *rest = places + n;
    if (unpack_numbers(packed + 1, exceptions, &tokens, &bits, scratch, places)) return -1;
    if (unpack_numbers(packed + 2, exceptions, &tokens, &bits, scratch, rest)) return -1;
    return steps_merge(directions, n, places, rest, exceptions, largest, values);
}

/* ---- where classes begin ---------------------------------------------------------------------------------------------- */

static double entropy_bits(double n, double k) {
    double share = (k + 0.5) / (n + 1.0);
    return -(k * log2(share) + (n - k) * log2(1 - share));
}

/* First keys (of 256) of the second and later classes, so that positions and classes cost the fewest bits; returns how many, at
 * most `most`. `weight`: elements of the tensor for each that was counted. Dynamic programming over the keys that occur. */
int steps_cut(const uint64_t *elements, const uint64_t *changes, double weight, double bits_for_a_class, int most,
              uint32_t *cuts) {
    double total_n[257] = {0}, total_k[257] = {0}, best[MAX_THRESHOLDS + 1][257];
    int keys[256], from[MAX_THRESHOLDS + 1][257], num = 0;
    for (int key = 0; key < 256; key++) {
        if (!elements[key]) continue;
        keys[num] = key;
        total_n[num + 1] = total_n[num] + weight * (double)elements[key];
        total_k[num + 1] = total_k[num] + weight * (double)changes[key];
        num++;
    }
    if (num == 0 || total_k[num] == 0) return 0;
    double cost[num][num + 1]; /* of one class that holds the keys from begin up to, without, end */
    for (int begin = 0; begin < num; begin++)
        for (int end = begin + 1; end <= num; end++)
            cost[begin][end] = bits_for_a_class +
                               entropy_bits(total_n[end] - total_n[begin], total_k[end] - total_k[begin]);
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
