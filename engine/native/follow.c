/* What the drafter's cache has of a row after a round, and what waits for a head.
 *
 * A head is given the target's states of all tokens that stand. Its place p holds the state of token p and the token
 * after it, so that the state of the last accepted one waits for the next draft, whose first logits it gives. What a
 * draft has stored from the head's own states is overwritten. All arrays are row-major.
 */

#include <string.h>

#include "rounds.h"

/* The last draft drawn was not stored; what was stored of rejected ones is overwritten. */
static void follow_with_model(Row *row, const Scratch *scratch, int64_t i, int64_t num_accepted) {
    const int64_t stored = row->num_tokens + scratch->num_drafted[i] - 1;
    const int64_t valid = row->num_tokens + num_accepted;
    row->num_draft_computed = stored < valid ? stored : valid;
}

/* What a row has for a head: states that waited and new ones, from place ``first`` on. */
typedef struct {
    int64_t first, num_waiting, num_new;
    int64_t is_stored;            /* too many to wait: all but the last go into the cache */
} Told;

static Told find_told(const Drafter *drafter, const Rounds *rounds, const Scratch *scratch, int64_t i,
                      int64_t num_accepted) {
    const Row *row = rounds->rows[i];
    const int has_fed = has_drafted(rounds, scratch, i);
    Told told = {
        .first = has_fed ? row->num_tokens - 1 : row->num_draft_computed,
        .num_waiting = has_fed ? 0 : row->num_waiting,
        .num_new = row->num_tokens - row->num_computed + num_accepted,
    };
    told.is_stored = told.num_waiting + told.num_new > drafter->max_waiting;
    return told;
}

/* Fuses the target's states of all tokens that stand, of the rows that the head follows. 0 if there is no memory. */
static int fuse_standing(const Drafter *drafter, const Rounds *rounds, Scratch *scratch, const int64_t *num_accepted) {
    const int64_t width = drafter->fusion->num_taps * drafter->fusion->tap_size;
    int64_t num_standing = 0, first = 0;
    for (int64_t i = 0; i < rounds->num_rows; i++) {
        const Row *row = rounds->rows[i];
        const int64_t num_new = row->num_tokens - row->num_computed, count = num_new + num_accepted[i];
        if (row->waiting) {
            memmove(scratch->tapped + num_standing * width, scratch->tapped + first * width,
                    count * width * sizeof(float));
            num_standing += count;
        }
        first += num_new + scratch->num_drafted[i];
    }
    return fuse(drafter->fusion, scratch->fused, scratch->tapped, num_standing) != 0;
}

/* The tokens of a row that come after the places from ``first`` on; accepted drafts are not in its text yet. */
static void copy_following(const Rounds *rounds, const Scratch *scratch, int64_t i, int64_t first, int64_t count,
                           int64_t *to) {
    const Row *row = rounds->rows[i];
    for (int64_t place = first; place < first + count; place++) {
        const int64_t past = place + 1 - row->num_tokens;
        *to++ = past < 0 ? row->token_ids[place + 1] : scratch->draft_ids[i * rounds->max_drafts + past];
    }
}

/* Brings the cache up to date of rows that have too much to wait. 0 if a table has no blocks for it, or as ``decode``. */
static int store_told(const Drafter *drafter, const Rounds *rounds, Scratch *scratch, const int64_t *num_accepted) {
    const int64_t size = drafter->model->hidden_size;
    const float *fused = scratch->fused;
    int64_t num_spans = 0, num_tokens = 0;
    for (int64_t i = 0; i < rounds->num_rows; i++) {
        const Row *row = rounds->rows[i];
        if (!row->waiting) continue;
        const Told told = find_told(drafter, rounds, scratch, i, num_accepted[i]);
        const int64_t count = told.num_waiting + told.num_new - 1;
        if (told.is_stored) {
            if (told.first + count > row->num_draft_blocks * drafter->model->block_size) return 0;
            scratch->query_lens[num_spans] = count;
            scratch->num_computed[num_spans] = told.first;
            scratch->span_first_block[num_spans++] = scratch->first_draft_block[i];
            copy_following(rounds, scratch, i, told.first, count, scratch->token_ids + num_tokens);
            float *states = scratch->states + num_tokens * size;
            memcpy(states, row->waiting, told.num_waiting * size * sizeof(float));
            memcpy(states + told.num_waiting * size, fused, (told.num_new - 1) * size * sizeof(float));
            num_tokens += count;
        }
        fused += told.num_new * size;
    }
    const NewTokens new = {
        .num_spans = num_spans, .num_tokens = scratch->query_lens, .num_stored = scratch->num_computed,
        .num_logits = scratch->zeros, .first_block = scratch->span_first_block,
        .token_ids = scratch->token_ids, .blocks = scratch->blocks, .states = scratch->states,
    };
    return !num_spans || decode(drafter->model, &new, NULL, scratch->draft_logits);
}

static void keep_told(const Drafter *drafter, const Rounds *rounds, const Scratch *scratch, const int64_t *num_accepted) {
    const int64_t size = drafter->model->hidden_size;
    const float *fused = scratch->fused;
    for (int64_t i = 0; i < rounds->num_rows; i++) {
        Row *row = rounds->rows[i];
        if (!row->waiting) continue;
        const Told told = find_told(drafter, rounds, scratch, i, num_accepted[i]);
        const int64_t num_stored = told.is_stored ? told.num_waiting + told.num_new - 1 : 0;
        const int64_t num_kept = told.is_stored ? 1 : told.num_new, end = told.is_stored ? 0 : told.num_waiting;
        fused += told.num_new * size;
        memcpy(row->waiting + end * size, fused - num_kept * size, num_kept * size * sizeof(float));
        row->num_draft_computed = told.first + num_stored;
        row->num_waiting = end + num_kept;
    }
}

/* Takes in what is accepted of every row, before it is appended. 0 if that could not be, and then nothing has happened
 * but in the cache. */
int follow_rows(const Drafter *drafter, const Rounds *rounds, Scratch *scratch, const int64_t *num_accepted) {
    if (is_head(drafter)) {
        if (!fuse_standing(drafter, rounds, scratch, num_accepted)) return 0;
        if (!store_told(drafter, rounds, scratch, num_accepted)) return 0;
        keep_told(drafter, rounds, scratch, num_accepted);
        return 1;
    }
    for (int64_t i = 0; i < rounds->num_rows; i++)
        if (has_drafted(rounds, scratch, i)) follow_with_model(rounds->rows[i], scratch, i, num_accepted[i]);
    return 1;
}
