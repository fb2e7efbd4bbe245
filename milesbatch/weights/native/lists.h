/* The changes of a segment as counts, tokens and bits, and back; included by steps.c.
 *
 * Reading trusts nothing: each count has a bound before anything of its size is read, bits end with the payload, and a place is
 * compared with the end of its list before it is written to. */

/* ---- numbers as tokens and bits -------------------------------------------------------------------------------------- */

/* The token is that of the number without its lowest `shift` bits. Below 16: the token is that number. Above: 4 tokens for each power
 * of two. The bits of the number that its token does not say are apart, lowest first. Without branches, as nothing about the
 * next number can be predicted. Returns how many bits were written; `bits` has room for 4 bytes a number and 8 more, all of
 * which may be written to. */
static uint64_t tokenise(const uint32_t *numbers, uint64_t n, unsigned shift, uint8_t *tokens, uint8_t *bits) {
    uint64_t pool = 0, total = 0;
    unsigned held = 0;
    for (uint64_t i = 0; i < n; i++) {
        const uint32_t number = numbers[i], upper = number >> shift;
        const unsigned width = 31u - (unsigned)__builtin_clz(upper | 1u);
        const int is_small = upper < 16;
        const unsigned below = is_small ? 0 : width - 2, low = below + shift;
        const unsigned large = 16 + (width - 4) * 4 + ((upper >> below) & 3);
        tokens[i] = (uint8_t)(is_small ? upper : large);
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

/* The inverse. Returns bits used; -1 when a token or a number is none of tokenise's or there are too few bits. */
static int64_t detokenise(const uint8_t *tokens, uint64_t n, unsigned shift, const uint8_t *bits, uint64_t num_bytes,
                          uint32_t *numbers) {
    uint64_t used = 0, all = 0;
    for (uint64_t i = 0; i < n; i++) {
        const unsigned token = tokens[i];
        const int is_small = token < 16;
        const unsigned low = (is_small ? 0 : (token - 16) / 4 + 2) + shift; /* at most 50: a pool has 57 */
        if (token > 127 || used + low > 8 * num_bytes) return -1;
        const uint64_t at = used >> 3, leading = is_small ? token : 4 + (token & 3);
        const uint64_t pool = (at + 8 <= num_bytes ? load_u64(bits + at) : load_some(bits + at, num_bytes - at)) >> (used & 7);
        const uint64_t number = leading << low | (pool & ((UINT64_C(1) << low) - 1));
        numbers[i] = (uint32_t)number;
        all |= number;
        used += low;
    }
    return all > UINT32_MAX ? -1 : (int64_t)used;
}

/* ---- one unit in the last place is a bit, the rest are exceptions ----------------------------------------------------- */

/* values (zigzag, never 0): 1 and 2 become one bit each; others go to the exceptions with the count of values since the last one.
 * `bits` has room for 8 bytes more than it needs, `gaps` and `rest` for one number. Returns the number of exceptions. */
static uint64_t steps_split(const uint32_t *values, uint64_t n, uint8_t *bits, uint32_t *gaps, uint32_t *rest) {
    uint64_t exceptions = 0, last = 0, pool = 0;
    unsigned held = 0;
    for (uint64_t i = 0; i < n; i++) {
        const uint32_t value = values[i];
        const unsigned is_step = value <= 2;
        gaps[exceptions] = (uint32_t)(i - last); /* written over when this is none */
        rest[exceptions] = value - 3;
        exceptions += !is_step;
        last = is_step ? last : i + 1;
        pool |= (uint64_t)(is_step & (value >> 1)) << held;
        held += is_step;
        if (held == 64) {
            store_u64(bits, pool);
            bits += 8, pool = 0, held = 0;
        }
    }
    store_u64(bits, pool);
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

/* ---- all classes of a segment, as counts, tokens and bits ---------------------------------------------------------------- */

#define LISTS 3 /* gaps, and then all steps, or gaps of exceptions and exceptions */

/* The count of a list is the shift of its tokens; or, where most of its numbers are 0, so much more than it has others. */
#define MAX_SHIFT 21
static const uint64_t sparse_from[LISTS] = {MAX_SHIFT + 1, 1, 1};

/* What the counts of one class say: changes; exceptions, or changes + 1 when nothing is split; and the count of each list. */
typedef struct {
    uint64_t changes, exceptions, lists[LISTS];
} class_counts;

static inline uint64_t list_size(const class_counts *of, int list) {
    if (list == 0) return of->changes;
    if (of->exceptions <= of->changes) return of->exceptions;
    return list == 1 ? of->changes : 0;
}

static inline uint64_t direction_bytes(const class_counts *of) {
    return of->exceptions > of->changes ? 0 : (of->changes - of->exceptions + 7) / 8;
}

typedef struct {
    uint8_t *counts, *tokens, *bits;
    uint64_t *ends; /* of stretches of tokens, from the first token on */
    const uint8_t *first_token;
} packing;

static void put_count(packing *to, uint64_t number) {
    for (; number >= 0x80; number >>= 7) *to->counts++ = (uint8_t)(number | 0x80);
    *to->counts++ = (uint8_t)number;
}

/* A stretch of tokens, unless there were none since `tokens`, ends here. */
static void put_end(packing *to, const uint8_t *tokens) {
    if (to->tokens > tokens) *to->ends++ = (uint64_t)(to->tokens - to->first_token);
}

/* For a mean of 2.8 to 5.6 without so many bits: all lists then have tokens of nearly one distribution. */
static unsigned shift_of(const uint32_t *numbers, uint64_t n) {
    uint64_t sum = 0;
    unsigned shift = 0;
    for (uint64_t i = 0; i < n; i++) sum += numbers[i];
    while (shift < MAX_SHIFT && 8 * sum > (45 * n) << shift) shift++;
    return shift;
}

static void pack_plain(packing *to, const uint32_t *numbers, uint64_t n, unsigned shift) {
    to->bits += (tokenise(numbers, n, shift, to->tokens, to->bits) + 7) / 8;
    to->tokens += n;
}

/* `scratch`: n. */
static void pack_list(packing *to, int list, const uint32_t *numbers, uint64_t n, uint32_t *scratch) {
    uint64_t others = 0;
    if (!n) return;
    for (uint64_t i = 0; i < n; i++) others += numbers[i] != 0;
    if (2 * others >= n) {
        const unsigned shift = list == 0 ? shift_of(numbers, n) : 0;
        put_count(to, shift);
        pack_plain(to, numbers, n, shift);
        return;
    }
    uint32_t *gaps = scratch, *rest = gaps + others;
    uint64_t last = 0, k = 0;
    for (uint64_t i = 0; i < n; i++) {
        if (!numbers[i]) continue;
        gaps[k] = (uint32_t)(i - last);
        rest[k++] = numbers[i] - 1;
        last = i + 1;
    }
    put_count(to, others + sparse_from[list]);
    pack_plain(to, gaps, others, 0);
    pack_plain(to, rest, others, 0);
}

static void pack_values(packing *to, const uint32_t *values, uint64_t n, uint32_t *numbers) {
    const uint8_t *tokens = to->tokens;
    uint64_t exceptions = 0;
    if (!n) return;
    for (uint64_t i = 0; i < n; i++) exceptions += values[i] > 2;
    if (2 * exceptions > n) {
        put_count(to, n + 1);
        for (uint64_t i = 0; i < n; i++) numbers[i] = values[i] - 1;
        pack_list(to, 1, numbers, n, numbers + n);
        put_end(to, tokens);
        return;
    }
    put_count(to, exceptions);
    steps_split(values, n, to->bits, numbers, numbers + n);
    to->bits += (n - exceptions + 7) / 8;
    pack_list(to, 1, numbers, exceptions, numbers + 2 * n);
    put_end(to, tokens);
    tokens = to->tokens;
    pack_list(to, 2, numbers + n, exceptions, numbers + 2 * n);
    put_end(to, tokens);
}

/* The changes of all classes (addresses of their lists in `gaps` and `values`) as counts, tokens, and bits. `ends`: of stretches of
 * tokens, the first one being all lists of gaps, and each other list one; room for 1 and 2 a class. `counts`: 50 bytes a class. For
 * N changes in all, of which the largest class has n: `numbers`: 3n for scratch; `tokens`: 3N; `bits`: 13N + 32 a class. `sizes`:
 * bytes of counts, stretches of tokens, bytes of bits. */
void steps_pack(int classes, const uint64_t *changes, const uint64_t *gaps, const uint64_t *values, uint32_t *numbers,
                uint8_t *counts, uint8_t *tokens, uint64_t *ends, uint8_t *bits, uint64_t *sizes) {
    packing to = {counts, tokens, bits, ends, tokens};
    for (int c = 0; c < classes; c++) {
        put_count(&to, changes[c]);
        pack_list(&to, 0, (const uint32_t *)(uintptr_t)gaps[c], changes[c], numbers);
    }
    put_end(&to, tokens);
    for (int c = 0; c < classes; c++) pack_values(&to, (const uint32_t *)(uintptr_t)values[c], changes[c], numbers);
    sizes[0] = (uint64_t)(to.counts - counts);
    sizes[1] = (uint64_t)(to.ends - ends);
    sizes[2] = (uint64_t)(to.bits - bits);
}

/* Why a payload was refused. */
enum { ENDS_EARLY = 1, TOO_MANY = 2, NO_LIST = 3 };

/* The next LEB128 number of at most `most`; 0, or why it was refused. */
static int take_count(const uint8_t *payload, uint64_t length, uint64_t *at, uint64_t most, uint64_t *count) {
    uint64_t number = 0;
    for (unsigned shift = 0; shift < 63; shift += 7) {
        if (*at >= length) return ENDS_EARLY;
        const uint8_t byte = payload[(*at)++];
        number |= (uint64_t)(byte & 0x7F) << shift;
        if (number > most) return TOO_MANY;
        if (!(byte & 0x80)) {
            *count = number;
            return 0;
        }
    }
    return TOO_MANY;
}

static int take_list(const uint8_t *payload, uint64_t length, uint64_t *at, class_counts *of, int list, uint64_t *tokens) {
    const uint64_t size = list_size(of, list), from = sparse_from[list];
    if (!size) return 0;
    const int refused = take_count(payload, length, at, size + from, of->lists + list);
    *tokens += of->lists[list] < from ? size : 2 * (of->lists[list] - from);
    return refused;
}

/* The counts of a segment that begins at `*at` (moved behind them): of all classes into `of`; `found`: elements of the segment,
 * changes, changes of the largest class, tokens, stored bytes of the tokens. Returns 0, or why they were refused. */
int steps_counts(const uint8_t *payload, uint64_t length, uint64_t *at, uint64_t most_elements, uint64_t most_changes,
                 int classes, class_counts *of, uint64_t *found) {
    memset(of, 0, (size_t)classes * sizeof *of);
    memset(found, 0, 5 * sizeof *found);
    int refused = take_count(payload, length, at, most_elements, found);
    if (refused) return refused;
    if (most_changes > found[0]) most_changes = found[0];
    for (int c = 0; c < classes; c++) {
        if ((refused = take_count(payload, length, at, most_changes - found[1], &of[c].changes))) return refused;
        if ((refused = take_list(payload, length, at, of + c, 0, found + 3))) return refused;
        found[1] += of[c].changes;
        if (of[c].changes > found[2]) found[2] = of[c].changes;
    }
    for (int c = 0; c < classes; c++) {
        if (!of[c].changes) continue;
        if ((refused = take_count(payload, length, at, of[c].changes + 1, &of[c].exceptions))) return refused;
        for (int list = 1; list < LISTS; list++)
            if ((refused = take_list(payload, length, at, of + c, list, found + 3))) return refused;
    }
    if (found[3] && (refused = take_count(payload, length, at, found[3], found + 4))) return refused;
    if (found[4] > length - *at) return ENDS_EARLY;
    return 0;
}

typedef struct {
    const uint8_t *tokens, *bits, *end;
} unpacking;

static int unpack_plain(unpacking *from, uint64_t n, unsigned shift, uint32_t *numbers) {
    const int64_t used = detokenise(from->tokens, n, shift, from->bits, (uint64_t)(from->end - from->bits), numbers);
    if (used < 0) return NO_LIST;
    from->tokens += n;
    from->bits += (used + 7) / 8;
    return 0;
}

/* The inverse of pack_list. `scratch`: 2 for each number. */
static int unpack_list(unpacking *from, const class_counts *of, int list, uint32_t *scratch, uint32_t *numbers) {
    const uint64_t n = list_size(of, list), count = of->lists[list];
    if (!n) return 0;
    if (count < sparse_from[list]) return unpack_plain(from, n, (unsigned)count, numbers);
    const uint64_t others = count - sparse_from[list];
    uint32_t *first = scratch, *second = first + others;
    if (unpack_plain(from, others, 0, first) || unpack_plain(from, others, 0, second)) return NO_LIST;
    memset(numbers, 0, n * sizeof *numbers);
    uint64_t place = 0;
    for (uint64_t k = 0; k < others; k++, place++) {
        place += first[k];
        if (place >= n) return NO_LIST;
        numbers[place] = second[k] + 1;
    }
    return 0;
}

/* The inverse of pack_values. `scratch`: 4 for each change. */
static int unpack_values(unpacking *from, const class_counts *of, uint32_t largest, uint32_t *scratch, uint32_t *values) {
    const uint64_t n = of->changes, bytes = direction_bytes(of);
    if (of->exceptions > n) {
        if (unpack_list(from, of, 1, scratch, values)) return NO_LIST;
        for (uint64_t i = 0; i < n; i++) {
            if (values[i] >= largest) return NO_LIST;
            values[i]++;
        }
        return 0;
    }
    const uint8_t *directions = from->bits;
    if (bytes > (uint64_t)(from->end - from->bits)) return ENDS_EARLY;
    from->bits += bytes;
    uint32_t *places = scratch + 2 * n, *rest = places + n;
    if (unpack_list(from, of, 1, scratch, places) || unpack_list(from, of, 2, scratch, rest)) return NO_LIST;
    return steps_merge(directions, n, places, rest, of->exceptions, largest, values) ? NO_LIST : 0;
}

/* The changes of a segment whose counts steps_counts took, from its tokens and from the payload from `*at` on (moved behind them):
 * one class after the other, in `gaps` and `values`, each up to its end in `ends`. `scratch`: 4 for each change of the largest
 * class. Returns 0, or why they were refused. */
int steps_unpack(const uint8_t *payload, uint64_t length, uint64_t *at, int classes, const class_counts *of,
                 const uint8_t *tokens, uint32_t largest, uint32_t *scratch, uint32_t *gaps, uint32_t *values,
                 uint64_t *ends) {
    unpacking from = {tokens, payload + *at, payload + length};
    uint64_t done = 0;
    int refused;
    for (int c = 0; c < classes; c++) {
        if ((refused = unpack_list(&from, of + c, 0, scratch, gaps + done))) return refused;
        ends[c] = done += of[c].changes;
    }
    for (int c = 0; c < classes; c++)
        if ((refused = unpack_values(&from, of + c, largest, scratch, values + ends[c] - of[c].changes))) return refused;
    *at = (uint64_t)(from.bits - payload);
    return 0;
}
