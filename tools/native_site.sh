#!/bin/sh
# Build the native library in a way of its own, beside a copy of the package that finds it there.
#
# usage: tools/native_site.sh FOLDER PYTHON [CMAKE ARGUMENT...]; FOLDER/site is then for PYTHONPATH. The checkout and
# its own library stay as they are.
set -eu

folder=$1 python=$2
shift 2
cd "$(dirname "$0")/.."
python=$("$python" -c 'import sys; print(sys.executable)')
# cmake may be the one that the development environment brings.
PATH="$(dirname "$python"):$PATH"
cmake -S . -B "$folder/build" -DPython_EXECUTABLE="$python" -Dnanobind_DIR="$("$python" -m nanobind --cmake_dir)" \
    "$@" > "$folder/configure.log" 2>&1 || { cat "$folder/configure.log"; exit 1; }
cmake --build "$folder/build" --parallel 2 > "$folder/build.log" 2>&1 || { tail -50 "$folder/build.log"; exit 1; }

rm -rf "$folder/site"
mkdir "$folder/site"
cp -R src/octavo "$folder/site/octavo"
rm -f "$folder"/site/octavo/native/_octavo*
cp "$folder"/build/_octavo*.so "$folder/site/octavo/native/"
# An editable install answers for octavo before PYTHONPATH is asked, so its finder has to go.
cat > "$folder/site/sitecustomize.py" <<'PYTHON'
import sys

sys.meta_path[:] = [f for f in sys.meta_path if type(f).__name__ != "ScikitBuildRedirectingFinder"]
PYTHON
