#!/bin/sh
# Run the tests of the native library with AVX-512 and AMX emulated, so that any x86-64 with AVX2 will do.
#
# usage: tools/emulate.sh [PYTHON [PYTEST ARGUMENT...]]; by default every test of the kernels.
set -eu

cd "$(dirname "$0")/.."
python=${1:-python3}
[ $# -eq 0 ] || shift
[ $# -gt 0 ] || set -- -n 2 tests/executors/test_cpu*.py
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
