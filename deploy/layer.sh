#!/bin/sh
# Builds one layer of an image (deploy/Dockerfile).
#
#   layer.sh install ARGUMENTS   pip install into /opt/rollmesh, at the versions of constraints.txt
#   layer.sh everything          all of /opt/rollmesh becomes /layer
#   layer.sh news                files installed since the last layer become /layer
#
# Layers hold files and links by their time of change: no file of an earlier layer is replaced, because pip keeps
# installed packages that fit.
set -eu

case "$1" in
install)
  shift
  exec /opt/pip/bin/pip --python /opt/rollmesh/bin/python install --quiet --no-warn-script-location \
    --root-user-action=ignore --constraint constraints.txt "$@"
  ;;
everything)
  mkdir -p /layer/opt
  cp -a /opt/rollmesh /layer/opt/
  ;;
news)
  rm -rf /layer
  mkdir /layer
  find /opt/rollmesh -cnewer layer.mark \( -type f -o -type l \) -print0 > news.list
  tar --create --absolute-names --null --no-recursion --files-from news.list | tar --extract --directory /layer
  ;;
*)
  echo "layer.sh: install, everything or news, not $1" >&2
  exit 2
  ;;
esac
touch layer.mark
