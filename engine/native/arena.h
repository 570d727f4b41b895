/* Working memory of a function, kept from call to call: to ask for it anew costs more than a small product. */

#ifndef TRUEDRAFT_ARENA_H
#define TRUEDRAFT_ARENA_H

#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

/* Allocations begin at cache lines. */
#define CACHE_LINE 64

typedef struct {
    char *start;
    size_t size, reserved, used;
} Arena;

/* Bytes that an allocation takes. */
static inline size_t arena_size(int64_t length, size_t size) {
    return (length * size + CACHE_LINE - 1) / CACHE_LINE * CACHE_LINE;
}

/* Empties the arena, which then holds size bytes; 0 if there is no memory. */
static inline int arena_reserve(Arena *arena, size_t size) {
    arena->used = 0;
    arena->reserved = size;
    if (size <= arena->size) return 1;
    free(arena->start);
    arena->start = aligned_alloc(CACHE_LINE, arena_size(size, 1));
    arena->size = arena->start ? size : 0;
    return arena->start != NULL;
}

/* Part of an arena; NULL where less is reserved, which is a mistake of the caller. */
static inline void *arena_alloc(Arena *arena, int64_t length, size_t size) {
    void *allocated = arena->start + arena->used;
    arena->used += arena_size(length, size);
    return arena->used <= arena->reserved ? allocated : NULL;
}

#endif
