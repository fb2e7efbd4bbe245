/* The two loops over a tensor, for elements of BITS bits; included by steps.c once for each width.
 *
 * The body is written once and made for each instruction set, because only a function that is compiled for a set may inline the
 * mask function of that set. */


#define DEFINE_LOOPS(SET, TARGET, DEPOSIT)                                                                              \
    TARGET static inline INLINE unsigned NAMED(class_of, BITS, SET)(ELEMENT element, const uint32_t *thresholds, int num) { \
        const uint32_t magnitude = element & (ELEMENT)((ELEMENT)~(ELEMENT)0 >> 1);                                      \
        unsigned c = 0;                                                                                                 \
        UNROLL                                                                                                          \
        for (int j = 0; j < num; j++) c += magnitude >= thresholds[j];                                                  \
        return c;                                                                                                       \
    }                                                                                                                   \
                                                                                                                        \
    TARGET static inline INLINE int NAMED(scan_by, BITS, SET)(                                                          \
        const void *before_, const void *after_, uint64_t n, const uint32_t *thresholds, int num, uint64_t *passed_,    \
        uint64_t *last, uint64_t *counts, uint64_t capacity, uint32_t *gaps, uint32_t *values) {                        \
        const ELEMENT *before = before_, *after = after_;                                                               \
        uint64_t reach[CLASSES] = {0}, passed[CLASSES] = {0}, changed, total = 0;                                       \
        uint64_t mine[CHUNK / 64][CLASSES], so_far[CHUNK / 64][CLASSES];                                                \
        uint16_t places[CHUNK + 8];                                                                                     \
        UNROLL                                                                                                          \
        for (int c = 0; c <= num; c++) passed[c] = passed_[c], total += counts[c];                                      \
        for (uint64_t begin = 0; begin < n; begin += CHUNK) {                                                           \
            const unsigned length = n - begin < CHUNK ? (unsigned)(n - begin) : CHUNK;                                  \
            const ELEMENT *old = before + begin, *new = after + begin;                                                  \
            uint16_t *end = places;                                                                                     \
            for (unsigned at = 0; at < length; at += 64) {                                                              \
                const unsigned size = length - at < 64 ? length - at : 64;                                              \
                fetch_ahead(old + at, sizeof(ELEMENT) * 64);                                                            \
                fetch_ahead(new + at, sizeof(ELEMENT) * 64);                                                            \
                NAMED(masks, BITS, SET)(old + at, new + at, size, thresholds, num, &changed, reach);                    \
                end = put_places(changed, at, end);                                                                     \
                uint64_t members = first_bits(size);                                                                    \
                UNROLL                                                                                                  \
                for (int c = 0; c <= num; c++) {                                                                        \
                    const uint64_t above = c < num ? reach[c] : 0;                                                      \
                    mine[at / 64][c] = members & ~above;                                                                \
                    so_far[at / 64][c] = passed[c];                                                                     \
                    passed[c] += count_ones(members & ~above);                                                          \
                    members = above;                                                                                    \
                }                                                                                                       \
            }                                                                                                           \
            total += (uint64_t)(end - places);                                                                          \
            if (total > capacity) return 1;                                                                             \
            for (const uint16_t *place = places; place < end; place++) {                                                \
                const ELEMENT from = old[*place], step = (ELEMENT)(new[*place] - from);                                 \
                const unsigned c = NAMED(class_of, BITS, SET)(from, thresholds, num), block = *place / 64;              \
                const uint64_t below = (UINT64_C(1) << (*place & 63)) - 1;                                              \
                const uint64_t rank = so_far[block][c] + count_ones(mine[block][c] & below);                            \
                const uint64_t k = c * capacity + counts[c]++;                                                          \
                gaps[k] = (uint32_t)(rank - last[c]);                                                                   \
                values[k] = ZIGZAG(step, BITS, ELEMENT);                                                                \
                last[c] = rank + 1;                                                                                     \
            }                                                                                                           \
        }                                                                                                               \
        UNROLL                                                                                                          \
        for (int c = 0; c <= num; c++) passed_[c] = passed[c];                                                          \
        return 0;                                                                                                       \
    }                                                                                                                   \
                                                                                                                        \
    TARGET static inline INLINE void NAMED(apply_by, BITS, SET)(                                                        \
        void *elements_, uint64_t n, const uint32_t *thresholds, int num, uint64_t *passed_, uint64_t *cursors,         \
        const uint8_t *maps, uint64_t map_bytes, const uint32_t *values) {                                              \
        ELEMENT *elements = elements_;                                                                                  \
        uint64_t reach[CLASSES] = {0}, passed[CLASSES] = {0}, changed;                                                  \
        uint16_t places[CHUNK + 8];                                                                                     \
        UNROLL                                                                                                          \
        for (int c = 0; c <= num; c++) passed[c] = passed_[c];                                                          \
        for (uint64_t begin = 0; begin < n; begin += CHUNK) {                                                           \
            const unsigned length = n - begin < CHUNK ? (unsigned)(n - begin) : CHUNK;                                  \
            ELEMENT *chunk = elements + begin;                                                                          \
            uint16_t *end = places;                                                                                     \
            for (unsigned at = 0; at < length; at += 64) {                                                              \
                const unsigned size = length - at < 64 ? length - at : 64;                                              \
                fetch_ahead(chunk + at, sizeof(ELEMENT) * 64);                                                          \
                NAMED(masks, BITS, SET)(chunk + at, 0, size, thresholds, num, &changed, reach);                         \
                uint64_t members = first_bits(size);                                                                    \
                changed = 0;                                                                                            \
                UNROLL                                                                                                  \
                for (int c = 0; c <= num; c++) {                                                                        \
                    const uint64_t above = c < num ? reach[c] : 0, mine = members & ~above;                             \
                    changed |= DEPOSIT(bits_from(maps + (uint64_t)c * map_bytes, passed[c]), mine);                     \
                    passed[c] += count_ones(mine);                                                                      \
                    members = above;                                                                                    \
                }                                                                                                       \
                end = put_places(changed, at, end);                                                                     \
            }                                                                                                           \
            for (const uint16_t *place = places; place < end; place++) {                                                \
                const ELEMENT from = chunk[*place];                                                                     \
                const unsigned c = NAMED(class_of, BITS, SET)(from, thresholds, num);                                   \
                const ELEMENT value = (ELEMENT)values[cursors[c]++];                                                    \
                chunk[*place] = (ELEMENT)(from + UNZIGZAG(value, ELEMENT));                                             \
            }                                                                                                           \
        }                                                                                                               \
        UNROLL                                                                                                          \
        for (int c = 0; c <= num; c++) passed_[c] = passed[c];                                                          \
    }                                                                                                                   \
    TARGET static int NAMED(scan, BITS, SET)(const void *before, const void *after, uint64_t n,                         \
                                             const uint32_t *thresholds, int num, uint64_t *passed, uint64_t *last,     \
                                             uint64_t *counts, uint64_t capacity, uint32_t *gaps, uint32_t *values) {   \
        switch (num) {                                                                                                  \
        case 0: return NAMED(scan_by, BITS, SET)(before, after, n, thresholds, 0, passed, last, counts, capacity, gaps, values); \
        case 1: return NAMED(scan_by, BITS, SET)(before, after, n, thresholds, 1, passed, last, counts, capacity, gaps, values); \
        case 2: return NAMED(scan_by, BITS, SET)(before, after, n, thresholds, 2, passed, last, counts, capacity, gaps, values); \
        case 3: return NAMED(scan_by, BITS, SET)(before, after, n, thresholds, 3, passed, last, counts, capacity, gaps, values); \
        case 4: return NAMED(scan_by, BITS, SET)(before, after, n, thresholds, 4, passed, last, counts, capacity, gaps, values); \
        default: return NAMED(scan_by, BITS, SET)(before, after, n, thresholds, num, passed, last, counts, capacity, gaps, values); \
        }                                                                                                               \
    }                                                                                                                   \
                                                                                                                        \
    TARGET static void NAMED(apply, BITS, SET)(void *elements, uint64_t n, const uint32_t *thresholds, int num,         \
                                               uint64_t *passed, uint64_t *cursors, const uint8_t *maps,                \
                                               uint64_t map_bytes, const uint32_t *values) {                            \
        switch (num) {                                                                                                  \
        case 0: NAMED(apply_by, BITS, SET)(elements, n, thresholds, 0, passed, cursors, maps, map_bytes, values); break; \
        case 1: NAMED(apply_by, BITS, SET)(elements, n, thresholds, 1, passed, cursors, maps, map_bytes, values); break; \
        case 2: NAMED(apply_by, BITS, SET)(elements, n, thresholds, 2, passed, cursors, maps, map_bytes, values); break; \
        case 3: NAMED(apply_by, BITS, SET)(elements, n, thresholds, 3, passed, cursors, maps, map_bytes, values); break; \
        case 4: NAMED(apply_by, BITS, SET)(elements, n, thresholds, 4, passed, cursors, maps, map_bytes, values); break; \
        default: NAMED(apply_by, BITS, SET)(elements, n, thresholds, num, passed, cursors, maps, map_bytes, values); break; \
        }                                                                                                               \
    }

#if BITS == 8
#define ELEMENT uint8_t
#elif BITS == 16
#define ELEMENT uint16_t
#else
#define ELEMENT uint32_t
#endif

DEFINE_LOOPS(portable, , deposit_portable)
#if HAS_X86
DEFINE_LOOPS(avx2, AVX2, deposit_bmi2)
DEFINE_LOOPS(avx512, AVX512, deposit_bmi2)
#endif

#undef ELEMENT
#undef DEFINE_LOOPS
