// A wall clock that a test can move: preloaded into every process of a deployment (clock.py).
// $CHAOS_CLOCK names a file with the offset of the wall clock in seconds, which all processes map.

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const int64_t NEVER;
static volatile const int64_t* offset_s = &NEVER;
static int (*real_gettime)(clockid_t, struct timespec*);

// Ray's own servers keep their clock: GCS queues placement groups by the wall clock (Ray 2.60), so after a step back it
// places no lost group again until the clock has caught up.
static int is_rays(void) {
  return !strcmp(program_invocation_short_name, "gcs_server") || !strcmp(program_invocation_short_name, "raylet");
}

__attribute__((constructor)) static void begin(void) {
  real_gettime = (int (*)(clockid_t, struct timespec*))dlsym(RTLD_NEXT, "clock_gettime");
  const char* path = is_rays() ? NULL : getenv("CHAOS_CLOCK");
  int fd = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
  if (fd < 0) return;
  void* mapped = mmap(NULL, sizeof(int64_t), PROT_READ, MAP_SHARED, fd, 0);
  if (mapped != MAP_FAILED) offset_s = mapped;
  close(fd);
}

int clock_gettime(clockid_t clock, struct timespec* now) {
  if (!real_gettime) begin();  // another library's constructor may ask first
  int failed = real_gettime(clock, now);
  if (!failed && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += *offset_s;
  return failed;
}

int gettimeofday(struct timeval* restrict now, void* restrict zone) {
  struct timespec exact;
  (void)zone;
  int failed = clock_gettime(CLOCK_REALTIME, &exact);
  if (!failed) now->tv_sec = exact.tv_sec, now->tv_usec = exact.tv_nsec / 1000;
  return failed;
}

time_t time(time_t* into) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  if (into) *into = now.tv_sec;
  return now.tv_sec;
}

// A wait until a time of the wall clock ends by the machine's clock, which does not step: its end is moved back. Else each
// wait that begins after a step would be too long or too short; on a machine whose clock steps, only those are that last
// meanwhile.

static struct timespec by_machine(const struct timespec* until) {
  struct timespec moved = *until;
  moved.tv_sec -= *offset_s;
  return moved;
}

static void* real(const char* name, const char* version) {
  void* found = dlvsym(RTLD_NEXT, name, version);  // plain dlsym may give an older one, with conditions of another layout
  return found ? found : dlsym(RTLD_NEXT, name);
}

typedef int (*cond_wait)(pthread_cond_t*, pthread_mutex_t*, const struct timespec*);
typedef int (*sem_wait_until)(sem_t*, const struct timespec*);

int pthread_cond_timedwait(pthread_cond_t* restrict cond, pthread_mutex_t* restrict mutex,
                           const struct timespec* restrict until) {
  static cond_wait wait;
  if (!wait) wait = (cond_wait)real("pthread_cond_timedwait", "GLIBC_2.3.2");
  const struct timespec moved = by_machine(until);
  int is_monotonic = cond->__data.__wrefs & 2;  // glibc's flag
  return wait(cond, mutex, is_monotonic ? until : &moved);
}

int sem_timedwait(sem_t* restrict sem, const struct timespec* restrict until) {
  static sem_wait_until wait;
  if (!wait) wait = (sem_wait_until)real("sem_timedwait", "GLIBC_2.2.5");
  const struct timespec moved = by_machine(until);
  return wait(sem, &moved);
}
