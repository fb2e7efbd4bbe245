/* The two loops over a tensor, for elements of BITS bits; included by steps.c once for each width.
 *
 * The body is written once and made for each instruction set, because only a function that is compiled for a set may inline the
 * mask function of that set. */


#define DEFINE_LOOPS(SET, TARGET, SELECT)                                                                               \
    TARGET static inline INLINE int NAMED(scan_by, BITS, SET)(const void *before_, const void *after_, uint64_t n,      \
                                             const uint32_t *thresholds, int num, uint64_t *runs, uint64_t *counts,     \
                                             uint64_t capacity, uint32_t *gaps, uint32_t *values) {                     \
        const ELEMENT *before = before_, *after = after_;                                                               \
        uint64_t reach[MAX_THRESHOLDS + 1], run[MAX_THRESHOLDS + 1], count[MAX_THRESHOLDS + 1], changed, total = 0;     \
        for (int c = 0; c <= num; c++) run[c] = runs[c], total += count[c] = counts[c];                                 \
        for (uint64_t begin = 0; begin < n; begin += 64) {                                                              \
            const unsigned size = n - begin < 64 ? (unsigned)(n - begin) : 64;                                          \
            const ELEMENT *old = before + begin, *new = after + begin;                                                  \
            NAMED(masks, BITS, SET)(old, new, size, thresholds, num, &changed, reach);                                  \
            total += count_ones(changed);                                                                               \
            if (total > capacity) return 1;                                                                             \
            uint64_t members = first_bits(size);                                                                        \
            for (int c = 0; c <= num; c++) {                                                                            \
                const uint64_t above = c < num ? reach[c] : 0;                                                          \
                const uint64_t mine = members & ~above;                                                                 \
                uint64_t left = changed & mine, since = run[c];                                                         \
                if (left) {                                                                                             \
                    uint32_t *gap = gaps + (uint64_t)c * capacity, *value = values + (uint64_t)c * capacity;            \
                    uint64_t k = count[c];                                                                              \
                    do {                                                                                                \
                        const unsigned place = lowest_one(left);                                                        \
                        const uint64_t rank = count_ones(mine & ((UINT64_C(1) << place) - 1));                          \
                        const ELEMENT step = (ELEMENT)(new[place] - old[place]);                                        \
                        gap[k] = (uint32_t)(since + rank);                                                              \
                        value[k++] = ZIGZAG(step, BITS, ELEMENT);                                                       \
                        since = (uint64_t)0 - (rank + 1);                                                               \
                        left &= left - 1;                                                                               \
                    } while (left);                                                                                     \
                    count[c] = k;                                                                                       \
                }                                                                                                       \
                run[c] = since + count_ones(mine);                                                                      \
                members = above;                                                                                        \
            }                                                                                                           \
        }                                                                                                               \
        for (int c = 0; c <= num; c++) runs[c] = run[c], counts[c] = count[c];                                          \
        return 0;                                                                                                       \
    }                                                                                                                   \
                                                                                                                        \
    TARGET static inline INLINE void NAMED(apply_by, BITS, SET)(void *elements_, uint64_t n, const uint32_t *thresholds, int num, \
                                               uint64_t *ahead, uint64_t *cursors, const uint64_t *ends,                \
                                               const uint32_t *gaps, const uint32_t *values) {                          \
        ELEMENT *elements = elements_;                                                                                  \
        uint64_t reach[MAX_THRESHOLDS + 1], next[MAX_THRESHOLDS + 1], changed;                                          \
        for (int c = 0; c <= num; c++) next[c] = ahead[c];                                                              \
        for (uint64_t begin = 0; begin < n; begin += 64) {                                                              \
            const unsigned size = n - begin < 64 ? (unsigned)(n - begin) : 64;                                          \
            ELEMENT *block = elements + begin;                                                                          \
            NAMED(masks, BITS, SET)(block, 0, size, thresholds, num, &changed, reach);                                  \
            uint64_t members = first_bits(size);                                                                        \
            for (int c = 0; c <= num; c++) {                                                                            \
                const uint64_t above = c < num ? reach[c] : 0;                                                          \
                const uint64_t mine = members & ~above, total = count_ones(mine);                                       \
                uint64_t rank = next[c];                                                                                \
                if (rank < total) {                                                                                     \
                    uint64_t k = cursors[c];                                                                            \
                    const uint64_t end = ends[c];                                                                       \
                    do {                                                                                                \
                        ELEMENT *element = block + SELECT(mine, rank);                                                  \
                        *element = (ELEMENT)(*element + UNZIGZAG((ELEMENT)values[k], ELEMENT));                         \
                        rank += ++k < end ? (uint64_t)gaps[k] + 1 : NEVER;                                              \
                    } while (rank < total);                                                                             \
                    cursors[c] = k;                                                                                     \
                }                                                                                                       \
                next[c] = rank - total;                                                                                 \
                members = above;                                                                                        \
            }                                                                                                           \
        }                                                                                                               \
        for (int c = 0; c <= num; c++) ahead[c] = next[c];                                                              \
    }                                                                                                                   \
                                                                                                                        \
    TARGET static int NAMED(scan, BITS, SET)(const void *before, const void *after, uint64_t n, const uint32_t *thresholds, \
                                             int num, uint64_t *runs, uint64_t *counts, uint64_t capacity, uint32_t *gaps, \
                                             uint32_t *values) {                                                        \
        switch (num) {                                                                                                  \
        case 0: return NAMED(scan_by, BITS, SET)(before, after, n, thresholds, 0, runs, counts, capacity, gaps, values); \
        case 1: return NAMED(scan_by, BITS, SET)(before, after, n, thresholds, 1, runs, counts, capacity, gaps, values); \
        case 2: return NAMED(scan_by, BITS, SET)(before, after, n, thresholds, 2, runs, counts, capacity, gaps, values); \
        case 3: return NAMED(scan_by, BITS, SET)(before, after, n, thresholds, 3, runs, counts, capacity, gaps, values); \
        case 4: return NAMED(scan_by, BITS, SET)(before, after, n, thresholds, 4, runs, counts, capacity, gaps, values); \
        default: return NAMED(scan_by, BITS, SET)(before, after, n, thresholds, num, runs, counts, capacity, gaps, values); \
        }                                                                                                               \
    }                                                                                                                   \
                                                                                                                        \
    TARGET static void NAMED(apply, BITS, SET)(void *elements, uint64_t n, const uint32_t *thresholds, int num, uint64_t *ahead, \
                                               uint64_t *cursors, const uint64_t *ends, const uint32_t *gaps,           \
                                               const uint32_t *values) {                                                \
        switch (num) {                                                                                                  \
        case 0: NAMED(apply_by, BITS, SET)(elements, n, thresholds, 0, ahead, cursors, ends, gaps, values); break;      \
        case 1: NAMED(apply_by, BITS, SET)(elements, n, thresholds, 1, ahead, cursors, ends, gaps, values); break;      \
        case 2: NAMED(apply_by, BITS, SET)(elements, n, thresholds, 2, ahead, cursors, ends, gaps, values); break;      \
        case 3: NAMED(apply_by, BITS, SET)(elements, n, thresholds, 3, ahead, cursors, ends, gaps, values); break;      \
        case 4: NAMED(apply_by, BITS, SET)(elements, n, thresholds, 4, ahead, cursors, ends, gaps, values); break;      \
        default: NAMED(apply_by, BITS, SET)(elements, n, thresholds, num, ahead, cursors, ends, gaps, values); break;   \
        }                                                                                                               \
    }

#if BITS == 8
#define ELEMENT uint8_t
#elif BITS == 16
#define ELEMENT uint16_t
#else
#define ELEMENT uint32_t
#endif

DEFINE_LOOPS(portable, , select_portable)
#if HAS_X86
DEFINE_LOOPS(avx2, AVX2, select_bmi2)
DEFINE_LOOPS(avx512, AVX512, select_bmi2)
#endif

#undef ELEMENT
#undef DEFINE_LOOPS
