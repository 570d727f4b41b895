/* Some rounds of speculation in one call: drafts, the target's pass over them, the verdict, and on from there.
 *
 * For models whose round takes hardly longer than what Python does around it. Each round is what it would be on
 * its own: the same passes, the same random numbers, the same comparisons as sampler.py and verify.py, which are
 * the reference. "rounds.py" calls this; all arrays are row-major.
 */

#include <math.h>
#include <omp.h>
#include <string.h>
#include <time.h>

#include "kernels.h"
#include "room.h"

/* A sequence that decodes. The first two follow the rounds. */
typedef struct {
    int64_t num_tokens;           /* the last one is in no cache yet */
    int64_t draft_stored;         /* tokens in the draft model's cache */
    int64_t end;                  /* tokens there may be */
    int64_t limit;                /* tokens to draft in each round */
    int64_t first_known;          /* which of its tokens is the first that is given: what a model has to store */
    int64_t first_block, draft_first_block; /* into blocks; there is room for all rounds */
    int64_t first_stop, num_stops; /* into stops */
} Row;

typedef struct {
    int64_t num_drafted, num_accepted, num_drawn;
    int64_t was_right;            /* whether the draft would have been right about the last token before, that
                                     followed an accepted draft; -1: nobody knows */
} Verdict;

typedef struct {
    int64_t num_rows, num_rounds, longest, width;
    double seconds;               /* no round begins that would end later, if it took as long as the longest */
    Row *rows;
    int64_t *token_ids;           /* [num_rows, width] from first_known on, with room for what follows */
    const int64_t *blocks;
    const int64_t *stops;         /* tokens that end a row */
    const DraftRows *drawing;     /* how rows draw and when drafts end; probs, hindsight: whether somebody asks */
    /* What comes of it, round by round. */
    Verdict *verdicts;            /* [num_rounds, num_rows] */
    float *confidence;            /* the same, of longest tokens; NULL: nobody asks */
    double *times;                /* [num_rounds, 3] seconds of drafting, scoring and verifying */
} Rounds;

/* Work space, by row but for what says otherwise. */
typedef struct {
    int64_t *ones, *counts, *stored, *positions, *limit, *first_block, *num_drawn, *num_drafted, *next, *is_broken;
    int64_t *span;                /* of a row that drafts, in the draft model's pass */
    int64_t *num_logits;          /* of such a span */
    int64_t *hindsight;
    int64_t *first_scored;        /* into the tokens scored */
    int64_t *packed;              /* [rows * width] tokens of a pass, one after the other */
    int64_t *ids;                 /* [rows, longest] drafts */
    float *logits;                /* [tokens scored, vocab] */
    float *probs;                 /* the same, if somebody is not greedy */
    float *draft_probs;           /* [rows, longest, vocab], if somebody asks for them */
} Space;

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec + 1e-9 * time.tv_nsec;
}

static int make_space(Space *space, const Rounds *rounds, int64_t vocab) {
    static _Thread_local Room room;
    int64_t **by_row[] = {
        &space->ones, &space->counts, &space->stored, &space->positions, &space->limit, &space->first_block,
        &space->num_drawn, &space->num_drafted, &space->next, &space->is_broken, &space->span, &space->first_scored,
        &space->num_logits, &space->hindsight,
    };
    const int num_by_row = sizeof by_row / sizeof *by_row;
    const int64_t rows = rounds->num_rows, drafts = rows * rounds->longest, scored = rows + drafts;
    const size_t numbers = num_by_row * piece(rows, sizeof(int64_t)) + piece(drafts, sizeof(int64_t))
        + piece(rows * rounds->width, sizeof(int64_t));
    const DraftRows *drawing = rounds->drawing;
    const int64_t num_probs = drawing->way ? scored : 0, num_draft_probs = drawing->probs ? drafts : 0;
    const size_t vectors = piece(scored * vocab, sizeof(float)) + piece(num_probs * vocab, sizeof(float))
        + piece(num_draft_probs * vocab, sizeof(float));
    if (!make_room(&room, numbers + vectors)) return 0;
    for (int i = 0; i < num_by_row; i++) *by_row[i] = take(&room, rows, sizeof(int64_t));
    for (int64_t row = 0; row < rows; row++) space->ones[row] = 1;
    space->packed = take(&room, rows * rounds->width, sizeof(int64_t));
    space->ids = take(&room, drafts, sizeof(int64_t));
    space->logits = take(&room, scored * vocab, sizeof(float));
    space->probs = take(&room, num_probs * vocab, sizeof(float));
    space->draft_probs = take(&room, num_draft_probs * vocab, sizeof(float));
    return 1;
}

/* Where a row's tokens end, less count. */
static int64_t *last_tokens(const Rounds *rounds, int64_t row, int64_t count) {
    const Row *of = &rounds->rows[row];
    return rounds->token_ids + row * rounds->width + of->num_tokens - of->first_known - count;
}

/* How much every row drafts; 0 if one that should has no room for a draft: such a round is none of these. */
static int find_limits(const Rounds *rounds, Space *space) {
    for (int64_t row = 0; row < rounds->num_rows; row++) {
        const Row *of = &rounds->rows[row];
        const int64_t left = of->end - of->num_tokens - 1;
        space->limit[row] = left < of->limit ? left : of->limit;
        if (of->limit > 0 && space->limit[row] < 1) return 0;
    }
    return 1;
}

/* Drafts of the rows that have some, after what the draft model has missed of them. */
static int draft_all(const Decoder *model, const Rounds *rounds, Space *space, DraftRows *drawing) {
    const int64_t known = model->head->out_features;
    int64_t size = 0, num_spans = 0;
    for (int64_t row = 0; row < rounds->num_rows; row++) {
        const Row *of = &rounds->rows[row];
        space->positions[row] = of->num_tokens;
        if (space->limit[row] == 0) continue;
        const int64_t count = of->num_tokens - of->draft_stored;
        const int64_t *missed = last_tokens(rounds, row, count);
        /* Any stands in for tokens that only the target has. */
        for (int64_t i = 0; i < count; i++) space->packed[size++] = missed[i] < known ? missed[i] : known - 1;
        const int is_greedy = !drawing->way || drawing->way[row] == GREEDY;
        space->counts[num_spans] = count;
        space->num_logits[num_spans] = drawing->hindsight && count == 2 && is_greedy ? 2 : 1;
        space->stored[num_spans] = of->draft_stored;
        space->first_block[num_spans] = of->draft_first_block;
        space->span[row] = num_spans++;
    }
    const NewTokens new = {
        .num_spans = num_spans, .num_tokens = space->counts, .num_stored = space->stored,
        .num_logits = space->num_logits, .first_block = space->first_block, .token_ids = space->packed,
        .blocks = rounds->blocks,
    };
    drawing->span = space->span;
    drawing->hindsight = drawing->hindsight ? space->hindsight : NULL;
    drawing->limit = space->limit;
    drawing->positions = space->positions;
    drawing->ids = space->ids;
    drawing->probs = drawing->probs ? space->draft_probs : NULL;
    drawing->num_drawn = space->num_drawn;
    drawing->num_kept = space->num_drafted;
    return draft(model, &new, drawing);
}

/* The target's logits of every row's last token and its drafts. */
static int score_all(const Decoder *target, const Rounds *rounds, Space *space) {
    int64_t size = 0;
    for (int64_t row = 0; row < rounds->num_rows; row++) {
        const int64_t *drafted = space->ids + row * rounds->longest;
        space->first_scored[row] = size;
        space->counts[row] = 1 + space->num_drafted[row];
        space->stored[row] = rounds->rows[row].num_tokens - 1;
        space->first_block[row] = rounds->rows[row].first_block;
        space->packed[size++] = *last_tokens(rounds, row, 1);
        for (int64_t i = 0; i < space->num_drafted[row]; i++) space->packed[size++] = drafted[i];
    }
    const NewTokens new = {
        .num_spans = rounds->num_rows, .num_tokens = space->counts, .num_stored = space->stored,
        .num_logits = space->counts, .first_block = space->first_block, .token_ids = space->packed,
        .blocks = rounds->blocks,
    };
    return decode(target, &new, space->logits);
}

/* Whether a row's draft at this position stands, -1 being none; said is the token that then stands there. */
static int stands(const Rounds *rounds, const Space *space, int64_t row, int64_t position, int64_t draft,
                  int64_t vocab, int64_t *said) {
    const DraftRows *drawing = rounds->drawing;
    const int64_t way = drawing->way ? drawing->way[row] : GREEDY;
    const int64_t at = space->first_scored[row] + position, place = rounds->rows[row].num_tokens + position;
    const float *logits = space->logits + at * vocab;
    float *probs = space->probs + at * vocab, unused;
    if (way == GREEDY) {
        likeliest(said, &unused, logits, 1, vocab);
        return *said == draft;
    }
    const Processors *all = drawing->processors;
    const Processors own = { all->temperature + row, all->top_k + row, all->top_p + row, all->min_p + row };
    float *few = drawing->few ? drawing->few + omp_get_thread_num() * vocab : NULL;
    process(probs, logits, &own, few, 1, 1, vocab, 1);
    if (way == RACE) {
        race(said, probs, drawing->seeds + row, &place, 0, 1, 1, vocab, 1);
        return *said == draft;
    }
    /* Leviathan et al. 2211.17192, algorithm 1, as in verify_rejection. */
    const float *guessed = draft < 0 ? NULL : space->draft_probs + (row * rounds->longest + position) * vocab;
    double number;
    uniform(&number, drawing->seeds + row, &place, ACCEPT_STREAM, 1);
    *said = draft;
    if (guessed && number * guessed[draft] < probs[draft]) return 1;
    uniform(&number, drawing->seeds + row, &place, RECOVER_STREAM, 1);
    *said = follow(probs, guessed, 1.0, number, vocab);
    return 0;
}

/* How many of a row's drafts stand; next is what follows them. Stops at logits that are no distribution. */
static int64_t judge(const Rounds *rounds, Space *space, int64_t row, int64_t vocab) {
    const int64_t *drafted = space->ids + row * rounds->longest;
    for (int64_t position = 0;; position++) {
        const float *logits = space->logits + (space->first_scored[row] + position) * vocab;
        space->is_broken[row] = !is_distribution(logits, vocab);
        if (space->is_broken[row]) return position;
        const int64_t draft = position < space->num_drafted[row] ? drafted[position] : -1;
        if (!stands(rounds, space, row, position, draft, vocab, &space->next[row])) return position;
    }
}

/* Appends what a row has said; whether it may go on. */
static int append(const Rounds *rounds, const Space *space, int64_t row, const Verdict *verdict) {
    Row *of = &rounds->rows[row];
    const int64_t num_accepted = verdict->num_accepted, *stops = rounds->stops + of->first_stop;
    int64_t *said = last_tokens(rounds, row, 0);
    memcpy(said, space->ids + row * rounds->longest, num_accepted * sizeof(int64_t));
    said[num_accepted] = space->next[row];
    /* The last draft drawn was not stored; what was stored of rejected ones is overwritten. */
    if (verdict->num_drawn) {
        const int64_t stored = of->num_tokens + verdict->num_drawn - 1, known = of->num_tokens + num_accepted;
        of->draft_stored = stored < known ? stored : known;
    }
    of->num_tokens += num_accepted + 1;
    for (int64_t i = 0; i <= num_accepted; i++)
        for (int64_t stop = 0; stop < of->num_stops; stop++)
            if (said[i] == stops[stop]) return 0;
    return of->num_tokens < of->end;
}

/* How many rounds have become something. It ends when a row has ended, when time is up, and before a round that
 * cannot be judged here: no room for a draft, logits that are no distribution, no memory. draft_model is NULL if
 * nobody drafts. */
int64_t run_rounds(const Decoder *target, const Decoder *draft_model, const Rounds *rounds) {
    const int64_t num_rows = rounds->num_rows, vocab = target->head->out_features;
    const double began = now();
    double round_began = began, longest_round = 0.0;
    DraftRows drawing = *rounds->drawing;
    Space space;
    if (!make_space(&space, rounds, vocab)) return 0;
    memset(space.num_drafted, 0, num_rows * sizeof(int64_t));
    memset(space.num_drawn, 0, num_rows * sizeof(int64_t));
    int64_t round = 0;
    for (; round < rounds->num_rounds && round_began - began + longest_round <= rounds->seconds; round++) {
        Verdict *verdicts = rounds->verdicts + round * num_rows;
        double *times = rounds->times + 3 * round;
        if (rounds->confidence) drawing.confidence = rounds->confidence + round * num_rows * rounds->longest;
        if (draft_model && !find_limits(rounds, &space)) break;
        if (draft_model && !draft_all(draft_model, rounds, &space, &drawing)) break;
        const double drafted = now();
        if (!score_all(target, rounds, &space)) break;
        const double scored = now();
        int64_t num_broken = 0, num_ended = 0;
        const int is_work = drawing.way && num_rows * vocab > MIN_PARALLEL_DRAWS;
        #pragma omp parallel for num_threads(drawing.num_threads) if (is_work)
        for (int64_t row = 0; row < num_rows; row++) {
            const int64_t num_accepted = judge(rounds, &space, row, vocab);
            verdicts[row] = (Verdict){ space.num_drafted[row], num_accepted, space.num_drawn[row], -1 };
            if (draft_model && drawing.hindsight && space.hindsight[row] >= 0)
                verdicts[row].was_right = space.hindsight[row] == *last_tokens(rounds, row, 1);
        }
        for (int64_t row = 0; row < num_rows; row++) num_broken += space.is_broken[row];
        if (num_broken) break;
        for (int64_t row = 0; row < num_rows; row++) num_ended += !append(rounds, &space, row, &verdicts[row]);
        const double judged = now();
        times[0] = drafted - round_began;
        times[1] = scored - drafted;
        times[2] = judged - scored;
        if (judged - round_began > longest_round) longest_round = judged - round_began;
        round_began = judged;
        if (num_ended) return round + 1;
    }
    return round;
}
