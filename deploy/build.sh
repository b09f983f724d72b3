#!/bin/sh
# Builds images of deploy/Dockerfile:  deploy/build.sh TARGET... [-- ARGUMENTS OF docker build]
#
# Environment: REGISTRY (put before the names, with its slash), VERSION (tag; by default pyproject.toml's), DOCKER, and
# the arguments of the Dockerfile: BASE_IMAGE, TORCH, TORCH_INDEX, EXTRAS, SGLANG_PYTHON, SOURCE. The target
# generator-cpu becomes the image rollmesh/generator, the others have the name of their target.
set -eu
cd "$(dirname "$0")/.."
docker=${DOCKER:-docker}
version=${VERSION:-$(sed -n 's/^version = "\(.*\)"$/\1/p' pyproject.toml)}
targets=
while [ $# -gt 0 ] && [ "$1" != -- ]; do
  targets="$targets $1"
  shift
done
[ $# = 0 ] || shift
[ -n "$targets" ] || { sed -n '2,3s/^# //p' "$0" >&2; exit 2; }

for argument in BASE_IMAGE TORCH TORCH_INDEX EXTRAS SGLANG_PYTHON SOURCE; do
  eval "value=\${$argument:-}"
  # shellcheck disable=SC2154 # set by eval
  [ -z "$value" ] || set -- --build-arg "$argument=$value" "$@"
done
# Unknown outside of a checkout.
revision=$(git rev-parse HEAD 2>/dev/null || echo unknown)
created=$(git log -1 --format=%cI 2>/dev/null || echo 1970-01-01T00:00:00Z)

for target in $targets; do
  name=$target
  [ "$target" != generator-cpu ] || name=generator
  image=${REGISTRY:-}rollmesh/$name
  DOCKER_BUILDKIT=1 "$docker" build --file deploy/Dockerfile --target "$target" --tag "$image:$version" \
    --tag "$image:latest" --build-arg "VERSION=$version" --build-arg "REVISION=$revision" \
    --build-arg "CREATED=$created" "$@" .
done
