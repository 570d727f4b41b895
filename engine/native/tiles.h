/* Tiles: registers of 16 rows of 64 bytes each, two of which one instruction multiplies (Intel AMX).
 *
 * What an instruction does takes as long for one row as for sixteen, so rows come sixteen at a time, the last of them with
 * whatever lies behind them: a row of a product depends on no other row.
 */

#ifndef TRUEDRAFT_TILES_H
#define TRUEDRAFT_TILES_H

#include <stdint.h>

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AMX_INT8__) && defined(__linux__)
#define HAS_TILES 1
#else
#define HAS_TILES 0
#endif

enum { TILE_ROWS = 16, TILE_BYTES_OF_ROW = 64 };

/* As ldtilecfg reads it; tiles 0 to 7 are there. */
typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} TileShapes;

/* tiles.c */
int64_t has_tiles(void);
int64_t next_product(void);
void shape_tiles(const TileShapes *shapes, int64_t product);

/* Rows that begin ``stride`` bytes apart into a tile, and back. A compiler's own functions for these do not say which
 * memory they read and write. */
#define LOAD_TILE(tile, from, stride) \
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #tile : : "r"(from), "r"((int64_t)(stride)) : "memory")
#define STORE_TILE(tile, to, stride) \
    __asm__ volatile("tilestored %%tmm" #tile ", (%0,%1,1)" : : "r"(to), "r"((int64_t)(stride)) : "memory")
#define CLEAR_TILE(tile) __asm__ volatile("tilezero %%tmm" #tile : : )
/* Adds to each number of ``sum`` the products of a row of ``left`` with a column of ``right``: of pairs of bfloat16, of
 * fours of signed bytes. */
#define ADD_BFLOAT16(sum, left, right) \
    __asm__ volatile("tdpbf16ps %%tmm" #right ", %%tmm" #left ", %%tmm" #sum : : )
#define ADD_BYTES(sum, left, right) \
    __asm__ volatile("tdpbssd %%tmm" #right ", %%tmm" #left ", %%tmm" #sum : : )

#endif
