// A machine on which no process can begin for a while: preloaded into every process of a deployment (no_fork.py).
// While the file $CHAOS_NO_FORK is there, each call that would begin a process fails as where the machine has no room for
// one more. A limit of processes does not count for root, and would hurt all that this user runs. Threads begin as ever.

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <spawn.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

// Ray's own servers go on: a raylet that cannot begin a worker ends (Ray 2.60).
static int is_full(void) {
  const char *path = getenv("CHAOS_NO_FORK"), *name = program_invocation_short_name;
  return path && strcmp(name, "raylet") && strcmp(name, "gcs_server") && !access(path, F_OK);
}

pid_t fork(void) {
  static pid_t (*real)(void);
  if (!real) real = (pid_t(*)(void))dlsym(RTLD_NEXT, "fork");
  if (!is_full()) return real();
  errno = EAGAIN;
  return -1;
}

pid_t vfork(void) { return fork(); }  // a child of vfork may not return from here

#define SPAWNS(NAME)                                                                                                    \
  int NAME(pid_t* restrict pid, const char* restrict program, const posix_spawn_file_actions_t* files,                  \
           const posix_spawnattr_t* restrict how, char* const arguments[restrict], char* const variables[restrict]) {   \
    static int (*real)(pid_t*, const char*, const posix_spawn_file_actions_t*, const posix_spawnattr_t*, char* const[], \
                       char* const[]);                                                                                  \
    if (!real) real = dlsym(RTLD_NEXT, #NAME);                                                                          \
    return is_full() ? EAGAIN : real(pid, program, files, how, arguments, variables);                                   \
  }
SPAWNS(posix_spawn)
SPAWNS(posix_spawnp)
