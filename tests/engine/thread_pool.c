/* Runs tasks of the pool with growing numbers of threads, nested and from several callers, and counts what was done.
 * test_thread_pool compiles it with the thread sanitizer. */

#include "threads.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

#define MOST 200
#define MUCH_WORK ((int64_t)1 << 40)

/* Not atomic: each item is done by one thread, and the caller reads them afterwards. */
typedef struct {
    int64_t done[MOST], sum;
} Counts;

static void inner(const void *arguments, int64_t item) { ((Counts *)arguments)->done[item] += 1; }

static void outer(const void *arguments, int64_t item) {
    Counts nested = { { 0 }, 0 };
    ((Counts *)arguments)->done[item] += 1;
    if (item % 16 == 0) {
        run_task(inner, &nested, 5, MUCH_WORK);
        for (int64_t i = 0; i < 5; i++)
            if (nested.done[i] != 1) exit(3);
    }
}

static void check(int64_t count, int64_t rounds) {
    for (int64_t round = 0; round < rounds; round++) {
        Counts counts = { { 0 }, 0 };
        run_task(outer, &counts, count, MUCH_WORK);
        for (int64_t item = 0; item < MOST; item++)
            if (counts.done[item] != (item < count)) {
                fprintf(stderr, "item %ld of %ld was done %ld times\n", (long)item, (long)count, (long)counts.done[item]);
                exit(2);
            }
    }
}

static void *call(void *rounds) {
    check(37, (int64_t)rounds);
    return NULL;
}

int main(int number, char **arguments) {
    for (int i = 2; i < number; i++) {
        const int64_t rounds = atol(arguments[1]);
        set_num_threads(atol(arguments[i]));
        for (int64_t count = 1; count <= MOST; count = 3 * count + 1) check(count, rounds);
        pthread_t other;
        pthread_create(&other, NULL, call, (void *)rounds);
        call((void *)rounds);
        pthread_join(other, NULL);
    }
    return 0;
}
