#include "cpu.h"

#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace octavo {

namespace {

#if defined(OCTAVO_EMULATE)
constexpr bool EMULATES = true;
#else
constexpr bool EMULATES = false;
#endif

#if defined(__x86_64__)
bool has_avx2() {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}

bool has_avx512() {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512vnni");
}

bool has_avx512_bf16() {
    unsigned a, b, c, d;
    return has_avx512() && __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & 1u << 5);
}

// Tiles of bytes and of bfloat16, and the kernel's leave to use them: it is given to a process once asked
// for, and threads inherit it.
bool has_amx() {
#if defined(__linux__)
    unsigned a, b, c, d;
    if (!has_avx512_bf16() || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
    const unsigned bf16 = 1u << 22, tile = 1u << 24, int8 = 1u << 25, all = bf16 | tile | int8;
    if ((d & all) != all) return false;
    constexpr long REQUEST = 0x1023, TILE_DATA = 18;  // ARCH_REQ_XCOMP_PERM
    static const bool is_granted = syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0;
    return is_granted;
#else
    return false;
#endif
}
#endif

}  // namespace

std::vector<std::string> emulated_sets() {
#if defined(__x86_64__)
    if (EMULATES && has_avx2()) return {"amx", "avx512_bf16", "avx512"};
#endif
    return {};
}

std::vector<std::string> instruction_sets() {
    std::vector<std::string> names;
#if defined(__x86_64__)
#if defined(OCTAVO_HAS_AMX)
    if (!EMULATES && has_amx()) names.push_back("amx");
#endif
#if defined(OCTAVO_HAS_AVX512_BF16)
    if (!EMULATES && has_avx512_bf16()) names.push_back("avx512_bf16");
#endif
#if defined(OCTAVO_HAS_AVX512)
    if (!EMULATES && has_avx512()) names.push_back("avx512");
#endif
#if defined(OCTAVO_HAS_AVX2)
    if (has_avx2()) names.push_back("avx2");
#endif
#endif
    names.push_back("generic");
    for (const std::string& name : emulated_sets()) names.push_back(name);
    return names;
}

const Kernels* find_kernels(const std::string& name) {
    for (const std::string& usable : instruction_sets()) {
        if (usable != name) continue;
#if defined(OCTAVO_HAS_AMX)
        if (name == "amx") return amx_kernels();
#endif
#if defined(OCTAVO_HAS_AVX512_BF16)
        if (name == "avx512_bf16") return avx512_bf16_kernels();
#endif
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
