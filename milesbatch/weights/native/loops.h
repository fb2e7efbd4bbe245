/* The two loops over a tensor, for elements of BITS bits; included by steps.c once for each width.
 *
 * The body is written once and made for each instruction set, because only a function that is compiled for a set may inline the
 * mask function of that set. */


#define DEFINE_LOOPS(SET, TARGET, SELECT)                                                                               \
    TARGET static inline INLINE int NAMED(scan_by, BITS, SET)(const void *before_, const void *after_, uint64_t n,      \
                                             const uint32_t *thresholds, int num, uint64_t *runs, uint64_t *counts,     \
                                             uint64_t capacity, uint32_t *gaps, uint32_t *values) {                     \
        const ELEMENT *before = before_, *after = after_;                                                               \
        uint64_t reach[MAX_THRESHOLDS + 1], changed, total = 0;                                                         \
        for (int c = 0; c <= num; c++) total += counts[c];                                                              \
        for (uint64_t begin = 0; begin < n; begin += 64) {                                                              \
            const unsigned size = n - begin < 64 ? (unsigned)(n - begin) : 64;                                          \
            NAMED(masks, BITS, SET)(before + begin, after + begin, size, thresholds, num, &changed, reach);             \
            total += count_ones(changed);                                                                               \
            if (total > capacity) return 1;                                                                             \
            uint64_t members = first_bits(size);                                                                        \
            for (int c = 0; c <= num; c++) {                                                                            \
                const uint64_t above = c < num ? reach[c] : 0;                                                          \
                const uint64_t mine = members & ~above;                                                                 \
                uint64_t left = changed & mine, run = runs[c];                                                          \
                while (left) {                                                                                          \
                    const unsigned place = lowest_one(left);                                                            \
                    const uint64_t rank = count_ones(mine & first_bits(place));                                         \
                    const ELEMENT step = (ELEMENT)(after[begin + place] - before[begin + place]);                       \
                    const uint64_t at = (uint64_t)c * capacity + counts[c]++;                                           \
                    gaps[at] = (uint32_t)(run + rank);                                                                  \
                    values[at] = ZIGZAG(step, BITS, ELEMENT);                                                           \
                    run = (uint64_t)0 - (rank + 1);                                                                     \
                    left &= left - 1;                                                                                   \
                }                                                                                                       \
                runs[c] = run + count_ones(mine);                                                                       \
                members = above;                                                                                        \
            }                                                                                                           \
        }                                                                                                               \
        return 0;                                                                                                       \
    }                                                                                                                   \
                                                                                                                        \
    TARGET static inline INLINE void NAMED(apply_by, BITS, SET)(void *elements_, uint64_t n, const uint32_t *thresholds, int num, \
                                               uint64_t *ahead, uint64_t *cursors, const uint64_t *ends,                \
                                               const uint32_t *gaps, const uint32_t *values) {                          \
        ELEMENT *elements = elements_;                                                                                  \
        uint64_t reach[MAX_THRESHOLDS + 1], changed;                                                                    \
        for (uint64_t begin = 0; begin < n; begin += 64) {                                                              \
            const unsigned size = n - begin < 64 ? (unsigned)(n - begin) : 64;                                          \
            NAMED(masks, BITS, SET)(elements + begin, 0, size, thresholds, num, &changed, reach);                       \
            uint64_t members = first_bits(size);                                                                        \
            for (int c = 0; c <= num; c++) {                                                                            \
                const uint64_t above = c < num ? reach[c] : 0;                                                          \
                const uint64_t mine = members & ~above, total = count_ones(mine);                                       \
                uint64_t next = ahead[c];                                                                               \
                while (next < total) {                                                                                  \
                    ELEMENT *element = elements + begin + SELECT(mine, next);                                           \
                    *element = (ELEMENT)(*element + UNZIGZAG((ELEMENT)values[cursors[c]], ELEMENT));                    \
                    next += ++cursors[c] < ends[c] ? (uint64_t)gaps[cursors[c]] + 1 : NEVER;                            \
                }                                                                                                       \
                ahead[c] = next - total;                                                                                \
                members = above;                                                                                        \
            }                                                                                                           \
        }                                                                                                               \
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
