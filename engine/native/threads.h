/* Threads that share the items of a task. */

#ifndef TRUEDRAFT_THREADS_H
#define TRUEDRAFT_THREADS_H

#include <stdint.h>

/* Does one item. */
typedef void Task(const void *arguments, int64_t item);

void set_num_threads(int64_t number);
int64_t get_num_threads(void);

/* Below get_num_threads(), and another one for each item of a task that is done at the same time. */
int64_t this_thread(void);

/* Does items 0 .. count - 1, on as many threads as ``work`` multiplications are worth. On the caller's alone while
 * another task is running. */
void run_task(Task *task, const void *arguments, int64_t count, int64_t work);

#endif
