/* The interface between Python (`text/wordpiece.py`) and the tokenizer, a library of its own: it needs
 * neither OpenMP, which PyTorch brings, nor a certain processor. Conventions as in bothways.h. */

#ifndef WORDPIECE_H
#define WORDPIECE_H

#include "bothways.h"

/* Increase it with every change of a signature, a struct or the meaning of an argument. */
#define WORDPIECE_ABI 1

/* Strings end to end, their lengths in bytes, and an id of each. */
typedef struct {
    const uint8_t *text;
    const int64_t *lengths;
    const int32_t *ids;
    int64_t bytes, count;
} strings;

/* The vocabulary of a WordPiece tokenizer. */
typedef struct {
    strings tokens;
    strings added; /* found in the raw text: those of one first byte together, the longest first;
                    * with an id of -1, a text that contains it is left to the caller */
    const uint8_t *prefix; /* of pieces that continue a word */
    int64_t prefix_length;
    uint64_t seed; /* of the hash: a random one, so that no vocabulary is slow on purpose */
    int32_t unknown, max_characters; /* longer words are unknown */
} wordpiece_vocabulary;

/* Texts in UTF-8, end to end, and room for their tokens: for as many as they have bytes. */
typedef struct {
    const uint8_t *text;
    int64_t bytes, texts;
    int64_t *starts;  /* (texts + 1): the byte at which each begins */
    int64_t *lengths; /* (texts): in characters; then in tokens, or -1: left to the caller */
    int32_t *ids;     /* (tokens), texts that are left to the caller have none */
    int32_t *spans;   /* (tokens, 2): begin and end in characters; NULL if not asked for */
    int32_t *words;   /* (tokens): the number of the word in its text; NULL with `spans` */
    uint8_t *missing; /* (4352): set to 1 for a page without which a text is left to the caller */
    int64_t tokens, left; /* set to the number of all tokens, and of the texts that are left */
} wordpiece_batch;

typedef struct wordpiece wordpiece;

/* The version, and the sizes of the structs above in their order; `count`: how many fit. */
EXPORT int32_t bothways_wordpiece_abi(int64_t *struct_sizes, int32_t count);

/* A tokenizer without pages → `result`. */
EXPORT status bothways_wordpiece_new(const wordpiece_vocabulary *v, wordpiece **result);

EXPORT status bothways_wordpiece_free(wordpiece *w);

/* What becomes of the 256 code points from 256 · `number` on: the bytes before ends[i] and after
 * those of the one before, in UTF-8 with 0xFF for the end of a word, 0xFE before a character that is
 * a word of its own, and 0xFD if a text with it is left to the caller. The first page comes first. */
EXPORT status bothways_wordpiece_page(wordpiece *w, int32_t number, const uint16_t *ends,
                                      const uint8_t *text);

/* Several threads may call it at once, also while pages are set. */
EXPORT status bothways_wordpiece_encode(const wordpiece *w, wordpiece_batch *b, int32_t threads);

#endif
