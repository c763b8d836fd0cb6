#!/bin/sh
# Unpacks Debian's headless Chromium, with the libraries and a font that it needs, into the folder that is named:
# nothing is installed.
set -eu
command -v apt-get > /dev/null && command -v dpkg > /dev/null || { echo "no apt-get here"; exit 1; }
mkdir -p "$1"
cd "$1"
needed() {
  apt-cache depends --recurse --no-recommends --no-suggests --no-conflicts --no-breaks --no-replaces --no-enhances \
    chromium-headless-shell fonts-dejavu-core | grep '^[a-z0-9]' | sort -u | grep -v -e '^libc6$' -e '^debconf' -e '^dpkg$'
}
get() { needed | xargs apt-get -qq download 2> get.log; }
get || { apt-get -qq update 2> get.log && get; } || { tail -1 get.log; exit 1; }
for package in ./*.deb; do dpkg -x "$package" .; done
rm -f ./*.deb get.log
