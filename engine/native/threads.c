/* A pool of threads. The caller takes part, and waits only for threads that have begun: where another process holds a
 * core, its thread costs its help and nothing more. OpenMP's regions end when every thread has been there, so a busy
 * process beside them makes each of a pass's many regions last until the scheduler's next turn. */

#include "threads.h"

#include <pthread.h>
#include <stdatomic.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define MAX_THREADS 256
/* Chunks of a thread's share of the items: others take what a slow one has left. */
#define CHUNKS 8
/* Multiplications, some microseconds, that are worth a thread. */
#define WORK_OF_A_THREAD (1 << 15)
/* Looks before a thread sleeps: for the next task, a hundred microseconds, because a draft model has pauses
 * between its tasks; and for the end of this one, some ten, as a caller that sleeps leaves its core to a thread whose own
 * another process has taken. */
#define SPINS 4000
#define SPINS_OF_CALLER 600
#define CACHE_LINE 64

/* A thread's share of a task, on cache lines of its own: chunks that are left to take, and how the thread sleeps. */
typedef struct {
    _Alignas(CACHE_LINE) _Atomic int64_t num_left;
    _Atomic int64_t is_asleep;
    pthread_mutex_t mutex;
    pthread_cond_t is_called;
} Share;

static _Atomic int64_t num_threads = 1;
static int64_t num_helpers;
static _Thread_local int64_t number_of_this_thread; /* of callers: 0 */
static _Atomic int64_t is_running;

/* The task that is running. A thread that has taken a chunk finds it as it was then: it changes when all are done. */
static struct {
    Task *task;
    const void *arguments;
    int64_t count, num_chunks;
    _Atomic int64_t num_shares;
} now;
/* The first is the caller's. */
static Share shares[MAX_THREADS] = {
    [0 ... MAX_THREADS - 1] = { .mutex = PTHREAD_MUTEX_INITIALIZER, .is_called = PTHREAD_COND_INITIALIZER },
};
static _Alignas(CACHE_LINE) _Atomic int64_t num_unfinished;

static inline void pause_briefly(void) {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* Chunk where a share begins. */
static inline int64_t first_chunk(int64_t thread) { return thread * now.num_chunks / now.num_shares; }

/* Takes a chunk of a share; -1 if none is left. */
static inline int64_t take_chunk(int64_t owner) {
    int64_t left = atomic_load(&shares[owner].num_left);
    while (left > 0)
        if (atomic_compare_exchange_weak(&shares[owner].num_left, &left, left - 1))
            return first_chunk(owner + 1) - left;
    return -1;
}

static void wake(Share *share) {
    if (!atomic_load(&share->is_asleep)) return;
    pthread_mutex_lock(&share->mutex);
    pthread_cond_signal(&share->is_called);
    pthread_mutex_unlock(&share->mutex);
}

/* Waits until ``is_so`` of a thread's own share, which it is woken for. */
static void wait_until(Share *own, int is_so(const Share *), int spins) {
    for (int i = 0; i < spins; i++) {
        if (is_so(own)) return;
        pause_briefly();
    }
    pthread_mutex_lock(&own->mutex);
    atomic_store(&own->is_asleep, 1);
    while (!is_so(own)) pthread_cond_wait(&own->is_called, &own->mutex);
    atomic_store(&own->is_asleep, 0);
    pthread_mutex_unlock(&own->mutex);
}

static int has_share(const Share *own) { return atomic_load(&own->num_left) > 0; }

static int is_finished(const Share *own) {
    (void)own;
    return atomic_load(&num_unfinished) == 0;
}

/* Does chunks until none is left: those of its own share, which are the same from pass to pass, then those of others.
 * They are counted when all are done, since that counter's cache line would go from core to core with every chunk. */
static void take_part(int64_t thread) {
    const int64_t sharing = now.num_shares;
    int64_t num_done = 0;
    for (int64_t i = 0; i < sharing; i++) {
        for (int64_t chunk; (chunk = take_chunk((thread + i) % sharing)) >= 0; num_done++) {
            const int64_t end = (chunk + 1) * now.count / now.num_chunks;
            for (int64_t item = chunk * now.count / now.num_chunks; item < end; item++) now.task(now.arguments, item);
        }
    }
    if (num_done && atomic_fetch_sub(&num_unfinished, num_done) == num_done) wake(&shares[0]);
}

static void *help(void *number) {
    const int64_t thread = number_of_this_thread = (int64_t)number;
    for (;;) {
        wait_until(&shares[thread], has_share, SPINS);
        take_part(thread);
    }
    return NULL;
}

/* How many threads share tasks from now on, the caller included. */
void set_num_threads(int64_t number) {
    num_threads = number < 1 ? 1 : number > MAX_THREADS ? MAX_THREADS : number;
    for (; num_helpers + 1 < num_threads; num_helpers++) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, help, (void *)(num_helpers + 1))) break;
        pthread_detach(thread);
    }
}

int64_t get_num_threads(void) { return num_threads; }

int64_t this_thread(void) { return number_of_this_thread; }

void run_task(Task *task, const void *arguments, int64_t count, int64_t work) {
    int64_t sharing = work / WORK_OF_A_THREAD;
    if (sharing > num_threads) sharing = num_threads;
    if (sharing > count) sharing = count;
    if (sharing < 2 || atomic_exchange(&is_running, 1)) {
        for (int64_t item = 0; item < count; item++) task(arguments, item);
        return;
    }
    now.task = task;
    now.arguments = arguments;
    now.count = count;
    now.num_chunks = count < CHUNKS * sharing ? count : CHUNKS * sharing;
    now.num_shares = sharing;
    atomic_store(&num_unfinished, now.num_chunks);
    for (int64_t thread = 0; thread < sharing; thread++)
        atomic_store(&shares[thread].num_left, first_chunk(thread + 1) - first_chunk(thread));
    for (int64_t thread = 1; thread < sharing; thread++) wake(&shares[thread]);
    take_part(0);
    wait_until(&shares[0], is_finished, SPINS_OF_CALLER);
    atomic_store(&is_running, 0);
}
