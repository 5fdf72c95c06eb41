#!/bin/sh
# Prints the folder of doctest.h: the system's, or else one that this script
# fills from the package doctest-dev.
#
#   get_doctest.sh FOLDER
#
# FOLDER is where the package is unpacked where it cannot be installed.

set -eu
folder=${1:?"usage: get_doctest.sh FOLDER"}

look() {
  for candidate in /usr/include/doctest /usr/local/include/doctest \
    /usr/include /usr/local/include "$folder/usr/include/doctest"; do
    if [ -f "$candidate/doctest.h" ]; then
      # CMake wants an absolute path.
      (cd "$candidate" && pwd)
      exit 0
    fi
  done
}

look
if command -v apt-get >/dev/null; then
  if [ "$(id -u)" = 0 ]; then
    { apt-get update -qq && apt-get install -y -qq doctest-dev; } >&2 || true
    look
  fi
  mkdir -p "$folder"
  if (cd "$folder" && apt-get download -qq doctest-dev) >&2; then
    dpkg -x "$folder"/doctest-dev_*.deb "$folder"
    look
  fi
fi
echo "The C++ tests need doctest.h, but found none and could not get the" \
  "Debian package doctest-dev. Install doctest 2.4 from your system's packages." >&2
exit 1
