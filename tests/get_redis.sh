#!/bin/sh
# Unpacks Debian's redis-server into the folder that is named: nothing is installed, and no service starts.
set -eu
command -v apt-get > /dev/null && command -v dpkg > /dev/null || { echo "no apt-get here"; exit 1; }
mkdir -p "$1"
cd "$1"
get() { apt-get -qq download redis-server redis-tools libjemalloc2 liblzf1 libatomic1 2> get.log; }
get || { apt-get -qq update 2> get.log && get; } || { tail -1 get.log; exit 1; }
for package in ./*.deb; do dpkg -x "$package" .; done
rm -f ./*.deb get.log
