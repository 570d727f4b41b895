/* Working memory of a function, kept from call to call: asking for it anew costs more than a small product. */

#ifndef FORETOKEN_ROOM_H
#define FORETOKEN_ROOM_H

#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

/* Pieces begin at cache lines. */
#define LINE 64

typedef struct {
    char *start;
    size_t size, used;
} Room;

/* Bytes of a piece of so many numbers. */
static inline size_t piece(int64_t length, size_t number) { return (length * number + LINE - 1) / LINE * LINE; }

/* Empties the room, which then holds so many bytes; 0 if there is no memory. */
static inline int make_room(Room *room, size_t size) {
    room->used = 0;
    if (size <= room->size) return 1;
    free(room->start);
    room->start = aligned_alloc(LINE, piece(size, 1));
    room->size = room->start ? size : 0;
    return room->start != NULL;
}

/* The next piece of a room that has been made large enough. */
static inline void *take(Room *room, int64_t length, size_t number) {
    void *taken = room->start + room->used;
    room->used += piece(length, number);
    return taken;
}

#endif
