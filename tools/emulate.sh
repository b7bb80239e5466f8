#!/bin/sh
# Run the tests of the native library with AVX-512 and AMX emulated, so that any x86-64 with AVX2 will do.
#
# usage: tools/emulate.sh [PYTHON [PYTEST ARGUMENT...]]; by default most tests of the kernels.
set -eu

cd "$(dirname "$0")/.."
python=${1:-python3}
[ $# -eq 0 ] || shift
# Left out by default, since emulated rows take long: thousands of them, by more threads than there are processors.
[ $# -gt 0 ] || set -- -n 2 tests/executors/test_cpu*.py \
    -k "not any_number_of_threads and not random_families and not shared_beginning and not other_python_threads"
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

tools/native_site.sh "$folder" "$python" -DOCTAVO_EMULATE=ON
export PYTHONPATH="$folder/site"
"$python" -c "
import octavo.native as native
assert native.__file__.startswith('$folder'), native.__file__
assert native.library is not None, native.why_missing
print('emulating', ', '.join(native.library.emulated) or 'nothing: this machine lacks AVX2')"
"$python" -m pytest -q -p no:cacheprovider -m "not slow" "$@"
