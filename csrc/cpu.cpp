#include "cpu.h"

namespace octavo {

namespace {

#if defined(__x86_64__)
bool has_avx2() {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}

bool has_avx512() {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512vnni");
}
#endif

}  // namespace

std::vector<std::string> instruction_sets() {
    std::vector<std::string> names;
#if defined(__x86_64__)
#if defined(OCTAVO_HAS_AVX512)
    if (has_avx512()) names.push_back("avx512");
#endif
#if defined(OCTAVO_HAS_AVX2)
    if (has_avx2()) names.push_back("avx2");
#endif
#endif
    names.push_back("generic");
    return names;
}

const Kernels* find_kernels(const std::string& name) {
    for (const std::string& usable : instruction_sets()) {
        if (usable != name) continue;
#if defined(OCTAVO_HAS_AVX512)
        if (name == "avx512") return avx512_kernels();
#endif
#if defined(OCTAVO_HAS_AVX2)
        if (name == "avx2") return avx2_kernels();
#endif
        return generic_kernels();
    }
    return nullptr;
}

}  // namespace octavo
