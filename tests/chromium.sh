#!/usr/bin/env bash
# Prints the path of a Chromium, in which tests look at the page of `planc inspect --html`. Installs Debian's
# the first time (100 MB down), for which it must be root.
set -euo pipefail
for name in chromium chromium-browser google-chrome; do
    if path=$(command -v "$name"); then
        echo "$path"
        exit
    fi
done
fail() {
    echo "Chromium is needed to test the report page: $1" >&2
    exit 1
}
command -v apt-get >/dev/null || fail "install it, as \`chromium\`; there is no apt-get to do so"
[ "$(id -u)" = 0 ] || fail "install it (\`apt-get install chromium\`), or run this as root"
{ apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -qy --no-install-recommends chromium; } >&2 ||
    fail "apt-get could not install it"
command -v chromium || fail "apt-get installed it, and it is not there"
