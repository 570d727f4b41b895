/* Whether tiles can be used, and their shapes (tiles.h). */

#include "tiles.h"

#include <stdatomic.h>
#include <stddef.h>
#if HAS_TILES
#include <sys/syscall.h>
#include <unistd.h>
#endif

/* ARCH_REQ_XCOMP_PERM of asm/prctl.h, and XFEATURE_XTILE_DATA: a process asks for the memory that they take where a thread
 * is interrupted. */
#define ASK_PERMISSION 0x1023
#define TILE_DATA 18

/* Whether the processor has tiles and the kernel lets this process use them. */
int64_t has_tiles(void) {
#if HAS_TILES
    static _Atomic int answer = -1;
    if (atomic_load(&answer) < 0) atomic_store(&answer, syscall(SYS_arch_prctl, ASK_PERMISSION, TILE_DATA) == 0);
    return atomic_load(&answer);
#else
    return 0;
#endif
}

/* A number for ``shape_tiles``. */
int64_t next_product(void) {
    static _Atomic int64_t count = 0;
    return atomic_fetch_add(&count, 1) + 1;
}

/* Gives this thread's tiles their shapes, once for a product: that takes a tenth of a microsecond. In between another
 * library may have given them others. */
void shape_tiles(const TileShapes *shapes, int64_t product) {
    static _Thread_local int64_t shaped_for = 0;
    if (shaped_for == product) return;
    shaped_for = product;
#if HAS_TILES
    __asm__ volatile("ldtilecfg %0" : : "m"(*shapes));
#else
    (void)shapes;
#endif
}
