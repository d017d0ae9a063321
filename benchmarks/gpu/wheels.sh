#!/bin/sh
# Fills a folder with the wheels that run.py needs on a machine that reaches no package index: Python 3.12 on x86-64, where torch
# with CUDA, transformers, numpy, safetensors, typer, rich and packaging are installed already.
#
#     sh benchmarks/gpu/wheels.sh [FOLDER]
#     python3 -m pip install --no-index --no-deps --target SITE FOLDER/*.whl
set -eu
case ${1:-} in -*) sed -n '2,5s/^# \{0,1\}//p' "$0"; [ "$1" = --help ] || [ "$1" = -h ]; exit ;; esac
here=$(CDPATH= cd -- "$(dirname "$0")" && pwd)
folder=${1:-$here/wheels}
packages="pydantic pydantic_core annotated-types typing-inspection typing_extensions hjson ruamel.yaml
    hypothesis sortedcontainers pytest pluggy iniconfig"
platforms=""
for glibc in 2_34 2_28 2_27 2_24 2_17 2_12 2_5; do platforms="$platforms --platform manylinux_${glibc}_x86_64"; done
for old in 2014 2010 1; do platforms="$platforms --platform manylinux${old}_x86_64"; done
wanted=""
for package in $packages; do
    pin=$(grep -i "^$package==" "$here/../../constraints.txt") || { echo "constraints.txt: no version of $package" >&2; exit 1; }
    wanted="$wanted $pin"
done
mkdir -p "$folder"
new=$(mktemp -d "$folder/.new.XXXXXX")
trap 'rm -rf "$new"' EXIT
# shellcheck disable=SC2086 - lists of words
python3 -m pip download --quiet --no-deps --only-binary=:all: --python-version 3.12 --implementation cp --abi cp312 --abi abi3 \
    --abi none $platforms --dest "$new" $wanted
# Older versions of the same packages go, now that the new ones are there.
for wheel in "$new"/*.whl; do
    name=$(basename "$wheel")
    rm -f "$folder/${name%%-*}"-*.whl
done
mv "$new"/*.whl "$folder"
size=$(du -sm "$folder" | cut -f1)
echo "$folder: $(ls "$folder" | wc -l) wheels, $size MiB"
[ "$size" -lt 60 ] || { echo "$folder: $size MiB, expected less than 60" >&2; exit 1; }
