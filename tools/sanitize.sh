#!/bin/sh
# Run the tests of the native library with address and undefined-behaviour sanitizers in it.
#
# usage: tools/sanitize.sh [PYTHON [PYTEST ARGUMENT...]]; by default those of the CPU executor.
#
# Those instruction sets are tested that the machine has; tiles of AMX are moved by inline assembly, whose reads and
# writes the compiler does not see. `EMULATE=ON tools/sanitize.sh` tests the emulated ones too, which takes long.
set -eu

python=${1:-python3}
[ $# -eq 0 ] || shift
# Left out by default: whole steps whose bits are compared, since test_cpu.py runs the same kernels; more of the
# same random batches; and a test of timing between Python's threads.
[ $# -gt 0 ] || set -- tests/executors/test_cpu*.py tests/executors/test_packing.py \
    tests/executors/test_native_sampling.py --deselect tests/executors/test_cpu_bits.py \
    -k "not (random_batches and (1 or 2 or 3)) and not other_python_threads"
root=$(cd "$(dirname "$0")/.." && pwd)
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
compiler=${CXX:-c++}

cd "$root"
# Checks of virtual tables need run-time type information, which nanobind is built without. The
# optimiser stays on: at -O0 the forced inlining of vector code takes minutes.
flags="-O1 -g -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize=vptr"
flags="$flags -fno-sanitize-recover=undefined"
# Unrolled vector code makes the compiler take minutes and gigabytes where each access is checked in
# line and each temporary has a scope to leave. Checks by calls, and one kind of check per access, do.
flags="$flags --param asan-instrumentation-with-call-threshold=0 -fno-sanitize-address-use-after-scope"
flags="$flags -fno-sanitize=null,alignment,object-size"
tools/native_site.sh "$folder" "$python" -DOCTAVO_EMULATE="${EMULATE:-OFF}" -DCMAKE_BUILD_TYPE=None \
    -DCMAKE_CXX_COMPILER="$compiler" -DCMAKE_CXX_FLAGS="$flags"

# Python is not instrumented itself: the sanitizers' library has to come first, and the C++ library
# before Python loads one, so that exceptions can be followed. Python never frees all it has.
LD_PRELOAD="$("$compiler" -print-file-name=libasan.so) $("$compiler" -print-file-name=libstdc++.so)"
export LD_PRELOAD
# pytest keeps to itself what a test prints, and a finding ends the process: so into a file, or past pytest.
export ASAN_OPTIONS="detect_leaks=0:strict_string_checks=1:log_path=$folder/finding"
export UBSAN_OPTIONS="print_stacktrace=1:log_path=$folder/finding"
export PYTHONPATH="$folder/site" PYTHONMALLOC=malloc
"$python" -c "
import octavo.native as native
assert native.__file__.startswith('$folder'), native.__file__
assert native.library is not None, native.why_missing
print('sanitizing', ', '.join(native.library.instruction_sets()))"
status=0
"$python" -m pytest -q --capture=sys -p no:cacheprovider -p no:xdist -m "not slow" "$@" || status=$?
for finding in "$folder"/finding*; do
    [ ! -e "$finding" ] || { cat "$finding"; status=1; }
done
exit $status
