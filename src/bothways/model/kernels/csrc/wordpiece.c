/* BERT's tokenizer: texts → ids, with the offsets and words of tokens.
 *
 * Nothing here knows Unicode. What the normaliser and the pre-tokenizer make of a code point comes
 * in pages of 256 (bothways_wordpiece_page), so it is that of the installed `tokenizers`:
 *
 *     "É" → e         " " → SPLIT         "!" → MARK !         "中" → SPLIT 中 SPLIT        U+0301 →
 *
 * A word is then cut by WordPiece: the longest piece of the vocabulary, then the longest one that
 * continues it, … (Wu et al. 2016). Pieces are found by a hash of their bytes that is extended byte
 * by byte, so those of all beginnings of a word come from one pass over it. */

#include "memory.h"
#include "wordpiece.h"

#include <pthread.h>
#include <stdatomic.h>
#include <string.h>

#define PAGES 0x1100 /* of 256 code points: Unicode ends at U+10FFFF */
#define MAX_CHARACTERS 256
#define MAX_BYTES (4 * MAX_CHARACTERS)
#define MAX_TOKENS ((int64_t)1 << 28)
#define BLOCK 16 /* texts that a thread takes at a time */
#define TO_CALLER (-1)
#define CONTINUES 0x80000000u
#define INLINE 16

/* In pages: bytes that UTF-8 does not have. */
enum { ELSEWHERE = 0xFD, MARK = 0xFE, SPLIT = 0xFF };

/* Of an ASCII character. OTHER: not one of these, its page tells; BEGINS: an added token may begin. */
enum { LETTER, SPACE, PUNCTUATION, VANISHES, OTHER, BEGINS = 8 };

typedef struct {
    uint16_t ends[256]; /* of the output of each code point */
    uint8_t output[];
} page;

typedef struct {
    const uint8_t *text;
    int64_t length;
    int32_t id;
} token;

/* A slot of the hash table: half a cache line, which mostly decides alone. */
typedef struct {
    uint32_t tag;    /* further bits of the hash */
    uint32_t length; /* 0 in an empty slot; with CONTINUES: of a piece after its prefix */
    int32_t id;
    uint32_t rest; /* where its bytes are in `bytes` */
    uint8_t text[INLINE];
} slot;

struct wordpiece {
    _Atomic(page *) pages[PAGES];
    uint8_t kind[256];
    uint8_t letter[256]; /* a LETTER after normalisation; 0 for other characters */
    int32_t single[128];            /* the id of a punctuation mark */
    uint8_t begins[256];            /* 1 + the first added token that begins with this byte, or 0 */
    token *added;
    slot *slots;
    uint8_t *bytes; /* of all tokens */
    int64_t added_count, longest;
    uint64_t seed, mask;
    int32_t bits, unknown, max_characters;
};

static inline uint64_t extend(uint64_t hash, uint8_t byte) {
    return (hash ^ byte) * 0x9E3779B97F4A7C15u;
}

/* The high bits of a product depend on all of its factors: the first `bits` are the slot. */
static inline uint64_t slot_of(const wordpiece *w, uint64_t hash) { return hash >> (64 - w->bits); }

static inline uint32_t tag_of(const wordpiece *w, uint64_t hash) {
    return (uint32_t)(hash >> (32 - w->bits));
}

/* The id of the piece at `text`, of which INLINE bytes can be read; TO_CALLER if there is none. */
static inline int32_t find(const wordpiece *w, uint64_t hash, const uint8_t *text, int64_t length,
                           uint32_t flag) {
    uint32_t tag = tag_of(w, hash), size = (uint32_t)length | flag;
    for (uint64_t at = slot_of(w, hash); w->slots[at].length; at = (at + 1) & w->mask) {
        const slot *s = &w->slots[at];
        if (s->tag != tag || s->length != size) continue;
        if (length > INLINE) {
            if (!memcmp(w->bytes + s->rest, text, (size_t)length)) return s->id;
        } else {
            uint64_t a[2], b[2]; /* bytes beyond the length are shifted out, or 0 */
            memcpy(a, s->text, INLINE);
            memcpy(b, text, INLINE);
            if (length <= 8) {
                if (a[0] == b[0] << (64 - 8 * length) >> (64 - 8 * length)) return s->id;
            } else if (a[0] == b[0] && a[1] == b[1] << (128 - 8 * length) >> (128 - 8 * length)) {
                return s->id;
            }
        }
    }
    return TO_CALLER;
}

/* ---- a text ---- */

/* The word that is being read, normalised. */
typedef struct {
    int64_t characters, bytes;
    int32_t begin, end; /* in characters of the text */
    uint8_t text[MAX_BYTES + INLINE];
    uint64_t hash[MAX_BYTES + 1]; /* of the first bytes */
    int32_t source[MAX_BYTES];    /* the character of the text that each byte comes from */
} word;

/* What is written; `spans` and `words` may be NULL. */
typedef struct {
    int32_t *ids, *spans, *words;
    int64_t count;
    int32_t word;
} output;

static inline void emit(output *o, int32_t id, int32_t begin, int32_t end) {
    o->ids[o->count] = id;
    if (o->spans) {
        o->spans[2 * o->count] = begin;
        o->spans[2 * o->count + 1] = end;
        o->words[o->count] = o->word;
    }
    o->count++;
}

/* Bytes of a valid character that begins with `lead`. */
static inline int64_t character_bytes(uint8_t lead) {
    return lead < 0x80 ? 1 : lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : 4;
}

/* Count `count` characters of the text from `at` on; false if the word is too long to be known. */
static inline int grow(const wordpiece *w, word *x, int64_t count, int32_t at) {
    if (!x->characters) x->begin = at;
    x->end = at + (int32_t)count;
    return (x->characters += count) <= w->max_characters;
}

/* Append a character in UTF-8. */
static inline void append(const wordpiece *w, word *x, const uint8_t *text, int32_t at) {
    if (!grow(w, x, 1, at)) return;
    for (const uint8_t *stop = text + character_bytes(*text); text < stop; text++) {
        x->text[x->bytes] = *text;
        x->source[x->bytes] = at;
        x->hash[x->bytes + 1] = extend(x->hash[x->bytes], *text);
        x->bytes++;
    }
}

/* Append the letters of ASCII from `p` on; return the end of them. */
static inline const uint8_t *append_letters(const wordpiece *w, word *x, const uint8_t *p,
                                            const uint8_t *end, int32_t at) {
    const uint8_t *from = p;
    int64_t n = x->bytes, limit = minimum(end - p, w->max_characters - x->characters);
    uint64_t hash = x->hash[n];
    uint8_t letter;
    for (const uint8_t *stop = p + maximum(limit, 0); p < stop && (letter = w->letter[*p]); p++) {
        x->text[n++] = letter;
        x->hash[n] = hash = extend(hash, letter);
    }
    for (int64_t i = 0; i < p - from; i++) x->source[x->bytes + i] = at + (int32_t)i;
    x->bytes = n;
    while (p < end && limit <= p - from && w->letter[*p]) p++; /* the word is too long */
    grow(w, x, p - from, at);
    return p;
}

/* Write the tokens of the word, and begin a new one. */
static inline void finish(const wordpiece *w, word *x, output *o) {
    if (!x->characters) return;
    int64_t before = o->count, from = 0, size = x->bytes;
    if (x->characters > w->max_characters) from = -1;
    while (from >= 0 && from < size) {
        int64_t to = minimum(size, from + w->longest);
        if (from) { /* the hashes of what continues, in place of those of the word */
            x->hash[from] = ~w->seed;
            for (int64_t i = from; i < to; i++) x->hash[i + 1] = extend(x->hash[i], x->text[i]);
        }
        int32_t id = TO_CALLER;
        for (; to > from; to--) {
            if (to < size && (x->text[to] & 0xC0) == 0x80) continue; /* inside a character */
            id = find(w, x->hash[to], x->text + from, to - from, from ? CONTINUES : 0);
            if (id != TO_CALLER) break;
        }
        if (id == TO_CALLER) {
            from = -1;
        } else {
            emit(o, id, x->source[from], x->source[to - 1] + 1);
            from = to;
        }
    }
    if (from < 0) {
        o->count = before;
        emit(o, w->unknown, x->begin, x->end);
    }
    o->word++;
    x->characters = x->bytes = 0;
}

/* The code point at `p`, and its bytes → `length`; beyond Unicode if it is not UTF-8. */
static inline uint32_t decode(const uint8_t *p, const uint8_t *end, int64_t *length) {
    int64_t n = *length = character_bytes(*p);
    if (n > end - p) return UINT32_MAX;
    uint32_t code = n == 1 ? *p : *p & (0x7Fu >> n);
    for (int64_t i = 1; i < n; i++) {
        if ((p[i] & 0xC0) != 0x80) return UINT32_MAX;
        code = code << 6 | (p[i] & 0x3F);
    }
    return code;
}

/* The longest added token at `p`; NULL if there is none. */
static const token *find_added(const wordpiece *w, const uint8_t *p, const uint8_t *end) {
    for (int64_t i = w->begins[*p] - 1; i >= 0 && i < w->added_count; i++) {
        const token *t = &w->added[i];
        if (t->text[0] != *p) break;
        if (t->length <= end - p && !memcmp(t->text, p, (size_t)t->length)) return t;
    }
    return NULL;
}

/* Return the number of tokens; TO_CALLER if the text needs `tokenizers`, or a page that is noted in
 * `missing`; INT64_MIN if it is not UTF-8. */
static int64_t encode_text(const wordpiece *w, const uint8_t *p, const uint8_t *end, output *o,
                           uint8_t *missing) {
    word x;
    x.characters = x.bytes = 0;
    x.hash[0] = w->seed;
    int waits = 0;
    for (int32_t at = 0; p < end; at++) {
        int kind = w->kind[*p];
        if (kind == LETTER) {
            const uint8_t *stop = append_letters(w, &x, p, end, at);
            at += (int32_t)(stop - p) - 1;
            p = stop;
            continue;
        }
        const token *added = kind & BEGINS ? find_added(w, p, end) : NULL;
        if (added) {
            if (added->id == TO_CALLER) return TO_CALLER;
            finish(w, &x, o);
            int32_t begin = at--;
            for (const uint8_t *stop = p + added->length; p < stop; p++)
                at += (*p & 0xC0) != 0x80;
            emit(o, added->id, begin, at + 1);
            o->word++;
            continue;
        }
        kind &= ~BEGINS;
        if (kind == SPACE) {
            finish(w, &x, o);
            p++;
        } else if (kind == PUNCTUATION) {
            finish(w, &x, o);
            emit(o, w->single[*p++], at, at + 1);
            o->word++;
        } else if (kind == VANISHES) {
            p++;
        } else {
            int64_t length;
            uint32_t code = decode(p, end, &length);
            if (code >= 256 * PAGES) return INT64_MIN;
            p += length;
            const page *table = atomic_load_explicit(&w->pages[code >> 8], memory_order_acquire);
            if (!table) { /* the others are noted, too: the text is read once more, not once a page */
                missing[code >> 8] = 1;
                waits = 1;
                continue;
            }
            uint32_t low = code & 255;
            const uint8_t *c = table->output + (low ? table->ends[low - 1] : 0);
            for (const uint8_t *stop = table->output + table->ends[low]; c < stop;) {
                if (*c == ELSEWHERE) return TO_CALLER;
                int mark = *c == MARK;
                if (*c >= MARK) {
                    finish(w, &x, o);
                    c++;
                    if (!mark) continue;
                }
                append(w, &x, c, at);
                c += character_bytes(*c);
                if (mark) finish(w, &x, o);
            }
        }
    }
    finish(w, &x, o);
    return waits ? TO_CALLER : o->count;
}

/* ---- the functions that Python calls ---- */

int32_t bothways_wordpiece_abi(int64_t *struct_sizes, int32_t count) {
    const int64_t sizes[] = {sizeof(strings), sizeof(wordpiece_vocabulary), sizeof(wordpiece_batch)};
    for (int32_t i = 0; i < count && i < 3; i++) struct_sizes[i] = sizes[i];
    return WORDPIECE_ABI;
}

static int is_valid(const strings *s, int64_t shortest) {
    if (s->count < 0 || s->count > MAX_TOKENS || s->bytes < 0 || s->bytes > MAX_TOKENS) return 0;
    if (s->count && (!s->text || !s->lengths || !s->ids)) return 0;
    int64_t left = s->bytes;
    for (int64_t i = 0; i < s->count; i++) {
        if (left < shortest || s->lengths[i] < shortest || s->lengths[i] > left) return 0;
        left -= s->lengths[i];
    }
    return left == 0;
}

static void add_piece(wordpiece *w, uint32_t flag, uint32_t from, int64_t length, int32_t id) {
    if (!length || length > MAX_BYTES) return; /* no word has it */
    uint64_t hash = flag ? ~w->seed : w->seed;
    for (int64_t i = 0; i < length; i++) hash = extend(hash, w->bytes[from + i]);
    uint64_t at = slot_of(w, hash);
    while (w->slots[at].length) at = (at + 1) & w->mask;
    slot *s = &w->slots[at];
    *s = (slot){tag_of(w, hash), (uint32_t)length | flag, id, from, {0}};
    memcpy(s->text, w->bytes + from, (size_t)minimum(length, INLINE));
    w->longest = maximum(w->longest, length);
}

status bothways_wordpiece_new(const wordpiece_vocabulary *v, wordpiece **result) {
    if (!v || !result || !is_valid(&v->tokens, 0) || !is_valid(&v->added, 1) ||
        v->prefix_length < 0 || v->prefix_length > MAX_BYTES || !v->prefix || v->unknown < 0 || v->max_characters < 1 ||
        v->max_characters > MAX_CHARACTERS || v->added.count > 255)
        return BOTHWAYS_INVALID_ARGUMENT;
    wordpiece *w = calloc(1, sizeof *w);
    if (!w) return BOTHWAYS_NO_MEMORY;
    const strings *tokens = &v->tokens, *added = &v->added;
    /* A token that begins with the prefix is two pieces, and at least half of the slots are empty. */
    uint64_t slots = 4;
    while (slots < 4 * (uint64_t)tokens->count) slots *= 2;
    w->slots = calloc(slots, sizeof *w->slots);
    w->added = calloc((size_t)added->count + 1, sizeof *w->added);
    w->bytes = malloc((size_t)(tokens->bytes + added->bytes + 1));
    if (!w->added || !w->slots || !w->bytes) {
        bothways_wordpiece_free(w);
        return BOTHWAYS_NO_MEMORY;
    }
    w->bits = __builtin_ctzll(slots);
    w->mask = slots - 1;
    w->seed = v->seed;
    w->unknown = v->unknown;
    w->max_characters = v->max_characters;
    memset(w->kind + 128, OTHER, 128);
    if (tokens->count) memcpy(w->bytes, tokens->text, (size_t)tokens->bytes);
    uint32_t at = 0;
    for (int64_t i = 0; i < tokens->count; at += (uint32_t)tokens->lengths[i++]) {
        add_piece(w, 0, at, tokens->lengths[i], tokens->ids[i]);
        if (tokens->lengths[i] > v->prefix_length &&
            !memcmp(w->bytes + at, v->prefix, (size_t)v->prefix_length))
            add_piece(w, CONTINUES, at + (uint32_t)v->prefix_length,
                      tokens->lengths[i] - v->prefix_length, tokens->ids[i]);
    }
    uint8_t *text = w->bytes + at;
    if (added->count) memcpy(text, added->text, (size_t)added->bytes);
    for (int64_t i = 0; i < added->count; text += added->lengths[i++]) {
        w->added[i] = (token){text, added->lengths[i], added->ids[i]};
        if (!w->begins[*text]) w->begins[*text] = (uint8_t)(i + 1);
        w->kind[*text] |= BEGINS;
    }
    w->added_count = added->count;
    *result = w;
    return BOTHWAYS_OK;
}

status bothways_wordpiece_free(wordpiece *w) {
    if (!w) return BOTHWAYS_OK;
    for (int64_t i = 0; i < PAGES; i++) free(w->pages[i]);
    free(w->added);
    free(w->slots);
    free(w->bytes);
    free(w);
    return BOTHWAYS_OK;
}

/* The output of a code point of `length` bytes: whole characters, no more than those bytes, so that
 * a text of n bytes has at most n tokens. */
static int is_output(const uint8_t *c, const uint8_t *stop, int64_t length) {
    while (c < stop) {
        if (*c == SPLIT || *c == ELSEWHERE) {
            c++;
            continue;
        }
        c += *c == MARK;
        int64_t bytes;
        if (c >= stop || decode(c, stop, &bytes) >= 256 * PAGES || --length < 0) return 0;
        c += bytes;
    }
    return 1;
}

/* The first page is that of ASCII, and is set before any text is read. */
static void set_ascii(wordpiece *w, const page *table) {
    for (int32_t i = 0; i < 128; i++) {
        int32_t from = i ? table->ends[i - 1] : 0, size = table->ends[i] - from;
        const uint8_t *c = table->output + from;
        uint8_t kind = OTHER;
        if (size == 0) kind = VANISHES;
        if (size == 1 && *c < 0x80) kind = LETTER;
        if (size == 1 && *c == SPLIT) kind = SPACE;
        if (size == 2 && c[0] == MARK) kind = PUNCTUATION;
        if (kind == LETTER && !*c) kind = OTHER; /* 0 has another meaning there */
        if (kind == LETTER && !w->begins[i]) w->letter[i] = *c;
        if (kind == PUNCTUATION) {
            uint8_t text[INLINE] = {c[1]};
            int32_t id = find(w, extend(w->seed, c[1]), text, 1, 0);
            w->single[i] = id == TO_CALLER ? w->unknown : id;
        }
        w->kind[i] = w->begins[i] ? (kind == LETTER ? OTHER : kind) | BEGINS : kind;
    }
}

status bothways_wordpiece_page(wordpiece *w, int32_t number, const uint16_t *ends,
                               const uint8_t *text) {
    if (!w || number < 0 || number >= PAGES || !ends || !text || (number && !w->pages[0]))
        return BOTHWAYS_INVALID_ARGUMENT;
    for (int32_t i = 0, from = 0; i < 256; from = ends[i++]) {
        int32_t code = 256 * number + i, length = code < 0x80 ? 1 : code < 0x800 ? 2 : 3;
        if (ends[i] < from || !is_output(text + from, text + ends[i], length + (code > 0xFFFF)))
            return BOTHWAYS_INVALID_ARGUMENT;
    }
    page *table = malloc(sizeof *table + ends[255]);
    if (!table) return BOTHWAYS_NO_MEMORY;
    memcpy(table->ends, ends, sizeof table->ends);
    memcpy(table->output, text, ends[255]);
    page *none = NULL;
    if (!number && !w->pages[0]) set_ascii(w, table);
    /* Another thread may have set it meanwhile: to the same. */
    if (!atomic_compare_exchange_strong(&w->pages[number], &none, table)) free(table);
    return BOTHWAYS_OK;
}

/* Texts that threads share. */
typedef struct {
    const wordpiece *w;
    const wordpiece_batch *b;
    _Atomic int64_t next;
} work;

static void *encode_texts(void *argument) {
    work *shared = argument;
    const wordpiece_batch *b = shared->b;
    for (;;) {
        int64_t first = atomic_fetch_add(&shared->next, BLOCK);
        if (first >= b->texts) return NULL;
        for (int64_t i = first; i < minimum(first + BLOCK, b->texts); i++) {
            int64_t begin = b->starts[i], end = b->starts[i + 1];
            output o = {.ids = b->ids + begin};
            if (b->spans) o.spans = b->spans + 2 * begin, o.words = b->words + begin;
            b->lengths[i] = encode_text(shared->w, b->text + begin, b->text + end, &o, b->missing);
        }
    }
}

/* The byte at which each text begins, from their lengths in characters. */
static int find_starts(const wordpiece_batch *b) {
    int64_t at = 0;
    for (int64_t i = 0; i < b->texts; i++) {
        b->starts[i] = at;
        int64_t left = b->lengths[i];
        if (left < 0 || left > b->bytes - at) return 0;
        while (left >= 8 && b->bytes - at >= 8) {
            uint64_t eight, inner;
            memcpy(&eight, b->text + at, 8);
            inner = eight >> 7 & ~eight >> 6 & 0x0101010101010101u; /* bytes 10xxxxxx */
            left -= 8 - __builtin_popcountll(inner);
            at += 8;
        }
        while (at < b->bytes && (left || (b->text[at] & 0xC0) == 0x80))
            left -= (b->text[at++] & 0xC0) != 0x80;
        if (left) return 0;
    }
    b->starts[b->texts] = at;
    return at == b->bytes;
}

status bothways_wordpiece_encode(const wordpiece *w, wordpiece_batch *b, int32_t threads) {
    if (!w || !w->pages[0] || !b || !b->text || b->bytes < 0 || b->bytes > INT32_MAX ||
        b->texts < 0 || b->texts > MAX_ROWS || !b->starts || !b->lengths || !b->ids ||
        !b->spans != !b->words || !b->missing || threads < 1 || threads > MAX_THREADS ||
        !find_starts(b))
        return BOTHWAYS_INVALID_ARGUMENT;
    work shared = {w, b, 0};
    pthread_t others[MAX_THREADS];
    int32_t started = 0;
    /* Not OpenMP: its threads do not survive a fork, and programs fork between two calls. */
    while (started < threads - 1 &&
           !pthread_create(&others[started], NULL, encode_texts, &shared))
        started++;
    encode_texts(&shared);
    while (started) pthread_join(others[--started], NULL);
    b->tokens = b->left = 0;
    for (int64_t i = 0; i < b->texts; i++) {
        if (b->lengths[i] == INT64_MIN) return BOTHWAYS_INVALID_ARGUMENT;
        b->left += b->lengths[i] < 0;
        size_t from = (size_t)b->starts[i], to = (size_t)b->tokens;
        size_t count = (size_t)maximum(b->lengths[i], 0);
        memmove(b->ids + to, b->ids + from, count * sizeof *b->ids);
        if (b->spans) {
            memmove(b->spans + 2 * to, b->spans + 2 * from, 2 * count * sizeof *b->spans);
            memmove(b->words + to, b->words + from, count * sizeof *b->words);
        }
        b->tokens += (int64_t)count;
    }
    return BOTHWAYS_OK;
}
