#!/bin/sh
# A machine with an address, processes, shared memory and a home of its own, as far as SSH shows it.
#     machine.sh NETWORK FOLDER SSHD       until it is killed; with it goes all that runs on it
# FOLDER has `passwd`, in which root's home is another, and `sshd_config`.
set -eu
mkdir -p /tmp/ray
exec ip netns exec "$1" unshare --mount --pid --fork --kill-child --mount-proc sh -c '
  set -eu
  mount --bind "$1/passwd" /etc/passwd
  for folder in /run /tmp/ray /dev/shm; do mount -t tmpfs tmpfs "$folder"; done
  mkdir /run/sshd
  "$2" -D -e -f "$1/sshd_config" &
  wait  # also for what others leave behind: here this is the first process
' machine "$2" "$3"
