#!/bin/sh
# Run the tests of the native library with address and undefined-behaviour sanitizers in it.
#
# usage: tools/sanitize.sh [PYTHON [PYTEST ARGUMENT...]]; by default every test of the CPU executor.
#
# The library is built into a temporary folder, beside a copy of the package that finds it there: the
# checkout and its own library stay as they are. Instruction sets that cannot be instrumented are not
# hidden: AMX tiles are moved by inline assembly, whose reads and writes the compiler does not see, so
# for amx only the code around the tiles is checked, and what it computes, by the tests themselves.
set -eu

python=${1:-python3}
[ $# -eq 0 ] || shift
[ $# -gt 0 ] || set -- tests/executors/test_cpu.py tests/executors/test_cpu_attention.py \
    tests/executors/test_cpu_bits.py tests/executors/test_cpu_bounds.py \
    tests/executors/test_cpu_threads.py tests/executors/test_packing.py
root=$(cd "$(dirname "$0")/.." && pwd)
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
compiler=${CXX:-c++}

cd "$root"
# cmake may be the one that the development environment brings.
PATH="$(dirname "$("$python" -c 'import sys; print(sys.executable)')"):$PATH"
# Checks of virtual tables need run-time type information, which nanobind is built without. The
# optimiser stays on: at -O0 the forced inlining of vector code takes minutes.
flags="-O1 -g -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize=vptr"
flags="$flags -fno-sanitize-recover=undefined"
cmake -S . -B "$folder/build" -DCMAKE_BUILD_TYPE=None -DCMAKE_CXX_COMPILER="$compiler" \
    -DCMAKE_CXX_FLAGS="$flags" -DPython_EXECUTABLE="$("$python" -c 'import sys; print(sys.executable)')" \
    -Dnanobind_DIR="$("$python" -m nanobind --cmake_dir)" > "$folder/configure.log" 2>&1 ||
    { cat "$folder/configure.log"; exit 1; }
cmake --build "$folder/build" --parallel 2 > "$folder/build.log" 2>&1 ||
    { tail -50 "$folder/build.log"; exit 1; }

mkdir "$folder/site"
cp -R src/octavo "$folder/site/octavo"
rm -f "$folder"/site/octavo/native/_octavo*
cp "$folder"/build/_octavo*.so "$folder/site/octavo/native/"
# An editable install answers for octavo before PYTHONPATH is asked, so its finder has to go.
cat > "$folder/site/sitecustomize.py" <<'PYTHON'
import sys

sys.meta_path[:] = [f for f in sys.meta_path if type(f).__name__ != "ScikitBuildRedirectingFinder"]
PYTHON

# Python is not instrumented itself: the sanitizers' library has to come first, and the C++ library
# before Python loads one, so that exceptions can be followed. Python never frees all it has.
LD_PRELOAD="$("$compiler" -print-file-name=libasan.so) $("$compiler" -print-file-name=libstdc++.so)"
export LD_PRELOAD
# pytest keeps to itself what a test prints, and a finding ends the process: so into a file.
export ASAN_OPTIONS="detect_leaks=0:strict_string_checks=1:log_path=$folder/finding"
export UBSAN_OPTIONS="print_stacktrace=1:log_path=$folder/finding"
export PYTHONPATH="$folder/site" PYTHONMALLOC=malloc
"$python" -c "
import octavo.native as native
assert native.__file__.startswith('$folder'), native.__file__
assert native.library is not None, native.why_missing
print('sanitizing', ', '.join(native.library.instruction_sets()))"
status=0
"$python" -m pytest -q -p no:cacheprovider -p no:xdist -m "not slow" "$@" || status=$?
for finding in "$folder"/finding*; do
    [ ! -e "$finding" ] || { cat "$finding"; status=1; }
done
exit $status
