#!/usr/bin/env bash
# Prometheus and promtool for the tests, from Debian's package: unpacked into FOLDER (95 MB), not installed, so that no
# service is started, nothing outside of FOLDER changes and no root is needed. Does nothing where they are on PATH, or
# unpacked already. Exit status 1 with the reason where they cannot be had.
#
#     tests/deploy/prometheus/install.sh [FOLDER]    # by default rollmesh/prometheus in the user's cache
set -euo pipefail
folder=${1:-${XDG_CACHE_HOME:-$HOME/.cache}/rollmesh/prometheus}
if command -v promtool >/dev/null && command -v prometheus >/dev/null; then exit 0; fi
if [ -x "$folder/usr/bin/promtool" ]; then exit 0; fi
if ! command -v apt-get >/dev/null; then
  echo "promtool and prometheus are not on PATH, and there is no apt-get to get them with"
  exit 1
fi
if [ "$(id -u)" = 0 ]; then apt-get update -qq || true; fi
download=$(mktemp -d)
trap 'rm -rf "$download"' EXIT
chmod 755 "$download"
(cd "$download" && apt-get download -qq -o APT::Sandbox::User="$(id -un)" prometheus) || {
  echo "apt-get cannot download Debian's prometheus: see above"
  exit 1
}
# In one step, so that a second caller sees all of it or nothing.
mkdir -p "$(dirname "$folder")"
unpacked=$(mktemp -d "$folder.XXXXXX")
for package in "$download"/*.deb; do dpkg-deb --extract "$package" "$unpacked"; done
rm -rf "$folder"
mv "$unpacked" "$folder"
